"""What a bubble plan decides: layout, encoder pipelines, and the order of all work on each rank."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreplan.datasets.specs import StrictModel
from foreplan.planner.bubbles.spec import BackbonePlan, Count, Index, PipelineName, Recompute

#: How encoder work is placed: units in any idle time; whole micro-batches in the idle time at the
#: step's head and tail alone; all forwards before and all backwards after the backbone, which waits
#: for them; nothing in idle time (the encoder is work of the first pipeline stages).
Fill = Literal["fine", "coarse", "three-phase", "unfilled"]


class BackboneStage(StrictModel):
    """Layers ``[start, end)`` of the backbone on one rank.

    The first stage embeds, the last one has the head.

    Attributes:
        rank: of the schedule.
        start, end: layers.
    """

    rank: Index
    start: Index
    end: Count

    @model_validator(mode="after")
    def _some(self) -> BackboneStage:
        if self.end <= self.start:
            raise ValueError("a stage with at least one layer")
        return self


class EncoderPlan(StrictModel):
    """Where one encoder runs and in which pieces.

    Attributes:
        name: the encoder.
        tp: tensor parallel devices of each of its ranks.
        stages: first layer and one past the last of each stage.
        units: cuts between units in half layers, from 0 to twice the layers; unit ``u`` runs halves
            ``[units[u], units[u + 1])``, where half ``2 l`` is the attention block of layer ``l``
            and half ``2 l + 1`` its MLP block. Every cut between stages is one.
        ranks: rank of each stage of each pipeline; pipelines are replicas of the encoder.
        slots: pipeline of each micro-batch, forwards and backwards alike.
    """

    name: str
    tp: Count = 1
    stages: Annotated[tuple[tuple[Index, Count], ...], Field(min_length=1)]
    units: Annotated[tuple[Index, ...], Field(min_length=2)]
    ranks: Annotated[tuple[tuple[Index, ...], ...], Field(min_length=1)]
    slots: tuple[Index, ...]

    @model_validator(mode="after")
    def _consistent(self) -> EncoderPlan:
        cuts = [0, *(end for _, end in self.stages)]
        if [start for start, _ in self.stages] != cuts[:-1] or sorted(set(cuts)) != cuts:
            raise ValueError("stages that follow each other from layer 0")
        if self.units[0] or self.units[-1] != 2 * cuts[-1]:
            raise ValueError(f"units from 0 to {2 * cuts[-1]} half layers")
        if any(a >= b for a, b in itertools.pairwise(self.units)):
            raise ValueError("units of at least half a layer, in order")
        if not {2 * cut for cut in cuts} <= set(self.units):
            raise ValueError("a cut between units at every cut between stages")
        if any(len(row) != len(self.stages) for row in self.ranks):
            raise ValueError(f"one rank for each of {len(self.stages)} stages in every pipeline")
        if any(slot >= len(self.ranks) for slot in self.slots):
            raise ValueError(f"slots below the {len(self.ranks)} pipelines")
        return self

    @property
    def pipelines(self) -> int:
        """Replicas of the encoder that feed one backbone pipeline."""
        return len(self.ranks)

    def stage_of(self, unit: int) -> int:
        """Stage that a unit belongs to."""
        return next(k for k, (_, end) in enumerate(self.stages) if self.units[unit] < 2 * end)

    def stage_units(self, stage: int) -> range:
        """Units of a stage."""
        start, end = self.stages[stage]
        return range(self.units.index(2 * start), self.units.index(2 * end))


class Recomputation(StrictModel):
    """What is computed again in backward passes, where the workload left it open.

    Attributes:
        backbone: as of `BubblesWorkload.recompute`.
        encoders: of each encoder, in the workload's order, whether its units keep their input
            alone.
    """

    backbone: Recompute
    encoders: tuple[bool, ...]


class BubblesDecision(StrictModel):
    """A bubble plan's decision.

    One rank of the schedule stands for a pipeline rank with all of its tensor parallel devices, in
    one of the equal data parallel replicas.

    Attributes:
        plan: layout of the backbone.
        schedule: pipeline schedule that its order comes from.
        microbatches: of a step, for each backbone pipeline.
        warmup: forward passes of each rank before its first backward pass.
        stages: the backbone's virtual stages in the order of its layers.
        encoders: one plan an encoder, in the workload's order.
        orders: of each rank everything it computes, in order, as words apart by spaces. ``2F0``:
            forward of virtual stage 2 (of ``stages``, from 0), micro-batch 0; ``2B0``: its
            backward; ``2I0``, ``2W0``: the halves of that for input and weights; ``2F0:1``: piece 1
            of a pass that is split (attention and MLP of each layer in turn, from 0), with its
            collectives beside it. ``e0.2F5``: forward of unit 2 of encoder 0, micro-batch 5;
            ``e0.2B5``: its backward; ``e0.0-7F5``: units 0 to 7 in turn, ``e0.7-0B5``: 7 to 0;
            ``e0.2f5``, ``e0.2b5``: the collective in front of that unit. What ranks send each other
            is not written: it follows.
        fill: how encoder work is placed.
        head_s, tail_s: what the encoders are predicted to add before and behind the backbone's own
            step.
        limits_met: fits into memory.
        recompute: what is computed again; ``None`` where the workload says it.
    """

    plan: BackbonePlan
    schedule: PipelineName
    microbatches: Count
    warmup: tuple[Index, ...]
    stages: Annotated[tuple[BackboneStage, ...], Field(min_length=1)]
    encoders: tuple[EncoderPlan, ...]
    orders: Annotated[tuple[str, ...], Field(min_length=1)]
    fill: Fill
    head_s: float = 0.0
    tail_s: float = 0.0
    limits_met: bool = True
    recompute: Recomputation | None = None

    @model_validator(mode="after")
    def _consistent(self) -> BubblesDecision:
        ends = [0, *(stage.end for stage in self.stages)]
        if [stage.start for stage in self.stages] != ends[:-1]:
            raise ValueError("backbone stages that follow each other from layer 0")
        if len(self.orders) != self.plan.pp or len(self.warmup) != self.plan.pp:
            raise ValueError(f"one order and one warm-up for each of {self.plan.pp} ranks")
        used = [stage.rank for stage in self.stages]
        used += [rank for e in self.encoders for row in e.ranks for rank in row]
        if max(used) >= self.plan.pp:
            raise ValueError(f"ranks below {self.plan.pp}")
        if any(len(e.slots) != self.microbatches for e in self.encoders):
            raise ValueError(f"a slot for each of {self.microbatches} micro-batches")
        return self

    def stage_number(self, encoder: int, stage: int) -> int:
        """``Action.stage`` of an encoder's stage: those of encoders follow the backbone's."""
        before = sum(len(e.stages) for e in self.encoders[:encoder])
        return len(self.stages) + before + stage

    def encoder_stage(self, number: int) -> tuple[int, int]:
        """Encoder and stage of an ``Action.stage`` at or above ``len(stages)``."""
        rest = number - len(self.stages)
        for index, plan in enumerate(self.encoders):
            if 0 <= rest < len(plan.stages):
                return index, rest
            rest -= len(plan.stages)
        raise IndexError(number)
