from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreplan.solvers.chain_diagnosis import Obstacle, diagnose
from foreplan.solvers.chain_partition import ChainProblem, solve

Make = Callable[..., ChainProblem]


def problem() -> ChainProblem:
    """Four layers, two devices of one type; variant 1 is smaller and loses quality."""
    return ChainProblem(
        counts=[2],
        prefill_s=np.ones((1, 4, 2)),
        decode_s=np.ones((1, 4, 2)),
        memory_bytes=np.broadcast_to([10.0, 4.0], (1, 4, 2)),
        capacity_bytes=[14.0],
        omega=np.broadcast_to([0.0, 1.0], (4, 2)),
        cost2=np.broadcast_to([-16.0, -4.0], (4, 2)),
    )


def test_nothing_in_the_way() -> None:
    assert diagnose(problem()).obstacle == Obstacle.NONE


def test_memory() -> None:
    short = diagnose(replace(problem(), capacity_bytes=[7.0]))
    assert short.obstacle == Obstacle.MEMORY
    assert short.excess == pytest.approx(2.0)
    assert sum(need - there for *_, need, there in short.stages) == pytest.approx(2.0)
    assert "2 bytes" in short.message


def test_budgets() -> None:
    # 14 bytes hold one layer of 10 and one of 4: two layers of each variant at best.
    omega = diagnose(replace(problem(), max_omega=1.5))
    assert (omega.obstacle, omega.need, omega.excess) == (Obstacle.OMEGA, 2.0, 0.5)
    bits = diagnose(replace(problem(), max_cost2=-44.0))
    assert (bits.obstacle, bits.need, bits.excess) == (Obstacle.COST2, -40.0, 4.0)


def test_both_budgets() -> None:
    p = replace(problem(), cost2=np.broadcast_to([1.0, 0.0], (4, 2)))
    both = diagnose(replace(p, max_omega=2.5, max_cost2=1.0))
    assert (both.obstacle, both.need, both.excess) == (Obstacle.BOTH_BUDGETS, 3.0, 0.5)


def test_availability() -> None:
    p = problem()
    prefill = p.prefill_s.copy()
    prefill[:, 2] = math.inf
    assert "layer 2" in diagnose(replace(p, prefill_s=prefill)).message
    assert "no devices" in diagnose(replace(p, counts=[0])).message
    unlinked = replace(p, link_decode_s=[[math.inf]], first_prefill_s=[math.inf])
    assert diagnose(unlinked).obstacle == Obstacle.AVAILABILITY


def test_agrees_with_the_solver(make_problem: Make) -> None:
    for seed in range(2000, 2150):
        random = make_problem(seed)
        assert solve(random).found == (diagnose(random).obstacle == Obstacle.NONE)
