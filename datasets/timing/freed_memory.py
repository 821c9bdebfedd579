"""What glibc does with memory that was freed. Where libc is another, nothing is done about it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
#: The largest that glibc takes on 64 bits; larger blocks always have a mapping of their own.
_MOST_MAPPED = 32 << 20
_NEVER = (1 << 31) - 1  # the parameter is an int


def keep_freed_memory() -> None:
    """Let this process keep the memory that a step frees for the next step.

    By default glibc gives it back, and every step faults the pages of its activations in again: on
    two cores of an EPYC a step of 26 MB of weights took 203 ms, and 193 in two runs minutes later
    with these settings from the environment (docs/results/precision.md; the host's speed drifts).
    A program that is measured alone does the same: one profile of a step of width 384 took 3.5
    million page faults, and 2.4 million with these settings from the environment (one core of a Zen
    5, docs/results/bubbles_history.md). So the worker that measures and the ranks that run both
    keep it.
    """
    libc = glibc()
    if libc is not None:
        libc.mallopt(M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(M_MMAP_THRESHOLD, _MOST_MAPPED)


def glibc() -> Any:
    """The C library of this process, or ``None`` if it is another's."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None
