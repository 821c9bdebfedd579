"""The second opinions of `infeasible` against every choice there is, where that is few."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.robustness.infeasible import precision_feasible

import foreplan
from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError
from foreplan.planner.base import Problem
from foreplan.planner.precision.situation import Situation
from foreplan.planner.precision.spec import PrecisionWorkload

TIERS = [
    {"group": "all", "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9,
     "source": "made up"}
]  # fmt: skip


def posed(devices: list[dict[str, Any]], **more: Any) -> Problem[PrecisionWorkload]:
    asked = {
        "batch": 32, "network": "digits_mlp", "network_options": {"layers": 2, "width": 64},
        "indicator": "uniform", "precisions": ["fp32", "bf16"], "steps": 1,
        "bucket_bytes": 1 << 12, "first_bucket_bytes": 1 << 11,
    }  # fmt: skip
    workload = validate(PrecisionWorkload, asked | more, "workload")
    where = validate(Cluster, {"devices": devices, "tiers": TIERS}, "cluster")
    return Problem(None, where, workload, cost_book(where, Profiles(), "roofline"), 0)


def every(situation: Situation) -> list[list[Any]]:
    """All choices of each kind of device."""
    found = []
    for device in situation.devices:
        tables = device.tables
        modules = {tables.graph.operators[i].module: [p.name for p in tables.options[i]]
                   for i in tables.graph.adjustable}  # fmt: skip
        combinations = itertools.product(*modules.values())
        found.append([tables.choice(dict(zip(modules, c, strict=True))) for c in combinations])
    return found


def test_the_least_time_is_the_least_of_all_choices() -> None:
    devices = [{"name": "t4"}, {"name": "v100_sxm2_16gb"}]
    situation = Situation(posed(devices))
    times = [
        situation.replay.run(situation.each(list(both))).iteration_s
        for both in itertools.product(*every(situation))
    ]
    least = min(times)
    assert len(set(times)) > 10
    assert precision_feasible(posed(devices, target_s=least * (1 + 1e-6)), timed=True)
    assert not precision_feasible(posed(devices, target_s=least * (1 - 1e-6)), timed=True)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_least_memory_is_the_least_of_all_choices(layers: int) -> None:
    options = {"layers": layers, "width": 64}
    situation = Situation(posed([{"name": "t4"}], network_options=options))
    held = [situation.devices[0].saved.held_bytes(c).sum() for c in every(situation)[0]]
    least = int(np.min(held)) + sum(situation.static_bytes(0).values())
    assert len(set(held)) > 2
    for spare, holds in ((0, True), (-1, False)):
        devices = [{"name": "t4", "memory_bytes": least + spare}]
        problem = posed(devices, network_options=options)
        assert precision_feasible(problem, timed=False) is holds
        workload = problem.workload.model_dump()
        if holds:
            foreplan.plan("precision", None, problem.cluster, workload, costs="roofline")
        else:
            with pytest.raises(InfeasibleError, match="needs at least"):
                foreplan.plan("precision", None, problem.cluster, workload, costs="roofline")
