"""Work that ranks of unlike speed share: `shared_work_s`, a lower bound, and `dealt_s`."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shared_work_s(seconds: Sequence[Sequence[float]], counts: Sequence[float]) -> float:
    """Seconds that ranks of unlike speed need at least for work that they share as they like.

    With the times of some rank as a measure, no rank works off more of it in a second than
    ``max_k measure_k / seconds[r][k]``; the largest of the bounds that the measures give. Where all
    ranks are alike it is the average work of a rank.

    Args:
        seconds: ``[rank][kind]``, of one piece of work of each kind.
        counts: pieces of each kind.
    """
    best = 0.0
    kinds = [k for k, count in enumerate(counts) if count > 0]
    for measure in seconds:
        total = sum(counts[k] * measure[k] for k in kinds)
        if any(measure[k] > 0 and row[k] <= 0 for row in seconds for k in kinds):
            continue  # a rank that does some of it in no time
        rate = sum(max((measure[k] / row[k] for k in kinds if row[k] > 0), default=1.0)
                   for row in seconds)  # fmt: skip
        best = max(best, total / rate if rate > 0 else 0.0)
    return best


def dealt_s(seconds: Sequence[float], count: int, least: int) -> list[float]:
    """Seconds of each rank where like pieces are dealt so that the longest rank is shortest.

    Pieces are cut as finely as it takes, apart from those that a rank has at least. Where all ranks
    are alike each has its even share.

    Args:
        seconds: of one piece on each rank.
        count: pieces.
        least: pieces of a rank at least; ``count`` is enough for that.
    """
    if len(set(seconds)) == 1 or min(seconds) <= 0.0:
        return [count / len(seconds) * each for each in seconds]
    fast, longest = list(range(len(seconds))), 0.0
    while fast:
        left = count - least * (len(seconds) - len(fast))
        longest = left / math.fsum(1.0 / seconds[rank] for rank in fast)
        # Who takes longer than that for the least gets no more; the others share the rest anew.
        slow = [rank for rank in fast if longest < least * seconds[rank]]
        if not slow:
            break
        fast = [rank for rank in fast if rank not in slow]
    return [longest if r in fast else least * each for r, each in enumerate(seconds)]
