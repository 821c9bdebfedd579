"""Measurement: what timing one program gave."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

#: Sorted times kept of one measurement; enough for every percentile that is reported.
KEPT = 41


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of repeated calls of one program in one process.

    Attributes:
        times_s: at most `KEPT` evenly spaced order statistics of the samples, sorted, in seconds a
            call; empty if the program failed.
        samples: how many samples there were.
        calls: calls in one sample (tiny programs are timed several at once).
        preempted: samples during which the scheduler gave a core to another process.
        cache_state: what was cold and what warm.
        load: other work on this machine: the one-minute load average when it began.
        clock_hz: clock of the device right after, ``None`` where it cannot be read.
        error: one line on why it failed, ``None`` if it did not.
        mean_s: mean time of a call in seconds; on a CPU on the wall, also of samples during which
            another process had the core. ``None`` of one that failed, or of an earlier version.
        issue_s: of a GPU, seconds that the host takes to issue a call; ``None`` of a call that is
            so long that the host is done with it anyhow.
    """

    times_s: tuple[float, ...]
    samples: int
    calls: int = 1
    preempted: int = 0
    cache_state: str = ""
    load: float | None = None
    clock_hz: float | None = None
    error: str | None = None
    mean_s: float | None = None
    issue_s: float | None = None

    @classmethod
    def failed(cls, error: str) -> Measurement:
        """A measurement that gave nothing."""
        return cls((), 0, error=" ".join(error.split())[:300] or "failed")

    @property
    def median_s(self) -> float:
        """Median time of a call, in seconds."""
        return percentiles([self])[1]


def thin(times_s: Iterable[float]) -> tuple[float, ...]:
    """At most `KEPT` evenly spaced order statistics of some times."""
    ordered = sorted(times_s)
    if len(ordered) <= KEPT:
        return tuple(ordered)
    return tuple(float(t) for t in np.quantile(ordered, np.linspace(0, 1, KEPT)))


def percentiles(parts: Iterable[Measurement]) -> tuple[float, float, float]:
    """10th percentile, median and 90th percentile over several measurements of a program.

    Each part counts the same, however many samples it has, so that the spread between parts
    (taken minutes apart) shows.
    """
    times: list[float] = []
    weights: list[float] = []
    for part in parts:
        times += part.times_s
        weights += [1 / len(part.times_s)] * len(part.times_s)
    order = np.argsort(times, kind="stable")
    values, mass = np.asarray(times)[order], np.asarray(weights)[order]
    centres = (np.cumsum(mass) - mass / 2) / mass.sum()
    low, median, high = np.interp([0.1, 0.5, 0.9], centres, values)
    return float(low), float(median), float(high)
