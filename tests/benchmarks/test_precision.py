"""Replays of precision plans on a step of BERT-base size: 12 blocks, 13 gradient buckets."""

import numpy as np
import pytest
import torch
from torch import nn

from foreplan.cost_models.costs import CostBook, Estimate
from foreplan.cost_models.ddp_buckets import ddp_buckets
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.kernels.training_programs import optimizer_program
from foreplan.datasets.models.networks import ByteLM, ByteLMConfig
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.pricing import StepTables
from foreplan.planner.precision.replay import DeviceReplay, StepReplay
from foreplan.planner.precision.step import Buckets

PLANS, PLANS_A_SECOND = 50, 100


class Priced:
    """A second a work, more in fp32."""

    def estimate(self, work, device):
        return Estimate.exact(2.0 if "fp32/fp32" in str(work) else 1.0)


class Split(nn.Module):
    """Queries, keys and values from linears of their own, as BERT has them."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return torch.cat((self.query(x), self.key(x), self.value(x)), -1)


@pytest.fixture(scope="module")
def replay():
    with torch.device("meta"):
        module = ByteLM(ByteLMConfig(width=768, layers=12, heads=12, context=384))
        for block in module.blocks:
            block.qkv = Split(768)
        ids = torch.zeros(12, 384, dtype=torch.int64)
        graph = TrainingGraph.from_capture(capture(module, (ids,)), module)
    costs = CostBook([Priced()])
    buckets = Buckets.of(graph, ddp_buckets(graph.parameters))
    devices = [
        DeviceReplay(StepTables(graph, costs, name, "cpu", ("fp32", "bf16", "int8")), buckets)
        for name in ("a", "b")
    ]
    update = optimizer_program("adamw", sum(graph.parameters.values()))
    return StepReplay(devices, ["a", "b"], update, costs, None)


def test_plans_a_second(benchmark, replay) -> None:
    """Cascade, seconds, saved bytes and simulation of plans that all differ."""
    tables = replay.devices[0].tables
    assert len(tables.graph.adjustable) > 70
    rng = np.random.default_rng(0)
    plans = [
        {
            tables.graph.operators[i].module: str(rng.choice([p.name for p in tables.options[i]]))
            for i in tables.graph.adjustable
        }
        for _ in range(PLANS)
    ]

    def run():
        return [replay.run([d.tables.choice(names) for d in replay.devices]) for names in plans]

    replayed = benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    assert len({r.iteration_s for r in replayed}) > PLANS // 2
    if benchmark.stats is not None:  # the plain test run times nothing
        assert PLANS / benchmark.stats.stats.min > PLANS_A_SECOND
