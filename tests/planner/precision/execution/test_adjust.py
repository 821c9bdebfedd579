from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from foreplan.errors import SpecError
from foreplan.planner.precision.execution.adjust import LiveAdjustment, PrecisionLadder
from foreplan.planner.precision.execution.modules import apply_variants
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task

Make = Callable[..., PrecisionWorkload]
FP32, BF16 = "fp32/fp32/torch.linear", "fp32/bf16/torch.linear"
LOW = {"1": BF16, "3": BF16}
RUNGS = [("3", BF16, FP32), ("1", BF16, FP32)]


def test_precisions_follow_the_times_both_ways_without_a_restart(workload: Make) -> None:
    task = training_task(None, workload("digits_mlp", batch=32), 0)
    model = task.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    other = {"factor": 2.0}  # the other rank takes this many times as long

    def gather(seconds: float) -> Sequence[float]:
        assert seconds > 0
        return [seconds, seconds * other["factor"]]

    ladder = PrecisionLadder(0, LOW, RUNGS)
    apply_variants(model, ladder.variants)
    adjust = LiveAdjustment(model, ladder, period=2, gather=gather)
    losses, seen = [], []
    for step in range(24):
        if step == 12:
            other["factor"] = 0.5
        with adjust.step():
            (x,), y = task.batch(step, 0)
            loss = task.loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seen.append(tuple(ladder.variants[name] for name in ("3", "1")))
    assert seen[1::2][:6] == [(FP32, BF16)] + [(FP32, FP32)] * 5
    assert seen[1::2][6:] == [(FP32, BF16)] + [(BF16, BF16)] * 5
    assert [changed for _, _, changed in adjust.history] == [True, True, *[False] * 4] * 2
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    part = model.get_submodule("1")
    assert isinstance(part, nn.Linear)
    assert part(torch.ones(1, 64)).dtype is torch.bfloat16


def test_waiting_after_the_last_gradient_does_not_count(workload: Make) -> None:
    task = training_task(None, workload("digits_mlp"), 0)
    model = task.module()
    found: list[float] = []

    def gather(seconds: float) -> Sequence[float]:
        found.append(seconds)
        return [seconds]

    adjust = LiveAdjustment(model, lambda seconds: None, period=1, gather=gather)
    began = time.perf_counter()
    with adjust.step():
        (x,), y = task.batch(0, 0)
        task.loss(model(x), y).backward()
        time.sleep(0.3)  # an all-reduce that waits for another rank
    assert 0 < found[0] <= time.perf_counter() - began - 0.3


def test_small_differences_move_nothing() -> None:
    ladder = PrecisionLadder(1, LOW, RUNGS, margin=0.1)
    assert ladder([1.0, 0.95]) is None
    assert ladder([1.0, 1.05]) is None
    assert ladder([1.0, 2.0]) is None, "nothing is left to lower"
    assert ladder([1.0, 0.8]) == {"1": BF16, "3": FP32}
    assert ladder([1.0, 0.8]) == {"1": FP32, "3": FP32}
    assert ladder([1.0, 0.8]) is None
    assert ladder([1.0, 1.2]) == {"1": BF16, "3": FP32}


def test_rungs_have_to_fit() -> None:
    with pytest.raises(SpecError, match="rungs"):
        PrecisionLadder(0, {"1": FP32, "3": BF16}, RUNGS)
    model = nn.Linear(2, 2)
    with pytest.raises(SpecError, match="period"):
        LiveAdjustment(model, lambda seconds: None, period=0)
    adjust = LiveAdjustment(model, lambda seconds: None, gather=lambda s: [s])
    with pytest.raises(SpecError, match="a backward pass in the block"), adjust.step():
        pass
