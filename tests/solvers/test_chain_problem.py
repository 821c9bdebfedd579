from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreplan.errors import SpecError
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage

# Two types, three layers, two variants; variant 1 is slower to prefill, faster to decode, smaller.
LAYER: dict[str, Any] = {
    "prefill_s": [[[1.0, 2.0]] * 3, [[2.0, 4.0]] * 3],
    "decode_s": [[[0.4, 0.2]] * 3, [[0.8, 0.4]] * 3],
    "memory_bytes": [[[10.0, 5.0]] * 3, [[10.0, 5.0]] * 3],
}


def problem(**changes: Any) -> ChainProblem:
    fields: dict[str, Any] = {
        **LAYER,
        "counts": [1, 1],
        "capacity_bytes": [25.0, 25.0],
        "omega": [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]],
        "first_prefill_s": [0.5, 0.6],
        "first_decode_s": [0.05, 0.06],
        "first_memory_bytes": [1.0, 1.0],
        "last_prefill_s": [0.7, 0.8],
        "last_decode_s": [0.07, 0.08],
        "last_memory_bytes": [2.0, 2.0],
        "fixed_memory_bytes": [0.5, 0.5],
        "link_prefill_s": [[9.0, 0.3], [9.0, 9.0]],
        "link_decode_s": [[9.0, 0.03], [9.0, 9.0]],
        "link_return_decode_s": [[9.0, 9.0], [0.01, 9.0]],
        "prefill_microbatches": 4,
        "decode_microbatches": 2,
        "new_tokens": 11,
        "theta": 0.5,
    }
    return ChainProblem(**{**fields, **changes})


def two_stages(p: ChainProblem) -> ChainAssignment:
    return ChainAssignment((make_stage(p, 0, 0, 2, [0, 1]), make_stage(p, 1, 2, 3, [1])))


def test_law_by_hand() -> None:
    p = problem()
    score = evaluate(p, two_stages(p))
    stage_p = (1.0 + 2.0 + 0.5, 4.0 + 0.8)
    stage_d = (0.4 + 0.2 + 0.05, 0.4 + 0.08)
    assert score.prefill_sum_s == pytest.approx(sum(stage_p) + 0.3)
    assert score.prefill_max_s == pytest.approx(4.8)
    assert score.decode_sum_s == pytest.approx(sum(stage_d) + 0.03 + 0.01)
    assert score.decode_max_s == pytest.approx(0.65)
    expected = sum(stage_p) + 0.3 + 3 * 4.8 + 10 * max(sum(stage_d) + 0.04, 2 * 0.65)
    assert score.latency_s == pytest.approx(expected)
    assert score.omega == pytest.approx(5.0)
    assert score.objective == pytest.approx(expected + 0.5 * 5.0)
    assert score.feasible


def test_a_stage_takes_the_most_that_its_layers_need_once() -> None:
    once = np.zeros((2, 2, 4, 3))
    once[0, 0, 1, 1], once[0, 1, 1, 1] = 3.0, 5.0  # first of a chain, two layers long
    p = problem(workspace_bytes=once, needs=[[0, 1], [0, 1], [0, 1]])
    free = problem()
    for variants, more in (([0, 0], 3.0), ([0, 1], 5.0), ([1, 1], 5.0)):
        bare = make_stage(free, 0, 0, 2, variants).memory_bytes
        assert make_stage(p, 0, 0, 2, variants).memory_bytes == pytest.approx(bare + more)
    alone = [make_stage(q, 0, 0, 1, [1]).memory_bytes for q in (p, free)]
    assert alone[0] == pytest.approx(alone[1])  # nothing is said of one layer


@pytest.mark.parametrize("needs", [[[0, 1]], [[0, 1]] * 2 + [[0, 2]], [[0.5, 1.0]] * 3])
def test_needs_that_are_not_there(needs: list[list[float]]) -> None:
    with pytest.raises(SpecError, match="needs"):
        problem(workspace_bytes=np.zeros((2, 2, 4, 3)), needs=needs)


def test_one_token_has_no_decode_term() -> None:
    p = problem(new_tokens=1)
    score = evaluate(p, two_stages(p))
    assert score.latency_s == pytest.approx(score.prefill_sum_s + 3 * score.prefill_max_s)


def test_sum_of_decode_dominates_with_one_microbatch() -> None:
    p = problem(decode_microbatches=1, prefill_microbatches=1)
    score = evaluate(p, two_stages(p))
    assert score.latency_s == pytest.approx(score.prefill_sum_s + 10 * score.decode_sum_s)


def test_a_slow_hop_is_the_bottleneck() -> None:
    p = problem(link_prefill_s=[[0, 50.0], [0, 0]], link_return_decode_s=[[0, 0], [7.0, 0]])
    score = evaluate(p, two_stages(p))
    assert score.prefill_max_s == 50.0
    assert score.decode_max_s == 7.0


def test_a_single_stage_has_both_edges_and_no_hop() -> None:
    p = problem()
    score = evaluate(p, ChainAssignment((make_stage(p, 0, 0, 3, [1, 1, 1]),)))
    assert score.prefill_sum_s == pytest.approx(6.0 + 0.5 + 0.7)
    assert score.decode_sum_s == pytest.approx(0.6 + 0.05 + 0.07)
    assert score.feasible
    assert make_stage(p, 0, 0, 3, [1, 1, 1]).memory_bytes == pytest.approx(15 + 1 + 2 + 0.5)


def test_violations_are_named() -> None:
    p = problem(capacity_bytes=[5.0, 25.0], max_omega=1.0, cost2=[[1.0, 0.0]] * 3, max_cost2=0.5)
    twice = ChainAssignment((make_stage(p, 0, 0, 2, [0, 1]), make_stage(p, 0, 2, 3, [0])))
    broken = "\n".join(evaluate(p, twice).violations)
    for part in ("2 stages on type 0", "stage 0 needs", "omega", "cost2"):
        assert part in broken


def test_a_missing_variant_is_infinite() -> None:
    p = problem(decode_s=[[[0.4, math.inf]] * 3, [[0.8, 0.4]] * 3])
    score = evaluate(p, two_stages(p))
    assert score.objective == math.inf
    assert not score.feasible


def test_limits_have_float_slack() -> None:
    p = problem(
        omega=np.full((3, 2), 0.1), max_omega=0.3, cost2=np.full((3, 2), -4.1), max_cost2=-12.3
    )
    assert evaluate(p, two_stages(p)).feasible


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_s": [[1.0]]},
        {"prefill_s": np.empty((0, 3, 2))},
        {"decode_s": [[[0.4, 0.2]] * 2] * 2},
        {"decode_s": "fast"},
        {"memory_bytes": [[[math.nan, 5.0]] * 3] * 2},
        {"memory_bytes": [[[-1.0, 5.0]] * 3] * 2},
        {"capacity_bytes": [1.0]},
        {"capacity_bytes": []},
        {"omega": [[math.inf, 0.0]] * 3},
        {"omega": [[-0.1, 0.0]] * 3},
        {"cost2": [[math.nan, 0.0]] * 3},
        {"counts": [1, -1]},
        {"counts": [1.5, 1]},
        {"counts": [1]},
        {"link_prefill_s": [[0.0, -1.0], [0.0, 0.0]]},
        {"prefill_microbatches": 0},
        {"decode_microbatches": 1.5},
        {"new_tokens": 0},
        {"theta": -1.0},
        {"theta": math.nan},
        {"max_omega": -1.0},
        {"max_cost2": math.inf},
    ],
)
def test_bad_fields_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(changes))):
        problem(**changes)


def test_arrays_are_copied_and_read_only() -> None:
    omega = np.zeros((3, 2))
    p = problem(omega=omega)
    omega[0, 0] = 1.0
    assert p.omega[0, 0] == 0.0
    with pytest.raises(ValueError, match="read-only"):
        p.omega[0, 0] = 1.0
    assert replace(p, theta=2.0).theta == 2.0


@pytest.mark.parametrize(
    "stage", [(2, 0, 1, [0]), (0, 1, 1, []), (0, 0, 4, [0] * 4), (0, 0, 2, [0]), (0, 0, 1, [2])]
)
def test_bad_stages_are_refused(stage: tuple[int, int, int, list[int]]) -> None:
    with pytest.raises(SpecError):
        make_stage(problem(), *stage)


def test_only_partitions_are_scored() -> None:
    p = problem()
    part = make_stage(p, 0, 0, 1, [0])
    for stages in ((), (part,), (part, make_stage(p, 1, 2, 3, [0]))):
        with pytest.raises(SpecError, match="stages"):
            evaluate(p, ChainAssignment(stages))
