"""Fluid bounds are never above the best assignment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from foreplan.solvers.chain_fluid import Pool, fluid_latency_s, quick_latency_s
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


@pytest.mark.parametrize("block", range(3))
def test_the_bound_of_a_pool_is_below_every_way_to_group_it(block: int, make_problem: Make) -> None:
    close = 0
    for seed in range(5000 + 20 * block, 5020 + 20 * block):
        made = make_problem(seed, n_types=3)
        problem = dataclasses.replace(made, theta=0.0)
        pools = [Pool(np.array([1, 2, 0]), 4), Pool(np.array([0, 0, 1]), 1)]
        ways = np.array([[4, 0, 1], [2, 1, 1], [0, 2, 1]])
        bound = fluid_latency_s(problem, counts=np.ones(3, dtype=np.int64), pools=pools)
        for way in ways:
            assert bound <= fluid_latency_s(problem, counts=way) * (1 + 1e-6)
        best = min(solve(dataclasses.replace(problem, counts=w), gap=0.0).objective for w in ways)
        assert bound <= best * (1 + 1e-6)
        close += math.isfinite(best) and bound >= 0.5 * best
    assert close


def test_of_more_devices_than_layers_each_has_a_whole_one(make_problem: Make) -> None:
    problem = make_problem(7, n_layers=4, n_types=1, n_variants=1, budgets=False)
    layer_s = float(problem.prefill_s.min())
    many = np.array([400])
    problem = dataclasses.replace(problem, prefill_microbatches=1001, new_tokens=1)
    assert quick_latency_s(problem, many[None, :])[0] >= 1000 * layer_s
    assert fluid_latency_s(problem, counts=many) >= 1000 * layer_s * (1 - 1e-6)
