"""Exact methods against each other, brute force and the heap."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.solvers.choice_frontier import solve_frontier
from foreplan.solvers.choice_heap import solve_heap
from foreplan.solvers.choice_milp import solve_milp
from foreplan.solvers.multiple_choice import (
    ChoiceItem,
    ChoicePair,
    ChoiceProblem,
    evaluate,
    solve,
)
from foreplan.solvers.solution import SolutionStatus


@pytest.mark.parametrize("block", range(10))
def test_programme_and_frontier_equal_brute_force(block: int, choice_instances: ModuleType) -> None:
    for seed in range(50 * block, 50 * block + 50):
        # Integers make ties and sums that equal their limits.
        problem = choice_instances.random_problem(seed, integers=seed % 2 == 0)
        expected = choice_instances.brute_force(problem)
        heap = solve_heap(problem)
        for solution in (solve_milp(problem), solve_frontier(problem)):
            if expected == math.inf:
                assert solution.status == SolutionStatus.INFEASIBLE
                continue
            assert solution.status == SolutionStatus.OPTIMAL
            assert solution.value is not None
            score = evaluate(problem, solution.value)
            assert score.feasible
            assert score.objective == solution.objective == pytest.approx(expected, abs=1e-7)
            assert solution.lower_bound <= expected + 1e-7
            assert solution.gap <= 1e-7
            assert solution.objective <= heap.objective + 1e-9


def test_the_blocks_above_hold_every_feature(choice_instances: ModuleType) -> None:
    problems = [choice_instances.random_problem(seed) for seed in range(500)]
    infeasible = sum(choice_instances.brute_force(p) == math.inf for p in problems)
    assert 100 < infeasible < 300
    items = [item for problem in problems for item in problem.items]
    assert sum(item.dependent and len(item.follows) > 1 for item in items) > 200
    assert sum(item.group is not None for item in items) > 200
    assert sum(problem.n_rows >= 2 and bool(problem.pairs) for problem in problems) > 150
    assert sum(min(p.weights.min(initial=0.0) for p in q.pairs or [_PAIR]) < 0 for q in problems)


_PAIR = ChoicePair(producer=0, consumer=1, values=[[0.0]])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pre_norm", [False, True])
def test_transformers(seed: int, pre_norm: bool, choice_instances: ModuleType) -> None:
    instance = choice_instances.TransformerInstance(
        blocks=3, buckets=3, seed=seed, pre_norm=pre_norm, casts=0.1
    )
    heap = solve_heap(instance.problem, instance.start)
    milp = solve(instance.problem, start=instance.start)
    labels = solve_frontier(instance.problem, start=heap.value)
    assert milp.status == labels.status == SolutionStatus.OPTIMAL
    assert milp.objective == pytest.approx(labels.objective, rel=1e-9)
    assert milp.objective <= heap.objective


def test_bert_base_and_a_deep_network_of_equal_layers(choice_instances: ModuleType) -> None:
    bert = choice_instances.TransformerInstance().problem
    kinds = [(item.dependent, item.n_options == 1) for item in bert.items]
    assert (bert.n_items, len(bert.pairs), bert.n_rows) == (183, 230, 14)
    assert [kinds.count(k) for k in ((False, False), (True, False), (False, True))] == [97, 36, 50]
    deep = choice_instances.TransformerInstance(96, 97, shared=True, pre_norm=True).problem
    for problem in (bert, deep):
        solution = solve(problem)
        assert solution.status == SolutionStatus.OPTIMAL
        assert solution.gap <= 1e-9
        assert solution.objective <= solve_heap(problem).objective


def test_the_heap_takes_one_large_gain_instead_of_many_cheap_ones() -> None:
    large = ChoiceItem(values=[10.0, 0.0], weights=[[0.0], [10.0]])
    cheap = ChoiceItem(values=[9.0, 0.0], weights=[[0.0], [1.0]])
    problem = ChoiceProblem(items=(large, *[cheap] * 10), limits=[10.0])
    assert 100.0 - solve_heap(problem, (0,) * 11).objective == 10.0
    assert 100.0 - solve(problem, start=(0,) * 11).objective == 90.0


def test_two_steps_that_only_help_together() -> None:
    # Raising one of two neighbours adds a conversion that does not fit, raising both removes it.
    item = ChoiceItem(values=[1.0, 0.0], weights=[[1.0], [1.5]])
    pair = ChoicePair(producer=0, consumer=1, weights=[[[0.0], [1.0]], [[1.0], [0.0]]])
    problem = ChoiceProblem(items=(item, item), pairs=(pair,), limits=[3.0])
    assert solve_heap(problem, (0, 0)).objective == 2.0
    assert solve(problem, start=(0, 0)).value == (1, 1)


def test_stopped_is_not_optimal(choice_instances: ModuleType) -> None:
    problem = choice_instances.TransformerInstance(blocks=4, memory=0.5, seed=3).problem
    best = solve(problem)
    stopped = solve_milp(problem, time_limit_s=0.0)
    assert stopped.status in (SolutionStatus.LIMIT, SolutionStatus.FEASIBLE)
    started = solve_milp(problem, start=best.value, time_limit_s=0.0)
    assert started.status == SolutionStatus.FEASIBLE
    assert started.objective == best.objective
    for limit in (0, 1):
        early = solve_milp(problem, max_nodes=limit)
        assert early.lower_bound >= 0.0
        assert early.lower_bound <= best.objective * (1 + 1e-9)
        assert early.objective >= best.objective * (1 - 1e-9)
        assert (early.status == SolutionStatus.OPTIMAL) == (early.gap <= 1e-9)
        assert early.evaluations <= limit


def test_an_instance_on_which_presolve_of_highs_is_wrong(choice_instances: ModuleType) -> None:
    # HiGHS 1.15.1 with presolve calls 31.79 optimal here.
    problem = choice_instances.random_problem(11145, n_items=7, n_rows=1)
    assert choice_instances.brute_force(problem) == pytest.approx(0.3517194206)
    assert solve(problem).objective == pytest.approx(0.3517194206)


@pytest.mark.parametrize("seed", range(12))
def test_values_of_many_magnitudes(seed: int) -> None:
    # The best choice is worth a billionth of what the worst options cost.
    rng = np.random.default_rng(seed)
    weights = np.array([[0.3, 1.0], [1.0, 2.0], [2.0, 4.0]])
    items = [
        ChoiceItem(
            values=[10.0 ** rng.uniform(-6, 6), 10.0 ** rng.uniform(-9, -6), 0.0],
            weights=weights * rng.uniform(0.8, 1.2, (3, 2)),
        )
        for _ in range(10)
    ]
    problem = ChoiceProblem(items=tuple(items), limits=[13.0, 30.0])
    solution = solve(problem)
    assert solution.status == SolutionStatus.OPTIMAL
    assert solution.gap <= 1e-8
    assert solution.objective == pytest.approx(solve_frontier(problem).objective, rel=1e-9, abs=0)


@given(seed=st.integers(0, 10**6), power=st.integers(-12, 12))
def test_units_do_not_matter(seed: int, power: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.random_problem(seed, n_rows=2)
    unit = np.array([10.0**power, 10.0 ** (-power)])
    other = replace(
        problem,
        items=tuple(
            replace(i, values=i.values * 10.0**power, weights=i.weights * unit)
            for i in problem.items
        ),
        pairs=tuple(
            replace(p, values=p.values * 10.0**power, weights=p.weights * unit)
            for p in problem.pairs
        ),
        limits=problem.limits * unit,
        base=problem.base * unit,
    )
    one, two = solve(problem), solve(other)
    assert one.status == two.status
    if one.found:
        assert two.objective / 10.0**power == pytest.approx(one.objective, rel=1e-6, abs=1e-6)


@given(seed=st.integers(0, 10**6), more=st.floats(0.0, 5.0))
def test_looser_limits_are_never_worse(
    seed: int, more: float, choice_instances: ModuleType
) -> None:
    problem = choice_instances.random_problem(seed)
    looser = solve(problem.with_limits(problem.limits + more))
    assert looser.objective <= solve(problem).objective + 1e-6


@given(seed=st.integers(0, 10**6))
def test_without_pairs_is_a_lower_bound_where_pairs_cost(
    seed: int, choice_instances: ModuleType
) -> None:
    problem = choice_instances.random_problem(seed)
    costly = replace(
        problem,
        pairs=tuple(
            replace(p, weights=np.abs(p.weights), values=np.abs(p.values)) for p in problem.pairs
        ),
    )
    assert solve(costly.without_pairs()).objective <= solve(costly).objective + 1e-6


def test_nothing_to_choose() -> None:
    pinned = ChoiceItem(values=[2.0], weights=[[1.0]])
    follower = ChoiceItem(values=[1.0, 5.0], weights=[[1.0], [0.0]], emits=[9, 0], follows=(0,))
    problem = ChoiceProblem(items=(pinned, follower), limits=[1.0], base_value=1.0)
    for method in (solve, solve_frontier):
        solution = method(problem)
        assert solution.status == SolutionStatus.OPTIMAL
        assert solution.value == (0, 1)
        assert solution.objective == solution.lower_bound == 8.0
        assert method(problem.with_limits([0.5])).status == SolutionStatus.INFEASIBLE
        assert method(ChoiceProblem(items=(), limits=[])).objective == 0.0


@pytest.mark.parametrize(
    "arguments", [{"gap": -1.0}, {"gap": math.nan}, {"max_nodes": -1}, {"time_limit_s": -1.0}]
)
def test_bad_arguments(arguments: dict[str, float]) -> None:
    problem = ChoiceProblem(items=(ChoiceItem(values=[1.0, 2.0]),), limits=[])
    with pytest.raises(SpecError, match="solve_milp"):
        solve_milp(problem, **arguments)  # type: ignore[arg-type]


def test_the_problem_is_stated_without_loading_a_solver() -> None:
    code = (
        "import sys, foreplan.solvers.multiple_choice; "
        "print(sorted({'torch', 'pulp', 'highspy', 'numba', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
