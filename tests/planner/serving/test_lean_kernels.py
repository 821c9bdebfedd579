"""Kernels that take less memory than the fastest, where memory binds."""

from __future__ import annotations

import dataclasses

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.load_workload import load_workload
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.chain import ServingChains

PLANNER = ServingPlanner()
#: The device that computes fast has no room for the largest matrix twice.
TIGHT = (3924772917, 4478903463)


def problem(new_tokens: int, memory: tuple[int, int] = TIGHT, **workload: object) -> Problem:
    devices = [
        {"name": name, "host": host, "memory_bytes": size}
        for name, host, size in zip(("a100-80g", "t4"), ("h0", "h1"), memory, strict=True)
    ]
    tier = {
        "group": ["all"], "scope": "network", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e8,
        "source": "made up",
    }  # fmt: skip
    cluster = validate(Cluster, {"devices": devices, "tiers": [tier]}, "test")
    asked = {"batch": 32, "prompt_tokens": 500, "prefill_microbatch": 4, "bits": [4]} | workload
    return Problem(
        model=load_model("mistral-7b-v0.3"), cluster=cluster,
        workload=load_workload("serving", asked | {"new_tokens": new_tokens}),
        costs=cost_book(cluster, Profiles(), "roofline"), seed=0,
    )  # fmt: skip


def test_fewer_tokens_need_no_more_memory_and_no_more_time() -> None:
    totals = []
    for new_tokens in (1, 2, 6):
        asked = problem(new_tokens)
        choice = PLANNER.decide(asked)
        found = Forecast(PLANNER, asked, choice.decision)
        assert all(ledger.free_bytes is None or ledger.free_bytes >= 0 for ledger in found.ledgers)
        assert choice.bound.status == "optimal"
        totals.append(found.total_s)
    assert totals == sorted(totals)


def test_a_plan_of_lean_kernels_says_so_and_has_neighbours() -> None:
    asked = problem(1)
    choice = PLANNER.decide(asked)
    chains = PLANNER._chains(asked)
    assert chains.leaner(choice.decision)
    assert any("the kernels that take least memory" in note for note in choice.assumptions)
    assert choice.near


def test_ample_memory_asks_for_the_fastest_alone() -> None:
    asked = problem(4, memory=(60 << 30, 15 << 30))
    chains: ServingChains = PLANNER._chains(asked)
    assert not any(sizes.lean for sizes in chains.sizes())
    choice = PLANNER.decide(asked)
    assert not chains.leaner(choice.decision)
    assert not any("least memory" in note for note in choice.assumptions)


def test_lean_kernels_are_no_faster_and_take_no_more() -> None:
    chains = PLANNER._chains(problem(1))
    lean = next(sizes for sizes in chains.sizes() if sizes.lean)
    fast = dataclasses.replace(lean, lean=False)
    one, other = chains.problem(fast), chains.problem(lean)
    assert (other.workspace_bytes <= one.workspace_bytes).all()
    assert (other.workspace_bytes < one.workspace_bytes).any()
    w = chains.pricing.workload
    steps = (w.batch // lean.prefill, (w.new_tokens - 1) * (w.batch // lean.decode))
    fast_s, lean_s = (p.prefill_s * steps[0] + p.decode_s * steps[1] for p in (one, other))
    assert (fast_s <= lean_s * (1 + 1e-9)).all()
