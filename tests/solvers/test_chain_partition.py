from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreplan.errors import SpecError
from foreplan.solvers import (
    _chain_course,
    _chain_driver,
    _chain_model,
    _chain_path,
    _chain_search,
    _chain_view,
    _stage_labels,
)
from foreplan.solvers._chain_box import Box, Price, Pricing
from foreplan.solvers._chain_search import Search
from foreplan.solvers.chain_partition import ChainProblem, evaluate, solve
from foreplan.solvers.enumerate import brute_force
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., ChainProblem]


def check_against_brute_force(problem: ChainProblem, gap: float) -> None:
    expected = brute_force(problem)
    got = solve(problem, gap=gap)
    assert got.status == expected.status
    assert got.lower_bound <= got.objective
    if expected.value is None:
        return
    assert got.value is not None
    assert got.gap <= gap + 1e-11
    assert got.lower_bound <= expected.objective * (1 + 1e-9)
    assert got.objective >= expected.objective * (1 - 1e-9)
    score = evaluate(problem, got.value)
    assert score.feasible
    assert score.objective == pytest.approx(got.objective, rel=1e-12)
    if gap == 0.0:
        assert got.objective == pytest.approx(expected.objective, rel=1e-9)


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block: int, make_problem: Make) -> None:
    for seed in range(40 * block, 40 * block + 40):
        check_against_brute_force(make_problem(seed), gap=0.0)


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("gap", [0.0, 1e-2])
def test_filtered_tables_equal_brute_force(
    block: int, gap: float, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if every table were too large to list: bounds first, then filtered tables.
    monkeypatch.setattr(_chain_driver, "_SMALL", -1)
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        check_against_brute_force(make_problem(seed), gap)


@pytest.mark.parametrize("seed", range(12))
def test_filter_and_full_table_agree_on_longer_chains(
    seed: int, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(seed, n_layers=14, n_types=2, identical=True)
    whole = solve(problem, gap=1e-7)
    monkeypatch.setattr(_chain_driver, "_SMALL", -1)
    filtered = solve(problem, gap=1e-7)
    assert filtered.status == whole.status
    if whole.found:
        assert filtered.objective == pytest.approx(whole.objective, rel=3e-7)


@pytest.mark.parametrize("limit", [1, 2, 5, 20])
def test_bounds_hold_when_stopped_early(
    limit: int, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chain_driver, "_SMALL", -1)
    for seed in range(40):
        problem = make_problem(seed)
        expected = brute_force(problem)
        got = solve(problem, gap=0.0, max_evaluations=limit)
        assert got.lower_bound <= expected.objective * (1 + 1e-9)
        assert got.objective >= expected.objective * (1 - 1e-9)
        if got.status in (SolutionStatus.OPTIMAL, SolutionStatus.INFEASIBLE):
            assert got.status == expected.status


def test_same_problem_gives_the_same_answer(make_problem: Make) -> None:
    problem = make_problem(3, n_layers=12, n_types=2, identical=True)
    assert solve(problem) == solve(problem)


def test_cutoff(make_problem: Make) -> None:
    for seed in range(30):
        problem = make_problem(seed)
        best = solve(problem)
        if not best.found:
            # Bounds may pass the cutoff before they show that there is nothing at all.
            got = solve(problem, cutoff=1e9).status
            assert got in (SolutionStatus.INFEASIBLE, SolutionStatus.CUTOFF)
            continue
        none = solve(problem, cutoff=best.objective)
        assert none.status == SolutionStatus.CUTOFF
        assert none.value is None
        assert none.lower_bound >= best.objective * (1 - 1e-5)
        assert none.lower_bound <= best.objective * (1 + 1e-9)
        again = solve(problem, cutoff=best.objective * 1.1)
        assert again.objective == pytest.approx(best.objective, rel=2e-6)


@pytest.mark.parametrize(
    "arguments", [{"gap": -0.1}, {"gap": math.nan}, {"cutoff": math.nan}, {"max_evaluations": 0}]
)
def test_bad_arguments(arguments: dict[str, float], make_problem: Make) -> None:
    with pytest.raises(SpecError):
        solve(make_problem(0), **arguments)  # type: ignore[arg-type]


def test_no_devices_is_infeasible(make_problem: Make) -> None:
    problem = make_problem(0, n_types=2)
    assert solve(replace(problem, counts=[0, 0])).status == SolutionStatus.INFEASIBLE


def test_many_different_devices(make_problem: Make) -> None:
    one = make_problem(0, n_types=1, n_layers=4, n_variants=1, budgets=False)

    def problem(k: int) -> ChainProblem:
        return ChainProblem(
            counts=np.ones(k, dtype=int),
            prefill_s=np.repeat(one.prefill_s, k, axis=0) * np.arange(1, k + 1)[:, None, None],
            decode_s=np.repeat(one.decode_s, k, axis=0),
            memory_bytes=np.repeat(one.memory_bytes, k, axis=0),
            capacity_bytes=np.full(k, 1.1 * one.memory_bytes.max()),
        )

    few, many = solve(problem(4), gap=0.0), solve(problem(40), gap=0.0)  # one for each layer
    assert many.status == SolutionStatus.OPTIMAL
    assert many.objective == pytest.approx(few.objective, rel=1e-12)


@pytest.mark.parametrize("block", range(5))
def test_devices_counted_when_a_chain_uses_too_many(
    block: int, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if there were too many devices to count them all from the start.
    monkeypatch.setattr(_chain_model, "ALL_COUNTED", 0)
    for seed in range(2000 + 40 * block, 2040 + 40 * block):
        monkeypatch.setattr(_chain_driver, "_SMALL", -1 if seed % 2 else 25_000)
        check_against_brute_force(make_problem(seed), gap=0.0)


@pytest.mark.parametrize("block", range(2))
def test_devices_counted_when_labels_run_out(
    block: int, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then types are counted that the box's bound has needed, one after the other."""
    counted = []

    def settled(search: Search, pricing: Pricing, box: Box, price: Price) -> None:
        box.labels = 3 if box.labels == 10_000 else box.labels
        _chain_view.settle(search, pricing, box, price)
        counted.append(box.starved and len(search.devices.used) > 1)

    monkeypatch.setattr(_chain_model, "ALL_COUNTED", 0)
    monkeypatch.setattr(_chain_search, "settle", settled)
    for seed in range(5000 + 50 * block, 5050 + 50 * block):
        monkeypatch.setattr(_chain_driver, "_SMALL", -1 if seed % 2 else 25_000)
        check_against_brute_force(make_problem(seed, n_layers=5, budgets=True), gap=0.0)
    assert any(counted)


@pytest.mark.parametrize("block", range(5))
def test_one_table_of_all_that_is_left(
    block: int, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chain_course, "few_stages", lambda _: False)
    monkeypatch.setattr(_chain_driver, "few_stages", lambda _: False)
    monkeypatch.setattr(_chain_driver, "_LONG", 0.0)
    for seed in range(6000 + 20 * block, 6020 + 20 * block):
        check_against_brute_force(make_problem(seed), gap=0.0)


@pytest.mark.parametrize("block", range(5))
def test_bounds_hold_where_devices_cannot_be_counted(
    block: int, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chain_model, "ALL_COUNTED", 0)
    monkeypatch.setattr(_chain_view, "MOST_COUNTED", 0)
    monkeypatch.setattr(_chain_path, "MOST_NODES", 0)
    found = 0
    for seed in range(3000 + 20 * block, 3020 + 20 * block):
        problem = make_problem(seed)
        expected = brute_force(problem)
        got = solve(problem, gap=1e-6, max_evaluations=300)
        assert got.lower_bound <= expected.objective * (1 + 1e-9)
        assert got.objective >= expected.objective * (1 - 1e-9)
        if got.status in (SolutionStatus.OPTIMAL, SolutionStatus.INFEASIBLE):
            assert got.status == expected.status
        found += got.found
    assert found > 2  # prices alone keep to the counts in some


def test_equal_devices_listed_one_by_one_are_one_type(make_problem: Make) -> None:
    base = make_problem(11, n_types=1, n_layers=5, identical=True, budgets=False, workspace=False)
    link = np.full((1, 1), 0.2)
    pool = replace(
        base, counts=[4], link_prefill_s=link, link_decode_s=link, link_return_decode_s=link
    )
    names = [f"{part}_{q}" for part in ("first", "last") for q in ("prefill_s", "decode_s")]
    names += ["first_memory_bytes", "last_memory_bytes", "fixed_memory_bytes", "capacity_bytes"]
    names += ["workspace_bytes"]
    names += ["prefill_s", "decode_s", "memory_bytes"]
    # The diagonal is no hop that a lone device could make.
    links = np.full((4, 4), 0.2) + np.diag([5.0, 6.0, 7.0, 8.0])
    listed = replace(
        pool,
        counts=[1, 1, 1, 1],
        link_prefill_s=links,
        link_decode_s=links,
        link_return_decode_s=links,
        **{name: np.repeat(getattr(pool, name), 4, axis=0) for name in names},
    )
    together, apart = solve(pool), solve(listed)
    assert apart.objective == pytest.approx(together.objective, rel=1e-9)
    assert apart.evaluations == together.evaluations
    assert apart.value is not None
    assert len({s.device_type for s in apart.value.stages}) == len(apart.value.stages)


def test_dominance_keeps_the_pareto_set() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        points = rng.integers(0, 6, (60, 3)).astype(float)
        kept = points[_stage_labels.undominated(points)]
        for point in points:
            assert (kept <= point).all(axis=1).any()
        # Few points: the result is the Pareto set itself.
        assert len(np.unique(kept, axis=0)) == len(kept)
