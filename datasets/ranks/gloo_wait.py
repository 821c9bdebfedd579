"""Waiting for gloo on a rank that has one core: `wait_awake`, `nicer_reader`, `patient_reader`.

gloo reads its sockets on a thread that tries a connection's lock and, where another of its threads
has it, asks the kernel for the next event, which is the same one, until that other thread lets go
(gloo, ``transport/tcp/pair.cc``, ``handleEvents``). Where both share a core the reader goes round
like that until the kernel takes the core from it, which is at a tick: every 4 ms at 250 Hz. A sum
of 12 KB between two such ranks then takes 1.4 to 4.7 ms, of which the reader computes 1; without
these turns it takes 0.1. Two things help, most of all together (0.2 to 0.5 ms, all measured on a
busy machine by ``tests/benchmarks/collective_waits.py``): who waits gives way again and again
instead of sleeping, and the reader is nicer than the thread that it would interrupt.

Messages come beside computation, where a nicer reader would hardly get the core. Theirs is patient:
it never interrupts. Two ranks that send to each other at the same time, passes of 0.5 ms, took 105
to 133 ms for 31 tokens with an eager reader and 55 to 61 with a patient one (measured, the same
plan of two micro-batches in flight on two cores of an EPYC; with one in flight 81-91 and 70-81).

What is measured and what is run wait alike, so that a profile prices what a run pays.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: How long to stay awake, in nanoseconds: a tick of the slowest usual kernel (100 Hz). Who waits
#: for longer waits for another rank's computation, and its core may sleep meanwhile.
_AWAKE_NS = 10_000_000
#: By how much the reader is nicer. 5 helps little; 19 most of all, but then somebody else's
#: process on the core makes a sum take 76 ms, where 10 and 0 take about as long (measured).
_NICER = 10
#: Linux's highest niceness, and the name of the reader.
_NICEST, _READER = 19, "gloo_tcp_loop"


def wait_awake(work: Any, kind: str) -> None:
    """Return when a collective is done, like its ``wait``.

    Args:
        work: what an asynchronous collective of a gloo group returned.
        kind: which one, as ``all_reduce``. A ``reduce_scatter`` is waited for asleep: torch sums a
            copy and takes this rank's part of it in ``wait``, so that before it is never completed.

    Raises:
        RuntimeError: as ``work.wait``: another rank has gone, or the group's time was up.
    """
    until = time.monotonic_ns() + (0 if kind == "reduce_scatter" else _AWAKE_NS)
    while not work.is_completed() and time.monotonic_ns() < until:
        os.sched_yield()
    work.wait()


@contextlib.contextmanager
def nicer_reader() -> Iterator[None]:
    """Make gloo's reader nicer in the groups that are opened inside; see the module.

    For groups whose collectives are waited for on the spot: beside computation a nicer reader
    would hardly get the core. A reader of another name stays as it is.
    """
    before = _readers()
    yield
    for thread in _readers() - before:
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + _NICER, _NICEST))


@contextlib.contextmanager
def patient_reader() -> Iterator[None]:
    """Let gloo's reader not interrupt a thread of its core, in the groups that are opened inside.

    For messages; see the module. Under Linux's policy of batches the reader gets the core when
    whoever has it waits, or at a tick. Where a host forbids that, the reader stays as it is.
    """
    before = _readers()
    yield
    for thread in _readers() - before:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _readers() -> set[int]:
    """Threads of this process on which gloo reads."""
    found = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it may have ended by now
            if (task / "comm").read_text() == f"{_READER}\n":
                found.add(int(task.name))
    return found
