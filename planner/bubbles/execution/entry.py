"""What `BubblesPlanner` needs of a real run: kernels, reference and comparison, by mode.

``reference`` computes in fp32 everywhere, ``fast`` in bf16 on GPUs and in fp32 on processors, which
lack the instructions to make bf16 worth it.
"""

from __future__ import annotations

from typing import Any

import torch

from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.kernels import BubbleKernels
from foreplan.planner.bubbles.execution.reference import single_process_step
from foreplan.planner.bubbles.execution.report import compare_steps
from foreplan.planner.bubbles.execution.step_sizes import StepSizes
from foreplan.planner.bubbles.spec import BubblesWorkload

MODES = ("reference", "fast")

__all__ = ["MODES", "compare_steps", "rank_kernels", "reference_step"]


def rank_kernels(
    problem: Problem[BubblesWorkload], decision: BubblesDecision, rank: int, *, mode: str
) -> BubbleKernels:
    """One rank of a run, in its own process.

    Raises:
        SpecError: an unknown mode; a layout with replicas or tensor parallel ranks.
    """
    _check_layout(decision)
    device, dtype = _arithmetic(problem, mode)
    return BubbleKernels(
        StepSizes.of(problem, decision), decision, rank, device=device, dtype=dtype
    )


def reference_step(
    problem: Problem[BubblesWorkload], decision: BubblesDecision, *, mode: str
) -> dict[str, Any]:
    """The same step in this process alone.

    Raises:
        SpecError: as `rank_kernels`.
    """
    _check_layout(decision)
    device, dtype = _arithmetic(problem, mode)
    return single_process_step(
        StepSizes.of(problem, decision), decision, device=device, dtype=dtype
    )


def _check_layout(decision: BubblesDecision) -> None:
    plan = decision.plan
    if plan.dp > 1 or plan.tp > 1:
        raise SpecError(
            "decision.plan", got=f"dp = {plan.dp}, tp = {plan.tp}",
            expected="dp = tp = 1: a real run has one process a pipeline rank",
        )  # fmt: skip


def _arithmetic(problem: Problem[BubblesWorkload], mode: str) -> tuple[torch.device, torch.dtype]:
    if mode not in MODES:
        raise SpecError("mode", got=mode, expected=f"one of {', '.join(MODES)}")
    if problem.cluster.ranks()[0].name.kind != "cuda":
        return torch.device("cpu"), torch.float32
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.bfloat16 if mode == "fast" else torch.float32
