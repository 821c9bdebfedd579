"""`told_steps`, `told_step`: what a long command is at, told on a terminal or in a log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Seconds after which a command that is mostly quick counts as a long one.
QUICK_S = 10.0


@contextlib.contextmanager
def told_steps(
    console: Console, first: str = "starting", *, logged: bool = True, quick_s: float = QUICK_S
) -> Iterator[Callable[[str], None]]:
    """What tells the next step, until the block ends.

    A spinner shows nothing in a log: there every step is a line of its own, after the seconds since
    the start.

    Args:
        console: where people read.
        first: the step that the block starts with.
        logged: whether a log gets these lines from the start; of a command that is mostly quick it
            gets the step at hand and all that follow once it has taken ...
        quick_s: ... so many seconds.
    """
    with console.status(first) as status:
        if console.is_terminal:
            yield status.update
            return
        log = _Log(console, first, told=logged)
        timer = threading.Timer(quick_s, log.begin)
        timer.daemon = True
        if not logged:
            timer.start()
        try:
            yield log.line
        finally:
            timer.cancel()


@contextlib.contextmanager
def told_step(console: Console, text: str) -> Iterator[None]:
    """One step that takes a while: a spinner on a terminal, a line in a log.

    Args:
        console: where people read.
        text: what is done.
    """
    if not console.is_terminal:
        console.print(text, markup=False, highlight=False)
    with console.status(text):
        yield


class _Log:
    """Lines with the seconds since the start."""

    def __init__(self, console: Console, first: str, *, told: bool) -> None:
        self._console, self._step, self._told = console, first, told
        self._start, self._lock = time.monotonic(), threading.Lock()

    def line(self, text: str) -> None:
        """The next step."""
        with self._lock:
            self._step = text
            if self._told:
                self._print()

    def begin(self) -> None:
        """Tell from now on, the step at hand first."""
        with self._lock:
            self._told = True
            self._print()

    def _print(self) -> None:
        spent = f"{time.monotonic() - self._start:6.1f} s"
        self._console.print(f"{spent}  {self._step}", markup=False, highlight=False)
