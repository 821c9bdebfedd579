"""What `BubblesPlanner` needs of a real run: kernels, reference and comparison, by mode.

``reference`` computes in fp32 everywhere, ``fast`` in bf16 on GPUs and in fp32 on processors, which
lack the instructions to make bf16 worth it.
"""

from __future__ import annotations

from typing import Any

import torch

from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.actions import parse_order
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.kernels import BubbleKernels
from foreplan.planner.bubbles.execution.recorded import RecordableLanes
from foreplan.planner.bubbles.execution.reference import single_process_step
from foreplan.planner.bubbles.execution.report import compare_steps
from foreplan.planner.bubbles.execution.step_sizes import StepSizes
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.verify.pass_graphs import PassGraphs

MODES = ("reference", "fast")

__all__ = ["MODES", "compare_steps", "rank_kernels", "reference_step"]


def rank_kernels(
    problem: Problem[BubblesWorkload], decision: BubblesDecision, rank: int, *, mode: str,
    rehearsed: bool = True, recorded: bool = True,
) -> BubbleKernels:  # fmt: skip
    """One rank of a run, in its own process.

    Args:
        problem: what is trained.
        decision: with one data parallel replica.
        rank: of the schedule, which `widen` has widened where a rank has several lanes. Then every
            process of the run has to call this, because all of them open the lanes' groups.
        mode: one of `MODES`.
        rehearsed: compute the rank's list once, see `BubbleKernels.rehearse`.
        recorded: then record it (`BubbleKernels.record`), on a GPU in ``fast`` mode.

    Raises:
        SpecError: an unknown mode; data parallel replicas; encoders on fewer lanes than the
            backbone; their replicas' shards of lanes' shards; lanes that are not connected.
    """
    plan = decision.plan
    if plan.dp > 1:
        raise SpecError(
            "decision.plan.dp", got=plan.dp, expected="1: replicas are alike, one of them is run"
        )
    for encoder, asked in zip(decision.encoders, problem.workload.encoders, strict=True):
        if encoder.tp != plan.tp:
            raise SpecError(
                f"decision: encoder {encoder.name}: tp", got=encoder.tp,
                expected=f"{plan.tp}, the lanes of a rank, all of which a real run uses",
            )  # fmt: skip
        sharded = problem.workload.sharded_optimizer and not asked.frozen
        if sharded and plan.tp > 1 and len(encoder.ranks) > 1:
            raise SpecError(
                "workload.sharded_optimizer", got=True,
                expected="False with tensor parallel lanes: no report has words for shards of "
                "shards",
            )  # fmt: skip
    device, dtype = _arithmetic(problem, mode)
    backend = "gloo" if device.type == "cpu" else "nccl"
    beside = _sums_beside(decision)
    kernels = BubbleKernels(
        StepSizes.of(problem, decision), decision, rank // plan.tp, device=device, dtype=dtype,
        lanes=RecordableLanes.connect(plan.pp, plan.tp, rank, backend, beside=beside),
        buckets=StepSchedule(TrainingStep.of(problem, decision), decision).buckets,
    )  # fmt: skip
    if rehearsed and recorded and mode == "fast" and device.type == "cuda":
        graphs = PassGraphs(device)
        graphs.warm_up(kernels.rehearse)
        kernels.record(graphs)
    elif rehearsed:
        kernels.rehearse()
    return kernels


def reference_step(
    problem: Problem[BubblesWorkload], decision: BubblesDecision, *, mode: str
) -> dict[str, Any]:
    """The same step in this process alone.

    Raises:
        SpecError: an unknown mode.
    """
    device, dtype = _arithmetic(problem, mode)
    sizes = StepSizes.of(problem, decision)
    return single_process_step(sizes, decision, device=device, dtype=dtype)


def _sums_beside(decision: BubblesDecision) -> bool:
    """Whether some rank lists sums of its lanes as actions of their own."""
    words = (word for order in decision.orders for word in parse_order(order))
    return any(word.piece >= 0 or word.op in "fb" for word in words)


def _arithmetic(problem: Problem[BubblesWorkload], mode: str) -> tuple[torch.device, torch.dtype]:
    if mode not in MODES:
        raise SpecError("mode", got=mode, expected=f"one of {', '.join(MODES)}")
    if problem.cluster.ranks()[0].name.kind != "cuda":
        return torch.device("cpu"), torch.float32
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.bfloat16 if mode == "fast" else torch.float32
