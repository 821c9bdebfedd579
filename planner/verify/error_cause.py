"""`error_cause`: whether a predicted time is off because ranks waited or because work was off.

A rank's time is its work (what occupies its compute resource) and the rest of the total, in which
it waits: for transfers, for other ranks, for the host. A plan's error therefore splits, on every
rank, into an error of its work and one of its waiting.
"""

from __future__ import annotations

from foreplan.planner.report.text import seconds, words
from foreplan.planner.verify.verification import CandidateResult, RankResult

#: An error beyond this is explained even where it passes (chosen: what plans are meant to be
#: within); a smaller one only where the tolerance is smaller still.
WORTH_SAYING = 0.05
#: Of an error, what makes more than this share of it is its cause (by definition of "most").
_MOST = 0.5


def error_cause(chosen: CandidateResult, tolerance: float) -> str | None:
    """Say in one line where most of a plan's error comes from.

    It is work where the ranks whose own work is off by more than half of the plan's relative error,
    in its direction, are together off by more than half of its seconds; then the phase that is off
    by most seconds is named. Else it is waiting, and the rank is named whose waiting is off most.

    Args:
        chosen: the plan's own decision, predicted and measured.
        tolerance: largest error that passes, a share.

    Returns:
        A line without a full stop; ``None`` where the error exceeds neither the tolerance nor
        `WORTH_SAYING`, and where nothing was predicted or measured of the ranks.
    """
    measured, predicted, error = chosen.measured_s, chosen.predicted_s, chosen.error
    if measured is None or predicted is None or error is None:
        return None
    ranks = [(k, r, r.predicted_s) for k, r in enumerate(chosen.ranks) if r.predicted_s is not None]
    if error <= min(tolerance, WORTH_SAYING) or not ranks:
        return None
    sign = 1.0 if measured > predicted else -1.0
    late = abs(measured - predicted)
    off = [
        (k, rank, sign * (rank.measured_s - price))
        for k, rank, price in ranks
        if sign * (rank.measured_s - price) * measured > _MOST * late * rank.measured_s
    ]
    if sum(excess for _, _, excess in off) > _MOST * late:
        parts = [(k, *part) for k, rank, _ in off for part in _parts(rank, sign)]
        k, name, price, took = max(parts, key=lambda part: sign * (part[3] - part[2]))
        return (
            f"most of the error is work: rank {k}, {name}: {seconds(took)} measured, "
            f"{seconds(price)} predicted"
        )
    # Totals are the same for all, so waiting is off most where work is off least.
    k, rank, price = min(ranks, key=lambda item: sign * (item[1].measured_s - item[2]))
    waited, expected = max(measured - rank.measured_s, 0.0), max(predicted - price, 0.0)
    return (
        f"most of the error is waiting, not work: rank {k} waited {seconds(waited)} measured, "
        f"{seconds(expected)} predicted"
    )


def _parts(rank: RankResult, sign: float) -> list[tuple[str, float, float]]:
    """(name, predicted, measured seconds) of phases off that way; the rank's work if none is."""
    phases = [
        (words(p.op), p.predicted_s, p.measured_s)
        for p in rank.phases
        if p.predicted_s is not None
        and p.measured_s is not None
        and p.error is not None
        and sign * (p.measured_s - p.predicted_s) > 0.0
    ]
    return phases or [("work", rank.predicted_s or 0.0, rank.measured_s)]
