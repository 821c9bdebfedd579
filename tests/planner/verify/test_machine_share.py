"""What of an error is the machine's, of documents made by hand."""

from __future__ import annotations

import pytest

from foreplan.planner.verify.machine_share import machine_share
from foreplan.planner.verify.scores import relative_error
from foreplan.planner.verify.verification import CandidateResult


def ran(predicted: float, measured: float, pace: float | None) -> CandidateResult:
    at_pace = None if pace is None else relative_error(predicted * pace, measured)
    return CandidateResult(
        name="chosen", role="chosen", predicted_s=predicted, measured_s=measured,
        error=relative_error(predicted, measured), pace=pace, error_at_pace=at_pace,
        pace_p10=None if pace is None else 0.98 * pace,
        pace_p90=None if pace is None else 1.02 * pace,
    )  # fmt: skip


def test_a_slow_machine_explains_an_error() -> None:
    assert machine_share(ran(1.0, 1.32, 1.31), 0.1) == (
        "between the rounds programs took 1.31 (1.28 to 1.34) times what the profile says: the "
        "prediction is -24 % off, at that pace -0.8 %; profile again"
    )


def test_a_machine_as_it_was_explains_nothing() -> None:
    said = machine_share(ran(1.0, 1.32, 1.0), 0.1)
    assert said is not None
    assert said.endswith("is -24 % off, at that pace -24 %")


def test_a_fast_machine_may_hide_an_error() -> None:
    said = machine_share(ran(1.0, 1.0, 0.8), 0.1)
    assert said is not None
    assert said.endswith("is 0 % off, at that pace -20 %")


@pytest.mark.parametrize(
    "quiet",
    [
        ran(1.0, 1.02, 1.01),
        ran(1.0, 1.5, None),
        CandidateResult(name="c", role="chosen", predicted_s=1.0, failure="it died", pace=1.0),
        ran(1.0, 1.5, 1.4).model_copy(update={"measured_s": 0.0}),
    ],
)
def test_what_is_small_or_not_known_is_not_said(quiet: CandidateResult) -> None:
    assert machine_share(quiet, 0.1) is None
