"""One step with ``torch.distributed.pipelining``, on the same parts, weights and data.

The encoder lies in the first stage, the way a pipeline without bubble filling has it. Torch cuts
the batch, sends activations, runs 1F1B and adds gradients up: nothing of the runtime is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from foreplan.planner.bubbles.execution.batches import Batches
from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters
from foreplan.planner.bubbles.execution.parts import BackbonePart, EncoderPart
from foreplan.planner.bubbles.execution.report import gradient_report, loss_report
from foreplan.planner.bubbles.execution.step_sizes import StepSizes

CPU = torch.device("cpu")


class _Stage(nn.Module):
    def __init__(self, backbone: BackbonePart, encoder: EncoderPart | None) -> None:
        super().__init__()
        self.backbone, self.encoder = backbone, encoder

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        if self.encoder is None or tokens is None:
            return self.backbone([x], torch.empty(0))
        return self.backbone([self.encoder(x)], tokens)


def stock_step(sizes: StepSizes, schedule: str, rank: int, ranks: int) -> dict[str, Any]:
    """Losses (last rank) and gradients of this rank, reported as the kernels do."""
    layers = sizes.backbone.layers
    start, end = rank * layers // ranks, (rank + 1) * layers // ranks
    backbone = BackbonePart(sizes, start, end)
    parts: list[Any] = [backbone]
    encoder = None
    if rank == 0:
        encoder = EncoderPart(sizes, 0, 0, 2 * sizes.encoders[0].layers)
        parts.append(encoder)
    flat = FlatParameters(parts, sizes.seed, CPU, torch.float32)
    stage = PipelineStage(_Stage(backbone, encoder), rank, ranks, CPU)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    count, batches = sizes.microbatches, Batches(sizes, CPU, torch.float32)
    made = kind(stage, count, loss_fn=backbone.loss, scale_grads=False)
    losses: list[Tensor] = []
    if rank == 0:
        patches = torch.cat([batches.patches(0, i) for i in range(count)])
        made.step(patches, torch.cat([batches.tokens(i) for i in range(count)]))
    elif rank < ranks - 1:
        made.step()
    else:
        labels = torch.cat([batches.labels(i) for i in range(count)])
        made.step(target=labels, losses=losses)
    found = gradient_report(flat.gradient())
    return found | loss_report({i: loss.detach() for i, loss in enumerate(losses)}, torch.float32)
