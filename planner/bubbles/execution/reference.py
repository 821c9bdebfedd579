"""`single_process_step`: the same training step without pipeline, cuts or communication.

The whole model is one module, each micro-batch one ordinary backward pass. Gradients of an encoder
are added up replica by replica and then over the replicas, as the plan's ranks add them: additions
in fp32 are then the same ones in the same order, as long as micro-batches go backwards in order and
at most two replicas are summed.
"""

from __future__ import annotations

from typing import Any

import torch

from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.batches import Batches
from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters
from foreplan.planner.bubbles.execution.parts import BackbonePart, EncoderPart
from foreplan.planner.bubbles.execution.report import gradient_report, loss_report
from foreplan.planner.bubbles.execution.step_sizes import StepSizes


def single_process_step(
    step: StepSizes,
    decision: BubblesDecision,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Losses and gradients of a step.

    Args:
        step: what is trained.
        decision: says which replica of an encoder takes which micro-batch; nothing else of it
            counts.
        device: as for `BubbleKernels`.
        dtype: likewise.

    Returns:
        What the ranks of a run report together.
    """
    device = device or torch.device("cpu")
    batches = Batches(step, device, dtype)
    backbone = BackbonePart(step, 0, step.backbone.layers)
    flat = FlatParameters([backbone], step.seed, device, dtype)
    encoders, flats = [], []
    for e, (spec, tower) in enumerate(zip(step.workload.encoders, step.encoders, strict=True)):
        part = EncoderPart(step, e, 0, 2 * tower.layers)
        encoders.append(part)
        flats.append(FlatParameters([part], step.seed, device, dtype, frozen=spec.frozen))
    sums = [
        [torch.zeros_like(one.gradients) for _ in plan.ranks]
        for one, plan in zip(flats, decision.encoders, strict=True)
    ]
    losses = {}
    for i in range(step.microbatches):
        features = [part(batches.patches(e, i)) for e, part in enumerate(encoders)]
        loss = backbone.loss(backbone(features, batches.tokens(i)), batches.labels(i))
        torch.autograd.backward([loss])
        losses[i] = loss.detach()
        for one, plan, replicas in zip(flats, decision.encoders, sums, strict=True):
            replicas[plan.slots[i]] += one.gradients
            one.gradients.zero_()
    found = loss_report(losses, dtype) | gradient_report(flat.gradient())
    for one, replicas in zip(flats, sums, strict=True):
        for part_sum in replicas:
            one.gradients += part_sum
        found |= gradient_report(one.gradient())
    return found
