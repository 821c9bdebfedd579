from __future__ import annotations

import math
from typing import Any

import pytest

from foreplan.errors import SpecError
from foreplan.solvers.solution import Solution, SolutionStatus


def solution(**changes: Any) -> Solution[str]:
    fields: dict[str, Any] = {
        "status": SolutionStatus.OPTIMAL,
        "value": "plan",
        "objective": 10.0,
        "lower_bound": 9.0,
        "evaluations": 3,
        "solver": "test",
    }
    return Solution(**{**fields, **changes})


def test_gap_is_relative_to_the_objective() -> None:
    assert solution().gap == pytest.approx(0.1)
    assert solution(lower_bound=10.0).gap == 0.0
    assert solution(objective=-10.0, lower_bound=-11.0).gap == pytest.approx(0.1)
    assert solution(objective=0.0, lower_bound=0.0).gap == 0.0
    assert solution(lower_bound=-math.inf, status=SolutionStatus.FEASIBLE).gap == math.inf


@pytest.mark.parametrize(
    "status", [SolutionStatus.INFEASIBLE, SolutionStatus.CUTOFF, SolutionStatus.LIMIT]
)
def test_without_an_incumbent_there_is_no_gap(status: SolutionStatus) -> None:
    none = solution(status=status, value=None, objective=math.inf)
    assert not none.found
    assert none.gap == math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {"lower_bound": 10.5},
        {"lower_bound": math.nan},
        {"value": None},
        {"objective": math.inf},
        {"status": SolutionStatus.LIMIT},
        {"status": SolutionStatus.INFEASIBLE, "value": None},
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        solution(**changes)
