"""`silent_stdout`: for libraries whose C code prints on standard output, whatever their options."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STDOUT = 1


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Send what the block writes to the process's standard output to nowhere.

    The HiGHS inside scipy 1.17 prints a line of its own debugging
    (``transformNewIntegerFeasibleSolution``), also where JSON has to stand alone. What others
    print meanwhile is lost, too: a block prints nothing of its own.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    c = ctypes.CDLL(None)
    c.fflush(None)
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # closed: nobody hears it
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDOUT)
        yield
    finally:
        c.fflush(None)
        os.dup2(kept, _STDOUT)
        os.close(nowhere)
        os.close(kept)
