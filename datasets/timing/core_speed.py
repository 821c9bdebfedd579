"""`core_speeds`: how steadily the cores of a host run, one alone and all at once.

A core whose sibling thread belongs to another guest of the host runs at half of its speed while
that one works, and no counter says so. On hosts that share their cores a step's time is then a
matter of luck: on a virtual Xeon slow windows took 1.9 times quick ones with one core at work, and
2.0 to 2.6 with all (docs/results/bubbles.md), with no time reported as stolen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

#: Values of an array that a core's own caches hold. Their sines take some 0.3 ms, in which a thread
#: does not hold Python's lock.
_VALUES = 1 << 15


class CoreSpeeds(NamedTuple):
    """Seconds of a call of one small loop.

    Attributes:
        cores: that were looked at.
        alone_s: mean in each window, (windows, cores), one core at work after the other.
        together_s: likewise with all of them at work.
    """

    cores: tuple[int, ...]
    alone_s: FloatArray
    together_s: FloatArray

    @property
    def alone(self) -> float:
        """What slow windows of one core take over quick ones of any (95 over 5 of 100)."""
        return _spread(self.alone_s)

    @property
    def together(self) -> float:
        """Likewise of all cores at once, over quick windows of one alone."""
        return float(np.quantile(self.together_s, 0.95) / np.quantile(self.alone_s, 0.05))


def core_speeds(cores: Sequence[int], *, windows: int = 8, window_s: float = 0.02) -> CoreSpeeds:
    """Time a loop on each core, in turn and at once.

    Time is what a thread was given of its core, so that other processes of this system, which the
    load tells of, do not count.

    Args:
        cores: that this process may use.
        windows: of each core, both ways.
        window_s: how long one is, in seconds.

    Raises:
        OSError: a core that this process may not use.
    """
    alone = [[_windows([core], 1, window_s)[0][0] for core in cores] for _ in range(windows)]
    together = _windows(cores, windows, window_s)
    return CoreSpeeds(tuple(cores), np.array(alone), np.array(together).T)


def _spread(seconds: FloatArray) -> float:
    low, high = np.quantile(seconds, (0.05, 0.95))
    return float(high / low)


def _windows(cores: Sequence[int], windows: int, window_s: float) -> list[list[float]]:
    """Mean seconds of a call in each window, on each of several cores at once."""
    found: list[list[float]] = [[] for _ in cores]
    errors: list[OSError] = []
    begin = threading.Barrier(len(cores))

    def work(core: int, mine: list[float]) -> None:
        try:
            os.sched_setaffinity(0, {core})  # of this thread
        except OSError as error:
            errors.append(error)
        values = np.linspace(1.0, 2.0, _VALUES)
        out = np.empty_like(values)
        begin.wait()
        for _ in range(0 if errors else windows):
            calls, end_s, begun_s = 0, time.perf_counter() + window_s, time.thread_time()
            while not calls or time.perf_counter() < end_s:
                np.sin(values, out=out)
                calls += 1
            mine.append((time.thread_time() - begun_s) / calls)

    threads = [
        threading.Thread(target=work, args=(core, mine))
        for core, mine in zip(cores, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
