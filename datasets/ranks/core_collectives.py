"""What computation on one core loses to collectives of gloo beside it. Imports torch.

gloo's threads and the rank share the core, and what they carry pushes the rank's operands out of
the caches. GPUs: `foreplan.datasets.ranks.gpu_collectives`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

#: Rows of square products, how much longer than the collectives these take alone, and how often
#: both are timed (chosen).
_ROWS, _LONGER, _TURNS = 512, 3.0, 5


def lost_on_core(
    start: Callable[[], Any], count: int, meet: Callable[[], object], agree: Callable[[float], int]
) -> float:
    """Seconds that the core is busy for longer, whoever else uses it, for one of several.

    Args:
        start: begins a collective; what it returns is waited for.
        count: how many start together; 0 on a rank that only keeps step.
        meet: makes all ranks meet.
        agree: the first rank's number, at least 1, from each rank's.
    """
    a = torch.randn(_ROWS, _ROWS)

    def run(products: int, together: int) -> float:
        meet()
        started = time.process_time()
        works = [start() for _ in range(together)]
        for _ in range(products):
            torch.mm(a, a)
        for work in works:
            work.wait()
        return time.process_time() - started

    link_s = min(run(0, count) for _ in range(3))
    once_s = min(run(1, 0) for _ in range(3))
    products = agree(_LONGER * link_s / max(once_s, 1e-6))
    lost = [run(products, count) - run(products, 0) for _ in range(_TURNS)]
    return statistics.median(lost) / max(count, 1)
