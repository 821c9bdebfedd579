"""Who waits for a compiler at a terminal is told so, and nobody else is."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from foreplan import _compiled


class Stream(io.StringIO):
    """Standard error, which may be a terminal, and says when something was written."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_a_long_block_is_told_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "_PATIENCE_S", 0.0)
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with _compiled.told("how programs are read"):
        assert stream.written.wait(30.0)
    assert stream.getvalue().startswith("compiling how programs are read, once on this machine")


@pytest.mark.parametrize(("terminal", "patience_s"), [(True, 60.0), (False, 0.0)])
def test_a_short_block_and_a_pipe_are_told_nothing(
    terminal: bool, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compiled, "_PATIENCE_S", patience_s)
    stream, before = Stream(terminal), threading.active_count()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="inside"), _compiled.told("x"):
        raise ValueError("inside")
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(30.0)
    assert stream.getvalue() == ""
    assert threading.active_count() <= before
