"""`told_steps`: the steps of a long command, told on a terminal or in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def told_steps(
    console: Console, first: str = "starting", *, logged: bool = True
) -> Iterator[Callable[[str], None]]:
    """What tells the next step, until the block ends.

    A spinner shows nothing in a log: there every step is a line of its own, after the seconds since
    the start.

    Args:
        console: where people read.
        first: the step that the block starts with.
        logged: whether a log gets these lines; of a command that is mostly quick it does not.
    """
    start = time.monotonic()

    def line(text: str) -> None:
        if not logged:
            return
        spent = f"{time.monotonic() - start:6.1f} s"
        console.print(f"{spent}  {text}", markup=False, highlight=False)

    with console.status(first) as status:
        yield status.update if console.is_terminal else line
