from __future__ import annotations

import itertools
import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.solvers.choice_diagnosis import diagnose
from foreplan.solvers.choice_milp import least_excess
from foreplan.solvers.choice_tradeoff import pareto_sweep, row_as_objective
from foreplan.solvers.multiple_choice import ChoiceItem, ChoiceProblem, evaluate, solve
from foreplan.solvers.solution import SolutionStatus


@pytest.mark.parametrize("max_nodes", [0, 100_000])
def test_a_sweep_falls_with_the_limit(max_nodes: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.TransformerInstance(blocks=2, buckets=2).problem
    span = [0.5 * problem.limits[-1], 0.8 * problem.limits[-1], problem.limits[-1], math.inf]
    points = pareto_sweep(problem, "memory", span[::-1], max_nodes=max_nodes)
    assert [point.limit for point in points] == span
    for tight, loose in itertools.pairwise(points):
        assert loose.solution.objective <= tight.solution.objective
        assert not loose.usage > loose.limit * (1 + 1e-9)
    if max_nodes:
        assert points[2].solution.objective == pytest.approx(solve(problem).objective)


def test_a_sweep_places_its_own_limits(choice_instances: ModuleType) -> None:
    problem = choice_instances.TransformerInstance(blocks=2, buckets=2).problem
    points = pareto_sweep(problem, "memory", 5)
    objectives = [point.solution.objective for point in points]
    assert all(point.solution.status == SolutionStatus.OPTIMAL for point in points)
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[0] > objectives[-1]
    # The first limit is the smallest that can be met, the last one no longer binds.
    below = pareto_sweep(problem, "memory", [points[0].limit * (1 - 1e-6)])[0]
    assert below.solution.status == SolutionStatus.INFEASIBLE
    assert math.isnan(below.usage)
    free = pareto_sweep(problem, "memory", [math.inf])[0]
    assert free.solution.objective == pytest.approx(objectives[-1])
    assert pareto_sweep(problem.with_limits([0.0] * 3), "memory", 4) == ()


@given(seed=st.integers(0, 10**6))
def test_the_dual_of_the_dual_is_the_problem(seed: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.random_problem(seed, n_rows=2)
    best = solve(problem)
    if not best.found:
        return
    dual = row_as_objective(problem, "row 1", best.objective)
    least = solve(dual)
    assert least.value is not None
    # As little of the row as the best objective allows, and still within the row's limit.
    score = evaluate(problem, least.value)
    assert score.feasible
    assert score.objective == pytest.approx(best.objective, abs=1e-6)
    assert score.usage[1] == pytest.approx(least.objective)
    back = row_as_objective(dual, "objective", float(problem.limits[1]))
    assert solve(back).objective == pytest.approx(best.objective, abs=1e-6)


@pytest.mark.parametrize(
    ("row", "limits", "match"),
    [("disk", [1.0], "row 0"), ("row 0", [math.nan], "numbers"), ("row 0", 1, "2 points")],
)
def test_bad_sweeps(row: str, limits: list[float] | int, match: str) -> None:
    problem = ChoiceProblem(items=(ChoiceItem(values=[1.0], weights=[[1.0]]),), limits=[1.0])
    with pytest.raises(SpecError, match=match):
        pareto_sweep(problem, row, limits)


def test_a_row_that_cannot_be_met_by_itself() -> None:
    items = tuple(ChoiceItem(values=[1.0, 0.0], weights=[[2.0, 0.0], [3.0, 1.0]]) for _ in range(3))
    problem = ChoiceProblem(items=items, limits=[4.0, 9.0], rows=("time", "memory"))
    diagnosis = diagnose(problem)
    assert not diagnosis.feasible
    assert diagnosis.proven
    assert diagnosis.least.tolist() == [6.0, 0.0]
    assert diagnosis.needed.tolist() == [6.0, math.inf]
    assert diagnosis.shortage.tolist() == [2.0, 0.0]
    assert diagnosis.message == "time holds at least 6, 2 above its limit of 4"


def test_rows_that_cannot_be_met_together() -> None:
    items = tuple(ChoiceItem(values=[0.0, 0.0], weights=[[1.0, 4.0], [4.0, 1.0]]) for _ in range(2))
    problem = ChoiceProblem(items=items, limits=[4.0, 4.0], rows=("time", "memory"))
    diagnosis = diagnose(problem)
    assert diagnosis.proven
    assert diagnosis.least.tolist() == [2.0, 2.0]
    assert diagnosis.needed.tolist() == [8.0, 8.0]
    assert diagnosis.shortage.tolist() == [1.0, 1.0]
    assert "one of these would do: time at 8 instead of 4, memory at 8" in diagnosis.message
    assert "time 1" in diagnosis.message


@given(seed=st.integers(0, 10**6))
def test_what_is_needed_suffices_and_nothing_less(seed: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.random_problem(seed)
    diagnosis, status = diagnose(problem), solve(problem).status
    assert diagnosis.feasible == (status == SolutionStatus.OPTIMAL)
    assert diagnosis.proven == (status == SolutionStatus.INFEASIBLE)
    assert (diagnosis.least <= diagnosis.needed + 1e-6).all()
    for r in np.flatnonzero(np.isfinite(problem.limits)):
        for change, feasible in ((1e-5, True), (-1e-5, False)):
            limits = problem.limits.copy()
            limits[r] = diagnosis.needed[r] + change
            if np.isfinite(limits[r]):
                assert solve(problem.with_limits(limits)).found == feasible
    if not diagnosis.feasible:
        # Every limit raised by what the nearest choice lacks.
        assert diagnosis.nearest is not None
        raised = problem.with_limits(problem.limits + diagnosis.shortage)
        assert evaluate(raised, diagnosis.nearest).feasible
        assert (diagnosis.shortage > 0).any()


def test_without_a_proof_nothing_is_called_infeasible(choice_instances: ModuleType) -> None:
    problem = choice_instances.TransformerInstance(blocks=4, memory=0.5, seed=3).problem
    choice, bound = least_excess(problem)
    assert bound == 0.0
    assert choice is not None
    assert evaluate(problem, choice).feasible
    stopped = diagnose(problem.with_limits(problem.limits * 0.9), max_nodes=0)
    assert not stopped.feasible
    assert not stopped.proven
    assert "nor a proof" in stopped.message
