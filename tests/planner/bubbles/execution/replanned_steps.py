"""A training run whose order changes after every step, and what its process has open meanwhile."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, cast

import bubble_cases
import torch.distributed as dist

from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.specs import validate
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.trainer import BubbleTrainer
from foreplan.planner.bubbles.online import OnlinePlanner, Replanned


class Restless:
    """Re-plans after every step: the decisions in turn, again and again."""

    def __init__(self, decisions: list[BubblesDecision]) -> None:
        self.decisions, self.step = decisions, 0

    def rehearse(self) -> None: ...

    def observe(self, timeline: Timeline) -> Replanned:
        self.step += 1
        return Replanned(self.decisions[self.step % len(self.decisions)], {}, 1.0, 1.0)


def opened() -> dict[str, int]:
    """What this process has open: process groups, file descriptors, threads."""
    gc.collect()
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "sockets": sum(_is_socket(fd) for fd in Path("/proc/self/fd").iterdir()),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _is_socket(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor).startswith("socket:")
    except FileNotFoundError:  # the one that lists the folder
        return False


def replanned_steps(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Every step's results, from the same weights if ``resets``, and what was open behind it."""
    arguments, fields = case["problem"]
    problem = bubble_cases.problem(*arguments, **fields)
    decisions = [validate(BubblesDecision, one, "decision") for one in case["decisions"]]
    before = opened()
    restless = cast("OnlinePlanner", Restless(decisions)) if rank == 0 else None
    trainer = BubbleTrainer(
        problem, decisions[0], rank, mode=case.get("mode", "reference"), online=restless,
        adaptive=True,
    )  # fmt: skip
    if case["resets"]:
        trainer.kernels.advance = trainer.kernels.reset  # type: ignore[method-assign]
    results, losses, counts = [], list[float](), [opened()]
    for _ in range(case["steps"]):
        report = trainer.step()
        assert report.replanned
        losses.append(report.loss)
        results.append(trainer.kernels.result())  # nothing, where the new order was recorded
        counts.append(opened())
    if case["closes"]:
        dist.barrier()
        trainer.close()
        del trainer
    return {
        "before": before, "counts": counts, "results": results, "losses": losses, "after": opened()
    }  # fmt: skip
