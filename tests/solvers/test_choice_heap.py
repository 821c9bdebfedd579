from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.solvers._choice_reduction import reduce_problem
from foreplan.solvers._choice_walk import Walk
from foreplan.solvers.choice_heap import feasible_choice, solve_heap
from foreplan.solvers.choice_milp import solve_milp
from foreplan.solvers.multiple_choice import ChoiceItem, ChoiceProblem, evaluate
from foreplan.solvers.solution import SolutionStatus


def ladder(*values: float) -> ChoiceItem:
    """Each step up costs 1."""
    return ChoiceItem(values=values, weights=np.arange(len(values))[:, None])


@pytest.mark.parametrize(
    ("limit", "choice"),
    [
        (1, (0, 0, 1)),
        (2, (1, 0, 1)),
        (3, (2, 0, 1)),
        (4, (2, 1, 1)),
        (5, (2, 2, 1)),
        (9, (2, 2, 2)),
    ],
)
def test_pops_the_largest_gain(limit: float, choice: tuple[int, ...]) -> None:
    # Gains 5, 4 and 0.2, 2.8 and 19.9, 0.1: by the released code's sign the order would differ.
    items = (ladder(9.0, 4.0, 0.0), ladder(3.0, 2.8, 0.0), ladder(20.0, 0.1, 0.0))
    expected = list(choice)
    solution = solve_heap(ChoiceProblem(items=items, limits=[limit]), (0, 0, 0))
    # The second item's small first step hides its large second one until the others are done.
    assert solution.value is not None
    assert sum(solution.value) == min(limit, 6)
    assert list(solution.value) == expected


def test_a_rejected_step_drops_the_item_for_good() -> None:
    greedy = ChoiceItem(values=[9.0, 8.0, 0.0], weights=[[0.0], [5.0], [0.0]])
    other = ChoiceItem(values=[0.5, 0.0], weights=[[0.0], [1.0]])
    problem = ChoiceProblem(items=(greedy, other), limits=[1.0])
    heap = solve_heap(problem, (0, 0))
    assert heap.value == (0, 1)
    assert heap.evaluations == 2
    assert solve_milp(problem).value == (2, 1)


def test_a_start_has_to_be_feasible() -> None:
    problem = ChoiceProblem(items=(ladder(1.0, 0.0),), limits=[0.5])
    with pytest.raises(SpecError, match="row 0 holds 1"):
        solve_heap(problem, (1,))
    nothing = solve_heap(problem.with_limits([-1.0]))
    assert nothing.status == SolutionStatus.LIMIT
    assert "start" in nothing.message


@given(seed=st.integers(0, 10**6))
def test_moves_add_up_to_the_evaluator(seed: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.random_problem(seed)
    reduction, rng = reduce_problem(problem), np.random.default_rng(seed)
    walk = Walk(reduction, [0] * len(reduction.variables))
    for _ in range(8):
        choice = reduction.choice(walk.options)
        score = evaluate(problem, choice)
        assert walk.objective == pytest.approx(score.objective, abs=1e-9)
        assert walk.usage == pytest.approx(score.usage, abs=1e-9)
        assert reduction.options(choice) == walk.options
        free = [v for v, variable in enumerate(reduction.variables) if not variable.conditions]
        if not free:
            break
        v = int(rng.choice(free))
        walk.take(walk.move(v, int(rng.integers(reduction.variables[v].n_options))))


@given(seed=st.integers(0, 10**6))
def test_every_step_is_feasible_and_none_is_a_loss(seed: int, choice_instances: ModuleType) -> None:
    problem = choice_instances.random_problem(seed)
    start = feasible_choice(problem)
    if start is None:
        return
    solution = solve_heap(problem, start)
    assert solution.value is not None
    assert evaluate(problem, solution.value).feasible
    assert solution.objective <= evaluate(problem, start).objective


def test_identical_layers_become_one(choice_instances: ModuleType) -> None:
    few, many = (
        reduce_problem(
            choice_instances.TransformerInstance(blocks, shared=True, pre_norm=True).problem
        )
        for blocks in (3, 24)
    )
    assert len(few.variables) == len(many.variables)
    assert few.pairs.keys() == many.pairs.keys()
    assert sum(not v.conditions for v in many.variables) == 9


def test_what_one_variable_decides_is_folded_into_it() -> None:
    free = ChoiceItem(values=[1.0, 0.0], emits=[0, 1])
    pinned = ChoiceItem(values=[0.0], emits=[1])
    follower = ChoiceItem(values=[3.0, 5.0], emits=[0, 1], follows=(0, 1))
    never = ChoiceItem(values=[7.0, 0.0], emits=[0, 1], follows=(0, 4))
    other = ChoiceItem(values=[0.0], emits=[0])
    problem = ChoiceProblem(items=(free, pinned, follower, follower, other, never), limits=[])
    reduction = reduce_problem(problem)
    assert len(reduction.variables) == 1
    assert reduction.base_value == 7.0
    assert reduction.variables[0].values.tolist() == [1.0 + 3.0 + 3.0, 5.0 + 5.0]
