"""`Watchdog`: turns a phase that does not end into a message that names it.

Libraries that connect ranks wait for one another inside calls that no exception leaves: a rank that
never joins, a device that never answers. So a thread watches, says what the process was doing and
where, and ends it, well before the leader loses patience with a silent rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

#: Seconds that processes may take to connect to each other; NCCL on eight GPUs takes ten.
CONNECTING_S = 45.0
#: For asking where the phase stands: a driver that hangs may not answer either.
_DETAIL_S = 2.0
#: A call that keeps Python's lock silences our thread: the interpreter then prints all stacks.
_LAST_RESORT_S = 5.0


class Watchdog:
    """See the module.

    Args:
        say: takes the message, on another thread than the one that hangs.
        end: ends the process.
    """

    def __init__(
        self, say: Callable[[str], None], end: Callable[[], None] = lambda: os._exit(1)
    ) -> None:
        self._say, self._end = say, end

    @contextlib.contextmanager
    def phase(
        self, doing: str, limit_s: float = CONNECTING_S, detail: Callable[[], str] | None = None
    ) -> Iterator[None]:
        """Watch a block; call it from the thread that runs the block.

        Args:
            doing: what the block does, as in "loading kernels".
            limit_s: after which the process ends.
            detail: says on another thread what else is known of where the block stands.
        """
        thread = threading.get_ident()
        timer = threading.Timer(limit_s, self._overdue, (doing, limit_s, thread, detail))
        timer.daemon = True
        timer.start()
        with contextlib.suppress(ValueError, OSError):  # no standard error
            faulthandler.dump_traceback_later(limit_s + _LAST_RESORT_S, exit=True)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _overdue(
        self, doing: str, limit_s: float, thread: int, detail: Callable[[], str] | None
    ) -> None:
        where = _place(sys._current_frames().get(thread))
        known = "" if detail is None else _told(detail)
        try:
            self._say(f"{doing} took more than {limit_s:.0f} s; it stands at {where}{known}")
        finally:
            self._end()


def _told(detail: Callable[[], str]) -> str:
    """What ``detail`` says, if it says it soon."""
    said: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever a broken device raises: less is known then
            said.append(f"; {detail()}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_DETAIL_S)
    return "".join(said)


def _place(frame: FrameType | None) -> str:
    """Innermost call, and the innermost line of ours above it."""
    words: list[str] = []
    while frame is not None:
        ours = str(frame.f_globals.get("__name__", "")).startswith("foreplan")
        if not words or ours:
            words.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
        if ours:
            break
        frame = frame.f_back
    return " in ".join(words) or "an unknown place"
