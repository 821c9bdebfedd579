"""Plans on GPUs say where a host that nobody profiled may decide."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.datasets.kernels.training_programs import linear_program
from foreplan.planner.api import load_cluster, plan
from foreplan.planner.host_note import host_note
from foreplan.planner.plan import Plan
from foreplan.planner.registry import planner

NARROW = {"width": 64, "layers": 1, "heads": 4, "context": 32}


def planned(devices: str, costs: str = "predicted", **network: Any) -> Plan:
    workload = {
        "network": "byte_lm", "network_options": NARROW | network, "batch": 4, "steps": 1,
        "precisions": ["fp32", "bf16"],
    }  # fmt: skip
    return plan("precision", None, devices, workload, costs=costs)


def notes(found: Plan) -> list[str]:
    return [each for each in found.assumptions if each.startswith("no host was profiled")]


@pytest.mark.parametrize("costs", ["predicted", "measured"])
def test_a_small_step_on_gpus_may_wait_for_its_host(costs: str) -> None:
    found = planned("2xh200@a", costs)
    (note,) = notes(found)
    mean, low, high, total = map(float, re.findall(r"([\d.]+)(?: ms| to|\))", note))
    assert low < mean < high
    assert total == pytest.approx(1e3 * found.predicted.total_s, rel=1e-2)
    assert mean > 2 * total, "prices leave hosts out"


@pytest.mark.parametrize(
    ("kind", "devices", "total_s", "profiled", "said"),
    [
        ("precision", "2xh200@a", 1e-6, False, True),
        # Long steps, hosts that a profile knows, graphs, which the host launches at once, and
        # processors, which are their own hosts.
        ("precision", "2xh200@a", 1.0, False, False), ("precision", "2xh200@a", 1e-6, True, False),
        ("serving", "2xh200@a", 1e-6, False, False), ("bubbles", "2xh200@a", 1e-6, False, False),
        ("precision", "2xepyc_9654@a", 1e-6, False, False),
    ],
)  # fmt: skip
def test_where_a_host_may_decide(
    kind: str, devices: str, total_s: float, profiled: bool, said: bool
) -> None:
    cluster, _ = load_cluster(devices)
    builder = ScheduleBuilder([rank.label for rank in cluster.ranks()])
    builder.add("F", 1, linear_program("forward", 64, 32, 16, "fp32/fp32/torch.linear"))
    forecast: Any = SimpleNamespace(schedule=builder.build(), total_s=total_s)
    costs = SimpleNamespace(issuing=lambda *_: Estimate.exact(1.0) if profiled else None)
    problem: Any = SimpleNamespace(cluster=cluster, costs=costs)
    found = host_note(planner(kind), problem, forecast)
    assert len(found) == said
