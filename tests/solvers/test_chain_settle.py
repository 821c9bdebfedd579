"""Boxes on tables of their own, where layers differ and both budgets are hard."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from foreplan.solvers import _chain_driver, _chain_settle
from foreplan.solvers._chain_merge import merge_types
from foreplan.solvers._chain_model import model_of
from foreplan.solvers._stage_tuning import choose, tune
from foreplan.solvers.chain_milp import solve_milp
from foreplan.solvers.chain_partition import ChainProblem, evaluate, solve
from foreplan.solvers.enumerate import brute_force

Make = Callable[..., ChainProblem]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No table of all stages and none of several boxes; counts how often boxes were settled."""
    calls: list[int] = []
    monkeypatch.setattr(_chain_driver, "_SMALL", -1)
    monkeypatch.setattr(_chain_driver, "_LARGE", -1)
    settle = _chain_settle.settle_boxes

    def counted(*arguments: object) -> object:
        calls.append(1)
        return settle(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_chain_driver, "settle_boxes", counted)
    return calls


def check(problem: ChainProblem, expected: float, gap: float) -> None:
    got = solve(problem, gap=gap)
    assert got.lower_bound <= expected * (1 + 1e-9) or expected == math.inf
    assert got.lower_bound <= got.objective
    if expected == math.inf:
        assert got.value is None
        return
    assert got.value is not None
    score = evaluate(problem, got.value)
    assert score.feasible
    assert score.objective == pytest.approx(got.objective, rel=1e-12)
    assert expected * (1 - 1e-9) <= got.objective <= expected * (1 + gap) + 1e-9
    assert got.gap <= gap + 1e-11


@pytest.mark.parametrize("block", range(5))
def test_equals_brute_force(block: int, make_problem: Make, settled: list[int]) -> None:
    feasible = 0
    for seed in range(9000 + 42 * block, 9042 + 42 * block):
        problem = make_problem(seed, identical=False, budgets=True)
        expected = brute_force(problem).objective
        feasible += expected < math.inf
        check(problem, expected, 1e-6 if seed % 20 == 0 else 1e-2)
    assert feasible > 5
    assert settled


@pytest.mark.parametrize("block", range(5))
def test_equals_the_integer_programme(block: int, make_problem: Make, settled: list[int]) -> None:
    for seed in range(9500 + 12 * block, 9512 + 12 * block):
        problem = make_problem(seed, n_types=2, n_layers=4, identical=False, budgets=True)
        check(problem, solve_milp(problem).objective, 1e-2)
    assert settled


@pytest.mark.parametrize("limit", [30, 100, 300])
def test_bounds_hold_when_stopped_early(limit: int, make_problem: Make, settled: list[int]) -> None:
    for seed in range(9700, 9710):
        problem = make_problem(seed, identical=False, budgets=True)
        expected = brute_force(problem).objective
        got = solve(problem, gap=0.0, max_evaluations=limit)
        assert got.lower_bound <= expected * (1 + 1e-9) or expected == math.inf
        assert got.objective >= expected * (1 - 1e-9)
        assert got == solve(problem, gap=0.0, max_evaluations=limit)


@pytest.mark.parametrize("seed", range(40))
def test_multipliers_solve_the_linear_relaxation(seed: int) -> None:
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    rng = np.random.default_rng(seed)
    n, v = int(rng.integers(2, 9)), int(rng.integers(2, 5))
    scalar, costs = rng.uniform(0, 1, (n, v)), rng.uniform(0, 1, (3, n, v))
    extra = rng.uniform(0, 0.2, 3)
    caps = extra + n * rng.uniform(0.3, 0.6, 3)
    if seed % 4 == 0:
        caps[seed % 3] = math.inf
    finite = np.isfinite(caps)
    found = linprog(
        scalar.ravel(),
        A_ub=costs.reshape(3, -1)[finite],
        b_ub=(caps - extra)[finite],
        A_eq=np.kron(np.eye(n), np.ones(v)),
        b_eq=np.ones(n),
        bounds=(0, None),
    )
    mu = tune(scalar, costs, extra, caps)
    assert (mu >= 0).all()
    value = choose(scalar, costs, mu, np.zeros(n, dtype=np.int64), np.zeros(3))
    value += sum(mu[q] * (extra[q] - caps[q]) for q in range(3) if mu[q] > 0)
    if found.status == 0:
        assert value <= found.fun + 1e-9
        # Three caps that act at once are searched by pairs, which may stop a little short.
        short = found.fun - value
        acting = int((np.abs(found.ineqlin.marginals) > 1e-9).sum())
        assert short <= (1e-6 if acting < 3 else 0.05) * max(1.0, abs(found.fun))


def test_layers_that_differ_are_not_merged(make_problem: Make) -> None:
    problem = make_problem(9001, n_layers=5, n_types=2, n_variants=2, identical=False)
    codes = model_of(merge_types(problem)[0]).codes
    assert len(np.unique(codes)) == codes.size
