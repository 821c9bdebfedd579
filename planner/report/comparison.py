"""`Contender`: a decision among the others, predicted and, where it ran, measured."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.planner.plan import Plan
from foreplan.planner.report.text import number, percent, plain
from foreplan.planner.verify.verification import CandidateResult, Verification

_SAME = 5e-4  # differences below are shown as none


@dataclass(frozen=True, slots=True)
class Contender:
    """A decision beside the others.

    Attributes:
        name: for readers.
        tag: ``chosen``, ``misses a limit``, ``rival``, ``failed``, ``left out`` or "".
        predicted_s, measured_s: totals, ``None`` where there is none.
        p10_s, p90_s: spread of the measured totals.
        error: |predicted - measured| / measured.
        verdict: how it compares with the chosen decision, or why it was left out.
        share: share of draws of all prices in which it is the best decision.
        pace: how much longer its steps lasted because of the machine's speed.
        error_at_pace: error of what was predicted, times that.
    """

    name: str
    tag: str
    predicted_s: float | None
    measured_s: float | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    error: float | None = None
    verdict: str = ""
    share: float | None = None
    pace: float | None = None
    error_at_pace: float | None = None


def contenders(plan: Plan, verification: Verification | None) -> list[Contender]:
    """The chosen decision, its alternatives by predicted time, rivals, and what does not fit."""
    ran = {c.name: c for c in verification.candidates[1:]} if verification else {}
    chosen = verification.chosen if verification else None
    base = (plan.predicted.total_s, chosen.measured_s if chosen else None)
    sure = plan.confidence
    mine = sure.probability_best if sure.share else None
    rows = [_row("this plan", "chosen", plan.predicted.total_s, chosen, "", mine)]
    for other in sorted(plan.alternatives, key=lambda a: a.predicted.total_s):
        seen = ran.pop(other.name, None)
        predicted = other.predicted.total_s
        tag = "" if other.limits_met else "misses a limit"
        verdict = _verdict(predicted, seen.measured_s if seen else None, base, other.limits_met)
        share = sure.share.get(other.name)
        rows.append(_row(plain(other.name), tag, predicted, seen, verdict, share))
    for seen in ran.values():
        tag = "rival" if seen.limits_met else "misses a limit"
        verdict = _verdict(seen.predicted_s, seen.measured_s, base, seen.limits_met)
        rows.append(_row(plain(seen.name), tag, seen.predicted_s, seen, verdict))
    rows += [
        Contender(plain(out.name), "left out", None, verdict=plain(out.reason))
        for out in plan.rejected
    ]
    return rows


def _row(
    name: str,
    tag: str,
    predicted_s: float | None,
    seen: CandidateResult | None,
    verdict: str,
    share: float | None = None,
) -> Contender:
    if seen is None:
        return Contender(name, tag, predicted_s, verdict=verdict, share=share)
    if seen.failure is not None:
        return Contender(name, "failed", predicted_s, verdict=plain(seen.failure), share=share)
    return Contender(
        name, tag, predicted_s, seen.measured_s, seen.p10_s, seen.p90_s, seen.error, verdict,
        share, seen.pace, seen.error_at_pace,
    )  # fmt: skip


def _verdict(
    predicted_s: float | None,
    measured_s: float | None,
    base: tuple[float, float | None],
    limits_met: bool,
) -> str:
    """How an alternative compares with the chosen decision."""
    if measured_s is not None and base[1]:
        text = _against(measured_s / base[1] - 1, "measured")
    elif predicted_s is not None and base[0]:
        text = _against(predicted_s / base[0] - 1, "predicted")
    else:
        text = ""
    return text if limits_met else f"does not meet every limit; {text}".rstrip("; ")


def _against(difference: float, how: str) -> str:
    if abs(difference) < _SAME:
        return f"as fast ({how})"
    if difference >= 1:
        return f"{number(round(1 + difference, 1))} times as long ({how})"
    return f"{percent(abs(difference))} {'slower' if difference > 0 else 'faster'} ({how})"
