from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreplan.solvers.chain_partition import ChainProblem, solve

Make = Callable[..., ChainProblem]

LAYERS = ("prefill_s", "decode_s", "memory_bytes")
EDGES = tuple(f"{part}_{quantity}" for part in ("first", "last") for quantity in LAYERS)
BY_TYPE = (*LAYERS, *EDGES, "capacity_bytes", "fixed_memory_bytes", "workspace_bytes")
LINKS = ("link_prefill_s", "link_decode_s", "link_return_decode_s")
TIMES = (*LINKS, *LAYERS[:2], *(name for name in EDGES if name.endswith("_s")))

SEEDS = st.integers(0, 10**6)
fixed = settings(
    derandomize=True,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def best(problem: ChainProblem) -> float:
    solution = solve(problem, gap=0.0)
    assert solution.lower_bound <= solution.objective
    return solution.objective


def same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-9)


def no_worse(changed: ChainProblem, base: ChainProblem) -> bool:
    return best(changed) <= best(base) * (1 + 1e-9)


@fixed
@given(seed=SEEDS, more=st.floats(1.0, 3.0))
def test_more_memory_never_hurts(seed: int, more: float, make_problem: Make) -> None:
    problem = make_problem(seed)
    assert no_worse(replace(problem, capacity_bytes=problem.capacity_bytes * more), problem)


@fixed
@given(seed=SEEDS, pick=st.integers(0, 9))
def test_one_more_device_never_hurts(seed: int, pick: int, make_problem: Make) -> None:
    problem = make_problem(seed)
    counts = problem.counts.copy()
    counts[pick % problem.n_types] += 1
    assert no_worse(replace(problem, counts=counts), problem)


@fixed
@given(seed=SEEDS)
def test_one_more_variant_never_hurts(seed: int, make_problem: Make) -> None:
    problem = make_problem(seed)
    rng = np.random.default_rng(seed)
    changes: dict[str, Any] = {}
    for name in (*LAYERS, "omega", "cost2"):
        array = getattr(problem, name)
        extra = rng.uniform(0.0, 2.0, (*array.shape[:-1], 1))
        changes[name] = np.concatenate([array, extra], axis=-1)
    # It needs more than any other: what does not use it need not leave room for it.
    more = problem.workspace_bytes.max(axis=1, keepdims=True) + rng.uniform(0.0, 4.0)
    changes["workspace_bytes"] = np.concatenate([problem.workspace_bytes, more], axis=1)
    need = np.full((problem.n_layers, 1), more.shape[1] + problem.workspace_bytes.shape[1] - 1)
    changes["needs"] = np.concatenate([problem.needs, need], axis=1)
    assert no_worse(replace(problem, **changes), problem)


@fixed
@given(seed=SEEDS)
def test_dropping_a_budget_never_hurts(seed: int, make_problem: Make) -> None:
    problem = make_problem(seed, budgets=True)
    assert no_worse(replace(problem, max_omega=None), problem)
    assert no_worse(replace(problem, max_cost2=None), problem)


@fixed
@given(seed=SEEDS, data=st.data())
def test_labels_of_types_do_not_matter(seed: int, data: st.DataObject, make_problem: Make) -> None:
    problem = make_problem(seed)
    order = data.draw(st.permutations(range(problem.n_types)))
    changes: dict[str, Any] = {name: getattr(problem, name)[order] for name in BY_TYPE}
    changes |= {name: getattr(problem, name)[np.ix_(order, order)] for name in LINKS}
    assert same(best(replace(problem, counts=problem.counts[order], **changes)), best(problem))


@fixed
@given(seed=SEEDS, data=st.data())
def test_labels_of_variants_do_not_matter(
    seed: int, data: st.DataObject, make_problem: Make
) -> None:
    problem = make_problem(seed)
    order = data.draw(st.permutations(range(problem.n_variants)))
    names = (*LAYERS, "omega", "cost2", "needs")
    changes: dict[str, Any] = {name: getattr(problem, name)[..., order] for name in names}
    assert same(best(replace(problem, **changes)), best(problem))


@fixed
@given(seed=SEEDS, factor=st.floats(1e-4, 1e4))
def test_scaling_time_scales_the_objective(seed: int, factor: float, make_problem: Make) -> None:
    problem = make_problem(seed)
    changes: dict[str, Any] = {name: getattr(problem, name) * factor for name in TIMES}
    scaled = replace(problem, theta=problem.theta * factor, **changes)
    assert same(best(scaled), best(problem) * factor)


@fixed
@given(seed=SEEDS, factor=st.floats(1e-3, 1e12))
def test_the_unit_of_memory_does_not_matter(seed: int, factor: float, make_problem: Make) -> None:
    problem = make_problem(seed)
    names = [name for name in BY_TYPE if name.endswith("_bytes")]
    changes: dict[str, Any] = {name: getattr(problem, name) * factor for name in names}
    assert same(best(replace(problem, **changes)), best(problem))


@fixed
@given(seed=SEEDS)
def test_the_chain_can_be_read_backwards(seed: int, make_problem: Make) -> None:
    problem = make_problem(seed)
    changes: dict[str, Any] = {name: getattr(problem, name)[:, ::-1] for name in LAYERS}
    changes |= {name: getattr(problem, name)[::-1] for name in ("omega", "cost2", "needs")}
    changes["workspace_bytes"] = problem.workspace_bytes[:, :, [0, 2, 1, 3]]
    for quantity in LAYERS:
        changes[f"first_{quantity}"] = getattr(problem, f"last_{quantity}")
        changes[f"last_{quantity}"] = getattr(problem, f"first_{quantity}")
    changes |= {name: getattr(problem, name).T for name in LINKS}
    assert same(best(replace(problem, **changes)), best(problem))


@fixed
@given(seed=SEEDS, cut=st.integers(1, 30), gap=st.sampled_from([0.0, 1e-3, 0.1]))
def test_the_bound_is_never_above_the_optimum(
    seed: int, cut: int, gap: float, make_problem: Make
) -> None:
    problem = make_problem(seed, n_layers=8, n_types=2)
    stopped = solve(problem, gap=gap, max_evaluations=cut)
    optimum = best(problem)
    assert stopped.lower_bound <= optimum * (1 + 1e-9)
    assert stopped.objective >= optimum * (1 - 1e-9)


def test_more_microbatches_of_decode_only_cost_when_a_stage_is_the_bottleneck(
    make_problem: Make,
) -> None:
    problem = replace(make_problem(4, n_layers=5, budgets=False), new_tokens=5)
    values = [best(replace(problem, decode_microbatches=m)) for m in (1, 2, 3, 8)]
    assert values == sorted(values)
    assert values[0] < values[-1]


@pytest.mark.parametrize("seed", range(20))
def test_theta_and_budget_agree(seed: int, make_problem: Make) -> None:
    # The optimum for a weight is the optimum for the budget that it happens to use.
    problem = replace(make_problem(seed, n_layers=5, budgets=False), theta=2.0)
    weighted = solve(problem, gap=0.0)
    if weighted.value is None:
        return
    omega = float(problem.omega[np.arange(5), list(weighted.value.variants)].sum())
    budgeted = solve(replace(problem, theta=0.0, max_omega=omega), gap=0.0)
    assert same(budgeted.objective, weighted.objective - 2.0 * omega)
