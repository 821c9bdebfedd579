"""`RankParts`: what one rank holds of a model: stages, encoder stages and their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.batches import Batches
from foreplan.planner.bubbles.execution.cut import Cut
from foreplan.planner.bubbles.execution.encoder_stage import EncoderStage
from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters
from foreplan.planner.bubbles.execution.lanes import Lanes
from foreplan.planner.bubbles.execution.layers import WeightGradients
from foreplan.planner.bubbles.execution.parts import BackbonePart, EncoderPart
from foreplan.planner.bubbles.execution.pieces import Pieces
from foreplan.planner.bubbles.execution.step_sizes import StepSizes

#: ``buckets(encoder, stage)``, see `StepSchedule.buckets`.
Buckets = Callable[[int, int], list[tuple[int, int]]]


class RankParts:
    """See the module.

    Args:
        step: what is trained.
        decision: who computes what.
        rank: which rank this is.
        words: its order, which says what runs in pieces or with weights' gradients put off.
        batches: data of the step.
        device: where.
        dtype: of weights, activations and arithmetic.
        lanes: tensor parallel processes of the rank, of which this is one.
        buckets: of an encoder's stage; all of the stage is one bucket if left out.

    Attributes:
        batches: as given.
        stages: by number of the virtual stage.
        encoders: by number of the encoder stage.
        flat: by stage and first unit of a bucket, -1 for the backbone's on this rank.

    Raises:
        SpecError: passes in pieces where weights' gradients are put off or layers computed again.
    """

    def __init__(
        self, step: StepSizes, decision: BubblesDecision, rank: int, words: Sequence[Step],
        batches: Batches, device: torch.device, dtype: torch.dtype, lanes: Lanes,
        buckets: Buckets | None,
    ) -> None:  # fmt: skip
        self._step, self._decision, self._rank, self._words = step, decision, rank, words
        self._device, self._dtype, self._lanes = device, dtype, lanes
        self._buckets = buckets or self._whole_stage
        self.batches = batches
        self.flat: dict[tuple[int, int], FlatParameters] = {}
        self.stages: dict[int, Cut | Pieces] = {}
        self.encoders: dict[int, EncoderStage] = {}
        self._build_backbone()
        for encoder, plan in enumerate(decision.encoders):
            for stage in range(len(plan.stages)):
                if any(row[stage] == rank for row in plan.ranks):
                    self._build_encoder(encoder, stage)

    def _build_backbone(self) -> None:
        decision, step = self._decision, self._step
        split = {word.stage for word in self._words if word.op == "W"}
        pieces = {word.stage for word in self._words if word.piece >= 0}
        if pieces and (split or step.workload.recompute == "full"):
            raise SpecError(
                f"order of rank {self._rank}", got="passes in pieces",
                expected="whole passes with a zero-bubble schedule or recompute: full",
            )  # fmt: skip
        parts = []
        for number, stage in enumerate(decision.stages):
            if stage.rank != self._rank:
                continue
            later = WeightGradients() if number in split else None
            part = BackbonePart(step, stage.start, stage.end, later, self._lanes)
            passes = [not spec.frozen for spec in step.workload.encoders] if number == 0 else [True]
            self.stages[number] = (
                self._pieces(part, passes) if number in pieces
                else Cut(self._runs(part), passes, later=later)
            )  # fmt: skip
            parts.append(part)
        if parts:
            first = min(self.stages)
            self.flat[first, -1] = FlatParameters(
                parts, step.seed, self._device, self._dtype, lanes=self._lanes
            )

    def _runs(self, part: BackbonePart) -> Callable[[Sequence[Tensor], int], Tensor]:
        batches = self.batches
        if part.head is None:
            return lambda inputs, i: part(inputs, batches.tokens(i))
        return lambda inputs, i: part.loss(part(inputs, batches.tokens(i)), batches.labels(i))

    def _pieces(self, part: BackbonePart, passes: list[bool]) -> Pieces:
        batches = self.batches

        def closing(x: Tensor, i: int) -> Tensor:
            x = part.close(x)
            return x if part.head is None else part.loss(x, batches.labels(i))

        return Pieces(
            part.pieces, lambda inputs, i: part.open(inputs, batches.tokens(i)), closing, passes,
            self._lanes,
        )  # fmt: skip

    def _whole_stage(self, encoder: int, stage: int) -> list[tuple[int, int]]:
        units = self._decision.encoders[encoder].stage_units(stage)
        return [(units.start, units.stop)]

    def _build_encoder(self, encoder: int, stage: int) -> None:
        plan, step = self._decision.encoders[encoder], self._step
        spec = step.workload.encoders[encoder]
        parts = {
            unit: EncoderPart(step, encoder, plan.units[unit], plan.units[unit + 1], self._lanes)
            for unit in plan.stage_units(stage)
        }
        self.encoders[self._decision.stage_number(encoder, stage)] = EncoderStage(
            spec, parts, self._lanes, first=stage == 0,
            apart=any(word.op in "fb" and word.encoder == encoder for word in self._words),
        )  # fmt: skip
        replicas = sorted({row[stage] for row in plan.ranks})
        sharded = step.workload.sharded_optimizer
        for first, end in self._buckets(encoder, stage):
            self.flat[self._decision.stage_number(encoder, stage), first] = FlatParameters(
                [parts[unit] for unit in range(first, end)], step.seed, self._device, self._dtype,
                frozen=spec.frozen, replicas=len(replicas) if sharded else 1,
                replica=replicas.index(self._rank) if sharded else 0, lanes=self._lanes,
            )  # fmt: skip
