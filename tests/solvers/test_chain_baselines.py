from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreplan.errors import SpecError
from foreplan.solvers import chain_baselines
from foreplan.solvers.chain_baselines import even_split, memory_proportional_split, min_max_split
from foreplan.solvers.chain_partition import ChainAssignment, ChainProblem, evaluate, solve

Make = Callable[..., ChainProblem]
SPLITS = (even_split, memory_proportional_split, min_max_split)


def plain(n_layers: int, counts: list[int], capacity: list[float]) -> ChainProblem:
    k = len(counts)
    speed = np.arange(1, k + 1)[:, None, None]
    return ChainProblem(
        counts=counts,
        prefill_s=np.ones((k, n_layers, 2)) * speed,
        decode_s=np.ones((k, n_layers, 2)) * speed,
        memory_bytes=np.broadcast_to([1.0, 2.0], (k, n_layers, 2)),
        capacity_bytes=capacity,
        new_tokens=10,
        decode_microbatches=4,
    )


def shape(assignment: ChainAssignment | None) -> list[tuple[int, int]]:
    assert assignment is not None
    return [(s.device_type, s.end - s.start) for s in assignment.stages]


def test_even_split() -> None:
    problem = plain(10, [2, 1], [100.0, 100.0])
    assert shape(even_split(problem, [0], [1, 0, 0])) == [(1, 4), (0, 3), (0, 3)]
    # Free to choose, it puts the odd layer on a fast device.
    assert shape(even_split(problem, [0]))[0][0] == 0


def test_memory_proportional_split() -> None:
    problem = plain(10, [1, 1], [30.0, 10.0])
    assert shape(memory_proportional_split(problem, [0], [0, 1])) == [(0, 7), (1, 3)]


def test_min_max_split_balances_and_drops_what_slows_it_down() -> None:
    problem = plain(9, [1, 1], [100.0, 100.0])
    assert shape(min_max_split(problem, [0], [0, 1])) == [(0, 6), (1, 3)]
    slow = replace(problem, decode_s=problem.decode_s * np.array([1, 50])[:, None, None])
    assert shape(min_max_split(slow, [0])) == [(0, 9)]
    assert shape(min_max_split(slow, [0], [1, 0])) == [(0, 9)]


def test_first_variant_that_fits() -> None:
    problem = plain(8, [2], [10.0])
    for split in SPLITS:
        assignment = split(problem, [1, 0])
        assert assignment is not None
        assert set(assignment.variants) == {1}
        tight = replace(problem, capacity_bytes=[5.0])
        smaller = split(tight, [1, 0])
        assert smaller is not None
        assert set(smaller.variants) == {0}
        assert split(replace(problem, capacity_bytes=[3.0]), [1, 0]) is None


@pytest.mark.parametrize("seed", range(40))
def test_feasible_and_never_better_than_the_optimum(seed: int, make_problem: Make) -> None:
    problem = make_problem(seed)
    optimum = solve(problem, gap=0.0).objective
    for split in SPLITS:
        assignment = split(problem, range(problem.n_variants))
        if assignment is not None:
            score = evaluate(problem, assignment)
            assert score.feasible
            assert score.objective >= optimum * (1 - 1e-9)


@pytest.mark.parametrize("split", [even_split, memory_proportional_split])
@pytest.mark.parametrize("seed", range(25))
def test_best_order_is_the_best_of_all(
    split: Callable[..., ChainAssignment | None], seed: int, make_problem: Make
) -> None:
    problem = make_problem(seed, n_types=3, n_layers=3 + seed % 5)
    free = split(problem, [0])
    devices = [k for k, count in enumerate(problem.counts) for _ in range(count)]
    orders = sorted({order[: problem.n_layers] for order in itertools.permutations(devices)})
    each = [split(problem, [0], order) for order in orders if order]
    feasible = [(evaluate(problem, a).objective, a) for a in each if a is not None]
    assert free == (min(feasible, key=lambda pair: pair[0])[1] if feasible else None)


@pytest.mark.parametrize("seed", range(30))
def test_min_max_is_the_least_over_all_orders(seed: int, make_problem: Make) -> None:
    problem = make_problem(seed, budgets=False)
    devices = [k for k, count in enumerate(problem.counts) for _ in range(count)]
    free = min_max_split(problem, [0])
    orders = set(itertools.permutations(devices))
    each = [min_max_split(problem, [0], order) for order in orders if order]
    longest = [evaluate(problem, a).decode_max_s for a in each if a is not None]
    if free is None:
        assert not longest
    else:
        assert evaluate(problem, free).decode_max_s == pytest.approx(min(longest))


def test_more_devices_than_python_calls_deep() -> None:
    problem = plain(4, [3000], [100.0])
    for split in SPLITS:
        assignment = split(problem, [0])
        assert assignment is not None
        assert len(assignment.stages) <= 4


@pytest.mark.parametrize("counts", [[0, 0], [1], [3], [1, 2], [2, 0, 2], [1, 1, 1, 2]])
def test_orders_are_all_distinct_ones(counts: list[int]) -> None:
    problem = plain(9, counts, [100.0] * len(counts))
    devices = [k for k, count in enumerate(counts) for _ in range(count)]
    wanted = sorted(set(itertools.permutations(devices))) if devices else []
    assert [tuple(order) for order in chain_baselines._orders(problem).tolist()] == wanted


def test_too_many_orders_keep_types_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_baselines, "MAX_ORDERS", 1)
    types = [k for k, _ in shape(even_split(plain(8, [2, 2], [100.0, 100.0]), [0]))]
    assert types == sorted(types) or types == sorted(types, reverse=True)


def test_bad_arguments() -> None:
    problem = plain(4, [1, 1], [100.0, 100.0])
    for split in SPLITS:
        for variants, order in (([], None), ([2], None), ([0], [0, 0]), ([0], [2]), ([0], [])):
            with pytest.raises(SpecError):
                split(problem, variants, order)


@pytest.mark.parametrize("most", [2, 7, 30])
def test_of_many_kinds_of_device_some_orders_are_compared(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Else nine kinds are 362,880 orders, which take minutes beside a plan of seconds."""
    problem = plain(8, [1, 2, 1, 1, 1], [100.0, 90.0, 80.0, 70.0, 60.0])
    every = even_split(problem, [0])
    monkeypatch.setattr(chain_baselines, "MAX_ORDERS", most)
    orders = [tuple(order) for order in chain_baselines._orders(problem).tolist()]
    assert len(orders) == len(set(orders)) <= max(most, 6)
    assert all(sorted(order) == [0, 1, 1, 2, 3, 4] for order in orders)
    some = even_split(problem, [0])
    assert every is not None
    assert some is not None
    assert evaluate(problem, some).objective >= evaluate(problem, every).objective * (1 - 1e-12)
