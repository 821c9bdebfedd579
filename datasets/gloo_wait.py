"""`wait_awake`: waits for a collective of gloo without leaving the core at once.

gloo reads its sockets on a thread that tries a connection's lock and, where another of its threads
has it, asks the kernel for the next event, which is the same one, until that other thread lets go
(gloo, ``transport/tcp/pair.cc``, ``handleEvents``). In a rank that has one core both run there, so
that the reader turns round until a tick of the kernel takes the core from it: every 4 ms at 250 Hz.
A sum of 12 KB between two such ranks takes 0.1 ms where that does not happen and a mean of 1.4 to
3.5 ms where it may (measured: the reader then uses 1 ms of the core a sum, else 0.02). A caller
that gives way again and again instead of sleeping has the scheduler choose anew sooner:
0.5 to 1.9 ms under the same load (``tests/benchmarks/collective_waits.py``).

What is measured and what is run wait alike, so that a profile prices what a run pays.
"""

from __future__ import annotations

import os
import time
from typing import Any

#: How long to stay awake, in nanoseconds: a tick of the slowest usual kernel (100 Hz). Who waits
#: for longer waits for another rank's computation, and its core may sleep meanwhile.
_AWAKE_NS = 10_000_000


def wait_awake(work: Any) -> None:
    """Return when a collective is done, like its ``wait``.

    Args:
        work: what an asynchronous collective of a gloo group returned.

    Raises:
        RuntimeError: as ``work.wait``: another rank has gone, or the group's time was up.
    """
    until = time.monotonic_ns() + _AWAKE_NS
    while not work.is_completed() and time.monotonic_ns() < until:
        os.sched_yield()
    work.wait()
