"""`compiled`: numba's compiler as our inner loops use it, its code kept on disk where possible."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba

#: Seconds after which who waits at a terminal is told what for.
_PATIENCE_S = 2.0


def compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called, without the interpreter's lock, and keep the machine code.

    numba keeps it beside the module or, where that is read-only, in the user's cache folder; with
    neither it refuses, and then every process compiles for itself (seconds) instead of failing.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # "no locator available": nowhere to write
        return numba.njit(nogil=True)(function)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say at a terminal that code is compiled, if a block takes longer than ready code would.

    Args:
        what: the code is for.
    """
    if not sys.stderr.isatty():
        yield
        return
    line = f"compiling {what}, once on this machine; about half a minute"
    timer = threading.Timer(_PATIENCE_S, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
