"""Standard output around libraries that print on it."""

import ctypes
import os

import pytest

from foreplan.planner.silent import silent_stdout


def test_what_a_library_prints_is_not_heard_and_what_we_print_is(capfd):
    c = ctypes.CDLL(None)
    print("before")
    with silent_stdout():
        c.puts(b"debugging")  # stays in C's buffer where standard output is no terminal
        os.write(1, b"more of it\n")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_standard_output_is_back_after_an_error(capfd):
    with pytest.raises(ValueError, match="inside"), silent_stdout():
        raise ValueError("inside")
    print("after")
    assert capfd.readouterr().out == "after\n"
