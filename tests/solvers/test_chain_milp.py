from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from foreplan.errors import SpecError
from foreplan.solvers.chain_milp import solve_milp
from foreplan.solvers.chain_partition import ChainProblem, evaluate, solve
from foreplan.solvers.enumerate import brute_force, type_sequences
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., ChainProblem]


@pytest.mark.parametrize("block", range(6))
def test_equals_the_box_search(block: int, make_problem: Make) -> None:
    for seed in range(500 + 10 * block, 510 + 10 * block):
        problem = make_problem(seed)
        milp, box = solve_milp(problem), solve(problem, gap=0.0)
        assert milp.status == box.status
        if box.found:
            assert milp.value is not None
            assert milp.objective == pytest.approx(box.objective, rel=1e-6)
            assert milp.lower_bound <= box.objective * (1 + 1e-6)
            assert evaluate(problem, milp.value).feasible


def test_one_order_of_a_longer_chain(make_problem: Make) -> None:
    problem = make_problem(5, n_layers=9, n_types=2, n_variants=3, identical=True, budgets=False)
    problem = replace(problem, counts=[2, 1], capacity_bytes=[40.0, 40.0])
    best = solve(problem, gap=0.0)
    assert best.value is not None
    order = tuple(stage.device_type for stage in best.value.stages)
    assert solve_milp(problem, orders=[order]).objective == pytest.approx(best.objective, rel=1e-6)


def test_a_stopped_programme_is_not_optimal(make_problem: Make) -> None:
    problem = make_problem(5, n_layers=12, n_types=2, n_variants=3, identical=False, budgets=True)
    problem = replace(problem, counts=[1, 1], capacity_bytes=[60.0, 60.0])
    stopped = solve_milp(problem, orders=[(0, 1)], max_nodes=1)
    exact = solve(problem, gap=0.0)
    assert stopped.status in (SolutionStatus.FEASIBLE, SolutionStatus.LIMIT, SolutionStatus.OPTIMAL)
    assert stopped.lower_bound <= stopped.objective
    if stopped.status != SolutionStatus.OPTIMAL:
        assert stopped.objective >= exact.objective * (1 - 1e-6)


def test_bad_orders(make_problem: Make) -> None:
    problem = replace(make_problem(1, n_layers=2, n_types=2), counts=[1, 3])
    for order in ((0, 0), (1, 1, 1)):
        with pytest.raises(SpecError, match="orders"):
            solve_milp(problem, orders=[order])


def test_brute_force_refuses_large_problems(make_problem: Make) -> None:
    with pytest.raises(SpecError, match="plans"):
        brute_force(make_problem(0, n_layers=20, n_variants=3))


def test_type_sequences(make_problem: Make) -> None:
    problem = replace(make_problem(1, n_layers=3, n_types=2), counts=[1, 2])
    sequences = list(type_sequences(problem))
    assert len(sequences) == len(set(sequences)) == 2 + 3 + 3
    assert math.inf not in map(len, sequences)
