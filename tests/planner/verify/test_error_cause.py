"""What a plan's error is: waiting or work, of documents made by hand."""

from __future__ import annotations

import pytest

from foreplan.planner.verify.error_cause import error_cause
from foreplan.planner.verify.scores import relative_error
from foreplan.planner.verify.verification import CandidateResult, Phase, RankResult

Pair = tuple[float | None, float]


def rank(work: Pair, **phases: Pair) -> RankResult:
    """(predicted, measured) seconds of a rank's work and of its phases."""
    return RankResult(
        device="h/cpu", predicted_s=work[0], measured_s=work[1], error=relative_error(*work),
        phases=tuple(
            Phase(op=op, predicted_s=p, measured_s=m, error=relative_error(p, m))
            for op, (p, m) in phases.items()
        ),
    )  # fmt: skip


def candidate(predicted: float, measured: float, *ranks: RankResult) -> CandidateResult:
    return CandidateResult(
        name="chosen", role="chosen", predicted_s=predicted, measured_s=measured,
        error=relative_error(predicted, measured), ranks=ranks,
    )  # fmt: skip


def test_waiting() -> None:
    """Both ranks' work is within 2 % of its price; the second waits twice as long as foretold."""
    ran = candidate(3.0, 4.0, rank((2.0, 2.04)), rank((2.0, 1.98), decode=(2.0, 1.98)))
    assert error_cause(ran, 0.1) == (
        "most of the error is waiting, not work: rank 1 waited 2.02 s measured, 1 s predicted"
    )


def test_a_run_that_waits_less() -> None:
    ran = candidate(4.0, 3.0, rank((2.0, 2.0)), rank((2.5, 2.4)))
    assert "rank 0 waited 1 s measured, 2 s predicted" in (error_cause(ran, 0.1) or "")


def test_work() -> None:
    ran = candidate(
        3.0, 3.3, rank((2.0, 2.01), prefill=(0.5, 0.51), decode=(1.5, 1.5)),
        rank((2.5, 2.75), prefill=(0.42, 0.49), decode=(2.08, 2.26)),
    )  # fmt: skip
    assert error_cause(ran, 0.15) == (
        "most of the error is work: rank 1, decode: 2.26 s measured, 2.08 s predicted"
    )


def test_work_that_took_less_than_its_price() -> None:
    ran = candidate(2.0, 1.5, rank((1.8, 1.3), decode=(0.3, 0.35), prefill=(1.5, 0.95)))
    assert "rank 0, prefill: 950 ms measured, 1.5 s predicted" in (error_cause(ran, 0.1) or "")


def test_ranks_in_turn_add_their_errors_up() -> None:
    """Four ranks run one after the other, each 10 % too slow: none alone makes half of it."""
    ran = candidate(4.0, 4.4, *[rank((1.0, 1.1))] * 4)
    assert "is work: rank 0, work: 1.1 s measured, 1 s predicted" in (error_cause(ran, 0.1) or "")


def test_ranks_side_by_side_do_not() -> None:
    """Eight ranks at once, each 2 % too slow, in a run that is 17 % too long."""
    ran = candidate(1.0, 1.2, *[rank((0.9, 0.918))] * 8)
    assert "waiting, not work" in (error_cause(ran, 0.1) or "")


def test_little_work_that_is_far_off_is_not_the_cause() -> None:
    ran = candidate(1.0, 1.3, rank((0.9, 0.9)), rank((0.01, 0.03)))
    assert "rank 0 waited 400 ms measured, 100 ms predicted" in (error_cause(ran, 0.1) or "")


@pytest.mark.parametrize(
    ("measured", "tolerance", "said"),
    [(1.02, 0.1, False), (1.02, 0.01, True), (1.08, 0.2, True), (1.0, 0.0, False)],
)
def test_only_what_is_beyond_five_percent_or_the_tolerance(
    measured: float, tolerance: float, said: bool
) -> None:
    ran = candidate(1.0, measured, rank((0.9, 0.9)))
    assert (error_cause(ran, tolerance) is not None) == said


def test_phases_and_ranks_without_a_price() -> None:
    """An unpriced phase or one that only a plan has is not judged; then the rank's work is."""
    planned = Phase(op="beside", predicted_s=0.1, measured_s=None, error=None)
    one = rank((1.0, 2.0), F=(None, 1.1)).model_copy(update={"phases": (planned,)})
    assert "rank 1, work: 2 s measured, 1 s predicted" in (
        error_cause(candidate(1.0, 2.0, rank((None, 1.0)), one), 0.1) or ""
    )
    assert error_cause(candidate(1.0, 2.0, rank((None, 1.0))), 0.1) is None
    assert error_cause(candidate(1.0, 2.0), 0.1) is None


def test_a_run_that_failed() -> None:
    failed = CandidateResult(name="chosen", role="chosen", predicted_s=1.0, failure="rank 0 died")
    assert error_cause(failed, 0.1) is None


def test_a_strangers_phase_stays_one_line() -> None:
    said = error_cause(candidate(1.0, 2.0, rank((1.0, 2.0), **{"a\x1b[31m\nb": (1.0, 2.0)})), 0.1)
    assert said is not None
    assert said.isprintable()
