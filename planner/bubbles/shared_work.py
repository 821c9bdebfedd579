"""`shared_work_s`: a lower bound for work that ranks of unlike speed share."""

from __future__ import annotations

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
