"""`machine_share`: what of a plan's error is the machine's speed and not the plan's."""

from __future__ import annotations

from foreplan.planner.report.text import percent
from foreplan.planner.verify.error_cause import WORTH_SAYING
from foreplan.planner.verify.verification import CandidateResult


def machine_share(chosen: CandidateResult, tolerance: float) -> str | None:
    """Say in one line what the error is at the speed that the machine had between the rounds.

    Whether a plan passes is not decided by it.

    Args:
        chosen: the plan's own decision, predicted and measured.
        tolerance: largest error that passes, a share.

    Returns:
        A line without a full stop; ``None`` where the machine was not timed, and where neither
        error exceeds the tolerance or `WORTH_SAYING`.
    """
    measured, predicted, pace = chosen.measured_s, chosen.predicted_s, chosen.pace
    if not measured or predicted is None or pace is None:  # nothing may have been run
        return None
    error, left = chosen.error, chosen.error_at_pace
    if error is None or left is None or max(error, left) <= min(tolerance, WORTH_SAYING):
        return None
    spread = ""
    if chosen.pace_p10 is not None and chosen.pace_p90 is not None:
        spread = f" ({chosen.pace_p10:.2f} to {chosen.pace_p90:.2f})"
    line = (
        f"between the rounds programs took {pace:.2f}{spread} times what the profile says: the "
        f"prediction is {_off(predicted, measured)} off, at that pace "
        f"{_off(predicted * pace, measured)}"
    )
    return f"{line}; profile again" if left <= tolerance < error else line


def _off(predicted: float, measured: float) -> str:
    return percent(predicted / measured - 1.0, signed=True)
