"""Decisions that no planner made: a precision for every operator that has it, rank by rank.

For experiments and tests; and the schedule that runs a decision without being priced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.ddp_buckets import GRADIENT_BYTES, ddp_buckets
from foreplan.cost_models.schedule import Schedule
from foreplan.datasets.kernels.training_recipe import recipe
from foreplan.errors import SpecError
from foreplan.planner.precision.execution.modules import fits
from foreplan.planner.precision.spec import (
    PrecisionDecision,
    PrecisionWorkload,
    WorkerDecision,
)
from foreplan.planner.precision.step import Buckets, WorkerStep, step_schedule
from foreplan.planner.precision.task import TrainingTask, fingerprint

#: Variants of a precision by operator; operators that it does not name take the next lower entry.
UNIFORM: Mapping[str, tuple[str, ...]] = {
    "fp32": ("fp32/fp32/torch.linear", "fp32/fp32/torch.conv2d", "fp32/fp32/torch.embedding"),
    "bf16": ("fp32/bf16/torch.linear", "fp32/bf16/torch.conv2d", "fp32/bf16/torch.embedding"),
    "int8": ("fp32/int8/torch.int_mm+bf16",),
    "int8-all": ("fp32/int8/torch.int_mm+int8",),
    "int8-tensor": ("fp32/int8/torch.int_mm+int8@tensor",),
    "tf32": ("fp32/tf32/torch.linear",),
    "fp16": ("fp32/fp16/torch.linear",),
    "fp8": ("fp32/fp8/torch.scaled_mm+fp8",),
}
#: What is taken where an operator does not have a precision.
_FALLBACK: Mapping[str, str] = {
    "bf16": "fp32", "int8": "bf16", "int8-all": "bf16", "int8-tensor": "bf16",
    "tf32": "fp32", "fp16": "fp32", "fp8": "bf16",
}  # fmt: skip


def uniform_variants(module: nn.Module, precision: str) -> dict[str, str]:
    """Variant of every linear, convolution and embedding at one precision.

    Operators that do not have it (an int8 convolution, a linear whose features are no multiple of
    8) take 16 bits or fp32 instead.

    Raises:
        SpecError: no such precision.
    """
    if precision not in UNIFORM:
        raise SpecError("precision", got=precision, expected=f"one of {', '.join(UNIFORM)}")
    chosen = {}
    for name, part in module.named_modules():
        word: str | None = precision
        while word is not None and name not in chosen:
            text = next((text for text in UNIFORM[word] if fits(part, recipe(text))), None)
            if text is not None:
                chosen[name] = text
            word = _FALLBACK.get(word)
    return chosen


def uniform_decision(
    task: TrainingTask, workload: PrecisionWorkload, plans: Sequence[str | Mapping[str, str]]
) -> PrecisionDecision:
    """A decision from a precision, or from variants by name, for each rank."""
    with torch.device("meta"):
        module = task.module()
    chosen = [uniform_variants(module, p) if isinstance(p, str) else dict(p) for p in plans]
    # Constructed without validation: variants that no planner decides about yet are allowed.
    return PrecisionDecision.model_construct(
        workers=tuple(
            WorkerDecision.model_construct(rank=rank, device=f"rank {rank}", operators=operators)
            for rank, operators in enumerate(chosen)
        ),
        buckets=ddp_buckets(
            {name: p.numel() for name, p in module.named_parameters() if p.requires_grad},
            first_bucket_bytes=workload.first_bucket_bytes,
            bucket_bytes=workload.bucket_bytes,
        ),
        network=fingerprint(module.named_parameters()), omega=0.0, target_s=0.0, limits_met=True,
    )  # fmt: skip


def training_schedule(
    decision: PrecisionDecision, devices: Sequence[str], parameters: Mapping[str, int]
) -> Schedule:
    """One training step of a decision, to be run and not to be priced.

    Args:
        decision: its workers and buckets.
        devices: name of each rank's device.
        parameters: elements of each parameter, by name.
    """
    free = HostLaunch(0)
    count = len(decision.buckets)
    sizes = tuple(GRADIENT_BYTES * sum(parameters[n] for n in b) for b in decision.buckets)
    workers = [WorkerStep(device, free, (free,) * count, free, (0,) * count) for device in devices]
    return step_schedule(workers, Buckets(decision.buckets, sizes, ()))
