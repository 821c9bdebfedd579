from __future__ import annotations

import itertools
from types import ModuleType

import numpy as np
import pytest

from foreplan.errors import SpecError
from foreplan.solvers.choice_frontier import solve_frontier
from foreplan.solvers.choice_heap import solve_heap
from foreplan.solvers.choice_milp import solve_milp
from foreplan.solvers.multiple_choice import ChoiceItem, ChoicePair, ChoiceProblem
from foreplan.solvers.solution import SolutionStatus


def clique(n: int, limit: float = 4.0) -> ChoiceProblem:
    """Every two items cost something together."""
    rng = np.random.default_rng(n)
    items = [
        ChoiceItem(values=[float(rng.random()), 0.0], weights=[[0.0], [1.0]]) for _ in range(n)
    ]
    pairs = [
        ChoicePair(producer=u, consumer=i, weights=rng.random((2, 2, 1)) * 0.1)
        for u, i in itertools.combinations(range(n), 2)
    ]
    return ChoiceProblem(items=tuple(items), pairs=tuple(pairs), limits=[limit])


def test_refuses_a_wide_frontier() -> None:
    assert solve_frontier(clique(8)).objective == pytest.approx(solve_milp(clique(8)).objective)
    with pytest.raises(SpecError, match=r"1048576 combinations .* at most 10000; use solve_milp"):
        solve_frontier(clique(20))
    with pytest.raises(SpecError, match="combinations"):
        solve_frontier(clique(8), max_states=255)


def test_an_order_of_its_own_keeps_the_frontier_narrow() -> None:
    # Items alternate between two chains, and each end meets the other chain's start.
    n = 60
    items = [ChoiceItem(values=[1.0 + i % 7, 0.0], weights=[[0.0], [1.0]]) for i in range(n)]
    chain = [*range(0, n, 2), *range(1, n, 2)]
    pairs = [
        ChoicePair(producer=u, consumer=i, weights=[[[0.0], [0.5]], [[0.25], [0.0]]])
        for u, i in itertools.pairwise(chain)
    ]
    problem = ChoiceProblem(items=tuple(items), pairs=tuple(pairs), limits=[20.0])
    assert solve_frontier(problem, max_states=8).objective == pytest.approx(
        solve_milp(problem).objective
    )


@pytest.mark.parametrize("limit", [1, 4, 30, 300])
def test_stopped_by_labels(limit: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.TransformerInstance(blocks=3, buckets=2, pre_norm=True).problem
    best, heap = solve_milp(problem), solve_heap(problem)
    stopped = solve_frontier(problem, max_labels=limit)
    assert stopped.status == SolutionStatus.LIMIT
    assert stopped.lower_bound <= best.objective
    assert "labels" in stopped.message
    started = solve_frontier(problem, start=heap.value, max_labels=limit)
    assert started.status == SolutionStatus.FEASIBLE
    assert started.value == heap.value
    assert stopped.lower_bound <= started.lower_bound <= best.objective


def test_a_start_that_nothing_beats_is_the_answer(choice_instances: ModuleType) -> None:
    problem = choice_instances.TransformerInstance(blocks=2, buckets=1).problem
    best = solve_frontier(problem)
    again = solve_frontier(problem, start=best.value)
    assert again.status == SolutionStatus.OPTIMAL
    assert again.value == best.value
    assert again.evaluations <= best.evaluations
    with pytest.raises(SpecError, match="start"):
        solve_frontier(problem.with_limits([0.0, 0.0]), start=best.value)
