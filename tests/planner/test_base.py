"""What a solver's bound says of a decision that is not the solver's."""

import pytest

from foreplan.planner.base import Bound


def test_a_gap_is_of_the_decision_that_was_taken() -> None:
    bound = Bound("heuristic", lower_s=0.6, gap=0.7, solver="search", evaluations=3)
    other = bound.of_another(0.8, timed=True)
    assert other.gap == pytest.approx(0.25)
    assert (other.status, other.lower_s, other.evaluations) == ("heuristic", 0.6, 3)


@pytest.mark.parametrize(
    ("lower_s", "total_s", "timed"), [(None, 1.0, True), (0.6, 1.0, False), (0.6, 0.5, True)]
)
def test_no_gap_is_told_where_none_is_proven(lower_s, total_s, timed) -> None:
    """No bound, a bound of something else, and one that the simulation contradicts."""
    other = Bound("optimal", lower_s, 0.0, "search").of_another(total_s, timed=timed)
    assert other == Bound("feasible", lower_s, None, "search")
