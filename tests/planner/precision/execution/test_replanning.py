"""Ranks that become slower or faster than they were priced get other precisions, both ways."""

from __future__ import annotations

import pytest

from foreplan.cost_models.costs import Collective, CostBook, Estimate
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.program import Program
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.precision.execution.adjust import LiveAdjustment
from foreplan.planner.precision.execution.replanning import PlannerReplan
from foreplan.planner.precision.planner import PrecisionPlanner
from foreplan.planner.precision.spec import PrecisionWorkload

#: Seconds a FLOP by dtype, made up: bf16 halves a linear's time on either device.
RATES = {"fp32": 2e-9, "bf16": 1e-9, "int8": 1e-9}


class Rates:
    def estimate(self, work: object, device: str) -> Estimate | None:
        if isinstance(work, Program):
            return Estimate.exact(1e-9 + RATES.get(work.variant.compute, 2e-9) * work.flops)
        return Estimate.exact(1e-6 if isinstance(work, Collective) else 1e-9)


@pytest.fixture(scope="module")
def problem() -> Problem[PrecisionWorkload]:
    cluster = parse_devices("2xt4", "--devices")
    entries = tuple(e.model_copy(update={"memory_bytes": 4 << 30}) for e in cluster.devices)
    workload = PrecisionWorkload(
        batch=8, network="digits_mlp", network_options={"width": 64, "layers": 4}, steps=1,
        precisions=("fp32", "bf16"), calibration_batches=1, slack=0.05,
    )  # fmt: skip
    cluster = cluster.model_copy(update={"devices": entries})
    return Problem(None, cluster, workload, CostBook([Rates()]), 0)


def low(decision, rank: int) -> int:
    return sum("/bf16/" in text for text in decision.workers[rank].operators.values())


def seconds(replan: PlannerReplan, *slowness: float) -> list[float]:
    """What ranks take that are so much slower than priced, at their present precisions."""
    situation = replan._priced
    choices = situation.choices(replan.decision)
    found = [d.seconds(c) for d, c in zip(situation.devices, choices, strict=True)]
    return [(f + b.sum()) * by for (f, b), by in zip(found, slowness, strict=True)]


def test_the_faster_rank_gets_precision_and_gives_it_back(problem) -> None:
    start = PrecisionPlanner().decide(problem).decision
    ranks = [PlannerReplan(problem, start, rank) for rank in range(2)]

    def all_ranks(*slowness: float) -> list[dict[str, str] | None]:
        told = seconds(ranks[0], *slowness)
        return [replan(told) for replan in ranks]

    assert all_ranks(1.0, 1.0) == [None, None]
    assert all_ranks(1.3, 1.3) == [None, None], "a machine that is slower as a whole"
    assert low(start, 0) > 1
    changed = all_ranks(1.0, 1.6)
    assert changed[0] is not None
    assert ranks[0].decision == ranks[1].decision, "no message is needed to agree"
    assert low(ranks[0].decision, 0) < low(start, 0)
    assert low(ranks[0].decision, 1) >= low(start, 1)
    assert all_ranks(1.0, 1.6) == [None, None], "nothing has changed since"
    all_ranks(1.6, 1.0)
    now = ranks[0].decision
    assert low(now, 0) >= low(start, 0), "what was given is taken back"
    assert low(now, 1) < low(start, 1)


def test_ranks_that_are_alike_are_decided_apart(problem) -> None:
    start = PrecisionPlanner().decide(problem).decision
    assert start.workers[0].operators == start.workers[1].operators
    replan = PlannerReplan(problem, start, 0)
    replan(seconds(replan, 1.0, 1.6))
    assert replan.decision.workers[0].operators != replan.decision.workers[1].operators


def test_training_goes_on_with_what_the_planner_says(problem) -> None:
    import torch

    from foreplan.planner.precision.execution.modules import apply_variants
    from foreplan.planner.precision.task import training_task

    start = PrecisionPlanner().decide(problem).decision
    replan = PlannerReplan(problem, start, 0)
    task = training_task(None, problem.workload, 0)
    model = apply_variants(task.module(), start.workers[0].operators)
    told = iter([seconds(replan, 1.0, 1.0), seconds(replan, 1.0, 1.6)])
    adjust = LiveAdjustment(model, replan, period=2, gather=lambda mine: next(told))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        (x,), y = task.batch(step, 0)
        with adjust.step():
            task.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [changed for *_, changed in adjust.history] == [False, True]
    dtypes = {m.planned.recipe.forward for m in model.modules() if hasattr(m, "planned")}
    assert "fp32" in dtypes


def test_a_decision_for_another_network_is_refused(problem) -> None:
    start = PrecisionPlanner().decide(problem).decision
    with pytest.raises(SpecError, match=r"decision\.network"):
        PlannerReplan(problem, start.model_copy(update={"network": "another"}), 0)
    with pytest.raises(SpecError, match="rank"):
        PlannerReplan(problem, start, 2)


def test_what_lies_within_the_margin_is_left_alone(problem) -> None:
    start = PrecisionPlanner().decide(problem).decision
    replan = PlannerReplan(problem, start, 0, margin=10.0)
    assert replan(seconds(replan, 1.0, 5.0)) is None, "within the margin"
