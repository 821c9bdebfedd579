"""`bounded`: what a reader may do with any input, however broken.

The outcome is a result or a `ForeplanError` of one line, within `SECONDS` and `MEMORY_BYTES`.
Anything else (another exception, a hang, memory) passes through and fails the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foreplan.errors import ForeplanError

#: A case takes milliseconds; two cores shared with other tests make some slow.
SECONDS = 30.0
#: What a case may map beyond what the process had before it.
MEMORY_BYTES = 1 << 30


class Hung(BaseException):
    """A case took longer than `SECONDS`."""


@contextlib.contextmanager
def bounded(seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Interrupt what runs longer than ``seconds`` and refuse it memory beyond ``memory_bytes``."""

    def hung(*_: object) -> None:
        raise Hung(f"longer than {seconds} s")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, hung)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)  # a hang in C hears no signal
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[[], Any]) -> str | None:
    """Run a reader; the line it refuses its input with, ``None`` where it takes it."""
    with bounded():
        try:
            call()
        except ForeplanError as error:
            line = str(error)
            assert line.strip(), "an error without words"
            assert len(line.splitlines()) == 1, f"an error of several lines: {line!r}"
            assert len(line) < 4000, f"an error of {len(line)} characters"
            return line
    return None
