"""`lag`: what ranks that do the same work and then meet wait for the slowest of them.

A collective that all take part in begins when the last one comes. Cores that are alike by name
differ: they share a physical core with somebody, or change their speed; and every operator takes a
little longer now and then. So each rank waits, between two meetings, for the expected greatest of
their times less the mean: on eight cores of a virtual machine a tenth of what it computes
(docs/results/bubbles.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def lag(seconds: npt.ArrayLike) -> float:
    """Mean wait for the slowest of a group, over the mean of what its ranks compute in between.

    Args:
        seconds: what equal work took every rank of every group, at the same time, shape ``(groups,
            ranks, times)``.

    Returns:
        At least 0; 0 for groups of one rank, and for ranks that always take equally long.
    """
    took = np.asarray(seconds, dtype=float)
    return float(max(0.0, took.max(axis=1).mean() / took.mean() - 1.0))
