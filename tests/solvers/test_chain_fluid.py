"""Fluid bounds are never above the best assignment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from foreplan.solvers.chain_fluid import fluid_latency_s, quick_latency_s
from foreplan.solvers.chain_partition import ChainProblem, solve

Make = Callable[..., ChainProblem]


@pytest.mark.parametrize("block", range(6))
def test_bounds_are_below_the_best(block: int, make_problem: Make) -> None:
    close = 0
    for seed in range(3000 + 40 * block, 3040 + 40 * block):
        problem = dataclasses.replace(make_problem(seed), theta=0.0)
        best = solve(problem, gap=0.0).objective
        quick, fluid = (
            quick_latency_s(problem, problem.counts[None, :])[0],
            fluid_latency_s(problem),
        )
        assert quick <= best * (1 + 1e-9)
        assert fluid <= best * (1 + 1e-9)
        close += math.isfinite(best) and fluid >= 0.5 * best
    assert close >= 5


def test_an_endless_need_of_memory_is_seen(make_problem: Make) -> None:
    problem = make_problem(3, n_layers=4, n_types=2, n_variants=2, budgets=False)
    problem = dataclasses.replace(
        problem, memory_bytes=problem.memory_bytes + 1.0, capacity_bytes=[0.5, 0.5]
    )
    assert quick_latency_s(problem, problem.counts[None, :])[0] == math.inf
    assert fluid_latency_s(problem) == math.inf
