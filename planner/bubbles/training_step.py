"""`TrainingStep`: a problem under one layout, with the works and bytes of everything a rank can do.

The one place that knows how a layout's groups lie on the cluster: pipeline rank ``r``, replica
``d``, lane ``t`` of the tensor parallel group is cluster rank ``(r dp + d) tp + t``, so that tensor
parallel groups are neighbours (Megatron's order). A rank of the schedule stands for all of its
lanes and replicas: links are those of lane 0 of replica 0, the device is the slowest (`blocks`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from foreplan.cost_models.costs import Collective, Lag, Segment, Work
from foreplan.cost_models.simulator import Contention
from foreplan.cost_models.sources.link_costs import LinkSource
from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles import recompute
from foreplan.planner.bubbles.arithmetic import Arithmetic
from foreplan.planner.bubbles.blocks import DeviceKind, kind_of, slowest
from foreplan.planner.bubbles.decision import BubblesDecision, EncoderPlan
from foreplan.planner.bubbles.memory import stage_activation_bytes, unit_activation_bytes
from foreplan.planner.bubbles.pass_shape import PassShape
from foreplan.planner.bubbles.placement import BUCKETS
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload, Encoder
from foreplan.planner.bubbles.towers import Tower, backbone_tower, encoder_towers
from foreplan.planner.bubbles.work_parts import Parts, joined, segment, times
from foreplan.planner.bubbles.works import StepWorks, TowerWorks
from foreplan.planner.cached_method import cached_method
from foreplan.planner.contention import contended, contention, pressure

#: Share of a sum's time on the spot that computation beside it may lose before nothing is put there
#: (chosen: gloo takes 0.63-0.86 of its own on a rank's one core, where units inside passes made a
#: step 6 % longer than three phases, and most of that is saved by waiting on the spot; NCCL 0.54 on
#: an H100, where it was 10 % shorter on H200s; docs/results/bubbles.md).
_MOST_TAKEN = 0.6
#: What a bucket's bytes take at least, over what an empty collective does (chosen).
_WORTH = 4.0


class TrainingStep:
    """Works and bytes under a layout.

    Args:
        problem: model, cluster, workload; its prices say how far passes are bound by memory, where
            the cluster states what ranks of a host do to each other.
        plan: layout of the backbone.

    Attributes:
        arithmetic: what the devices compute with.
        backbone, encoders: the towers.
        steps: works between passes.

    Raises:
        SpecError: recomputation that the workload leaves open, see `of`.
    """

    def __init__(self, problem: Problem[BubblesWorkload], plan: BackbonePlan) -> None:
        if recompute.is_open(problem.workload):
            raise SpecError(
                "workload.recompute", got="auto",
                expected="none, selective or full, or a decision that states what was chosen",
            )  # fmt: skip
        self.workload = problem.workload
        self.plan = plan
        self.backbone: Tower = backbone_tower(problem)
        self.encoders: tuple[Tower, ...] = encoder_towers(problem)
        self.arithmetic = Arithmetic.of(problem.cluster)
        self.steps = StepWorks(self.workload, self.arithmetic)
        self._ranks = problem.cluster.ranks()
        self._cluster, self._costs = problem.cluster, problem.costs
        w = self.workload
        shape = PassShape(
            self.backbone, w.microbatch, w.sequence_length, plan.tp, w.recompute,
            self.arithmetic.element_bytes, w.microbatch * w.sequence_length,
        )  # fmt: skip
        self._backbone = TowerWorks(
            shape, self.arithmetic, self.lane_group(0), w.times.tensor_collective_s
        )

    @classmethod
    def of(cls, problem: Problem[BubblesWorkload], decision: BubblesDecision) -> TrainingStep:
        """Works and bytes under a decision's layout and recomputation."""
        return cls(recompute.settled(problem, decision), decision.plan)

    # ------------------------------------------------------------------------------- places

    def cluster_rank(self, rank: int, replica: int = 0, lane: int = 0) -> int:
        """Cluster rank of a pipeline rank."""
        return (self.plan.block(rank) * self.plan.dp + replica) * self.plan.tp + lane

    def block(self, rank: int) -> tuple[Rank, ...]:
        """Devices of a pipeline rank: the lanes of every replica."""
        first = self.cluster_rank(rank)
        # One device stands for all where programs are listed that are to be measured.
        return self._ranks[first : first + self.plan.dp * self.plan.tp]

    @functools.cached_property
    def stand_ins(self) -> tuple[Rank, ...]:
        """The slowest device of each rank of the schedule, which stands for the others."""
        layer = [work for op in ("F", "B") for work in self.halves(op)]
        return tuple(slowest(self.block(r), layer, self._costs) for r in range(self.plan.pp))

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        """Label of the device that each rank of the schedule is priced on."""
        return tuple(rank.label for rank in self.stand_ins)

    @functools.cached_property
    def unlike_devices(self) -> tuple[str, ...]:
        """The first of `devices` of each kind."""
        found: dict[DeviceKind, str] = {}
        for rank in self.stand_ins:
            found.setdefault(kind_of(rank), rank.label)
        return tuple(found.values())

    def lane_group(self, rank: int) -> tuple[int, ...]:
        """Cluster ranks of a tensor parallel group."""
        return tuple(self.cluster_rank(rank, 0, lane) for lane in range(self.plan.tp))

    @cached_method
    def replica_group(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Cluster ranks that hold the same parameters as lane 0 of the given pipeline ranks."""
        replicas = range(self.plan.dp)
        return tuple(self.cluster_rank(r, d) for d in replicas for r in ranks)

    @cached_method
    def bucket_count(self, parameters: int, group: tuple[int, ...]) -> int:
        """Collectives in which an encoder stage's parameters, or its gradients, are exchanged.

        At most `BUCKETS`, and so few that a bucket's bytes take `_WORTH` times as long as an empty
        collective by the cluster's links; one where a stage's time is stated.

        Args:
            parameters: of the stage on one lane.
            group: cluster ranks that hold them.
        """
        work = self.steps.gather(parameters, group, encoder=True)
        if not self.workload.sharded_optimizer or not isinstance(work, Collective):
            return 1
        links = LinkSource(self._cluster)
        try:
            whole, empty = (
                links.estimate(replace(work, bytes=size), self.devices[0])
                for size in (work.bytes, 0)
            )
        except MissingDataError:
            return BUCKETS
        if whole is None or empty is None or not empty.mean_s:
            return BUCKETS
        worth = (whole.mean_s - empty.mean_s) / (_WORTH * empty.mean_s)
        return max(1, min(BUCKETS, int(worth)))

    # ------------------------------------------------------------------------------- neighbours

    @functools.cached_property
    def contention(self) -> Contention | None:
        """What all processes do to each other, as far as the cluster states it."""
        ranks = tuple(map(self.cluster_rank, range(self.plan.pp)))
        everyone = tuple(range(self.plan.devices))
        return contention(self._cluster, ranks, everyone, contended(self._cluster))

    @cached_method
    def pressure(self, rank: int, work: Work) -> float:
        """Share of a work's time that neighbours lengthen, 0..1; 0 without contention or prices.

        All that is computed where passes were timed together, else what memory bounds.
        """
        if self.contention is None:
            return 0.0
        return pressure(self._costs, self.devices[rank], work, contended(self._cluster))

    @cached_method
    def beside(self, work: Work, part: float = 1.0) -> Work | None:
        """What a collective takes from its ranks' computation while it runs beside it.

        As that collective with more or less to carry, as measured (`Tier.taken_beside`); ``None``
        if nothing, also where the workload states the collective's time.

        Args:
            work: the collective.
            part: of its time, in which something is computed.
        """
        if not isinstance(work, Collective) or len(work.group) < 2:
            return None
        share = part * self._cluster.taken_beside(work.kind, work.group)
        return replace(work, bytes=max(1, round(share * work.bytes))) if share else None

    def slowed(self, rank: int, work: Work, sums: Work, computed: Sequence[Work]) -> Work:
        """A pass, piece or unit with what the lanes' sums beside it take from it.

        Args:
            rank: of the schedule.
            work: the first that is computed beside them.
            sums: of the lanes.
            computed: all that is.
        """
        if not isinstance(work, Segment) or not isinstance(sums, Segment):
            return work
        device, share = self.devices[rank], 1.0
        if all(self._costs.can_price(each, device) for each in (sums, *computed)):
            whole, within = (
                math.fsum(self._costs.cost(each, device).mean_s for each in several)
                for several in ((sums,), computed)
            )
            share = min(1.0, within / whole) if whole > 0.0 else 0.0
        taken = [(self.beside(part, share), count) for part, count in sums.parts]
        return segment(work.name, work.parts, tuple((t, n) for t, n in taken if t is not None))

    @functools.cached_property
    def overlapping(self) -> bool:
        """Whether it is worth computing beside the lanes' sums.

        It is not where such a sum takes most of what one on the spot takes from that computation,
        as gloo's does, whose threads have the rank's own cores. Where that was not measured, it is.
        """
        group = self.lane_group(0)
        # One device stands for all where programs are listed that are to be measured.
        if self.plan.tp == 1 or group[-1] >= len(self._ranks):
            return True
        try:
            taken = self._cluster.taken_beside("all_reduce", group)
        except MissingDataError:
            return True
        device = self.devices[0]
        sums = [segment("tensor", self._backbone.tensor(1, waited=w)) for w in (True, False)]
        if all(self._costs.can_price(work, device) for work in sums):
            on_the_spot, apart = (self._costs.cost(work, device).mean_s for work in sums)
            return taken * apart < _MOST_TAKEN * on_the_spot
        return taken < _MOST_TAKEN

    # ------------------------------------------------------------------------------- backbone

    @property
    def hidden_bytes(self) -> int:
        """What one lane sends to the next pipeline rank for a micro-batch."""
        w = self.workload
        elements = w.microbatch * w.sequence_length * self.backbone.hidden
        return self.arithmetic.element_bytes * elements // self.plan.tp

    @property
    def divisible(self) -> bool:
        """Whether units may reach into the backbone's passes, where its lanes communicate.

        A real run has no pieces of layers that are computed again, nor of passes whose weight
        gradients are put off.
        """
        w = self.workload
        whole = w.recompute == "full" or w.schedule.startswith("zb")
        if self.plan.tp == 1 or (whole and self.arithmetic.measurable):
            return False
        return self.overlapping

    def pieces(self, start: int, end: int) -> int:
        """Pieces of a split pass over layers ``[start, end)``: their halves."""
        return 2 * (end - start)

    @cached_method
    def passes(self, start: int, end: int, op: str) -> Work:
        """A whole pass of layers ``[start, end)``, its collectives included."""
        layers, works = end - start, self._backbone
        computed = joined(
            times(works.half(0, op), layers), times(works.half(1, op), layers),
            works.ends(op, first=start == 0, last=end == self.backbone.layers),
        )  # fmt: skip
        count = works.collectives * self.pieces(start, end) * self._rounds(op)
        return segment(op, computed, self._met(computed, works.tensor(count, waited=True)))

    def _met(self, computed: Parts, sums: Parts) -> Parts:
        """Lanes' collectives on the spot, and the wait for the slowest lane in front of them."""
        work = next((work for work, _ in sums), None)
        if not isinstance(work, Collective) or work.group[-1] >= len(self._ranks):
            return sums  # given by the workload, or one device stands for all
        share = self._cluster.lag(work.kind, work.group)
        return joined(sums, ((Lag(segment("lag", computed), share), 1),)) if share else sums

    def halves(self, op: str) -> tuple[Work, Work]:
        """Computation of the two halves of a layer of the backbone, ends and collectives apart."""
        return segment(op, self._backbone.half(0, op)), segment(op, self._backbone.half(1, op))

    def end(self, op: str, *, first: bool) -> tuple[Work, ...]:
        """Computation in front of the backbone's first layer, or behind its last, if there is."""
        parts = self._backbone.ends(op, first=first, last=not first)
        return (segment(op, parts),) if parts else ()

    def encoder_halves(self, index: int, op: str) -> tuple[Work, Work]:
        """Likewise of an encoder's layer, on as many lanes as the backbone has."""
        works = self._encoder(index, self.plan.tp)
        return segment(op, works.half(0, op)), segment(op, works.half(1, op))

    @cached_method
    def piece(self, start: int, end: int, op: str, piece: int) -> Work:
        """Computation of one piece of a split pass, in the order in which they run."""
        last = self.pieces(start, end) - 1
        half = piece if op == "F" else last - piece
        ends = self._backbone.ends(
            op,
            first=start == 0 and half == 0,
            last=end == self.backbone.layers and half == last,
        )
        return segment(op, self._backbone.half(half % 2, op), ends)

    @cached_method
    def collective(self, start: int, end: int, op: str, piece: int) -> Work:
        """What is communicated in front of a piece; behind the last where ``piece`` is one more."""
        works, last = self._backbone, self.pieces(start, end)
        count = works.collectives
        if piece in (0, last):
            count = works.edge(behind=piece == last)
        return segment("tensor", works.tensor(count * self._rounds(op)))

    def _rounds(self, op: str) -> int:
        """Times a pass communicates what a forward pass does."""
        if op == "W":
            return 0
        return 2 if op != "F" and self.workload.recompute == "full" else 1

    def activation_bytes(self, start: int, end: int) -> int:
        """What layers ``[start, end)`` keep of one micro-batch."""
        w = self.workload
        return stage_activation_bytes(
            self.backbone, start, end, rows=w.microbatch * w.sequence_length,
            tokens=w.sequence_length, tp=self.plan.tp, recompute=w.recompute,
            element_bytes=self.arithmetic.element_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------------------------- encoders

    def encoder(self, index: int) -> Encoder:
        """The workload's encoder."""
        return self.workload.encoders[index]

    @cached_method
    def _encoder(self, index: int, tp: int) -> TowerWorks:
        spec, w = self.encoder(index), self.workload
        sequences = w.microbatch * spec.images
        again = "full" if spec.recompute else "selective"
        shape = PassShape(
            self.encoders[index], sequences, spec.tokens, tp, again,
            self.arithmetic.element_bytes, w.microbatch * spec.features,
        )  # fmt: skip
        return TowerWorks(
            shape, self.arithmetic, self.lane_group(0)[:tp], w.times.encoder_tensor_collective_s,
            "encoder_",
        )  # fmt: skip

    def rows(self, index: int) -> int:
        """Tokens of a micro-batch inside an encoder."""
        spec = self.encoder(index)
        return self.workload.microbatch * spec.images * spec.tokens

    @cached_method
    def unit(self, index: int, tp: int, begin: int, end: int, op: str, *, bare: bool) -> Work:
        """Halves ``[begin, end)`` of an encoder, ``F`` or ``B``.

        Args:
            index: the encoder.
            tp: devices that share it.
            begin: first half.
            end: one past the last.
            op: direction.
            bare: without the collectives around it, which are actions of their own then.
        """
        works = self._encoder(index, tp)
        even = sum(1 for half in range(begin, end) if half % 2 == 0)
        inside = works.collectives * (end - begin) * self._encoder_rounds(index, op)
        if bare:
            inside -= works.collectives * self._encoder_rounds(index, op)
        computed = joined(
            times(works.half(0, op), even), times(works.half(1, op), end - begin - even),
            works.ends(op, first=begin == 0, last=end == 2 * self.encoders[index].layers),
        )  # fmt: skip
        name = "encode" if op == "F" else "encode_backward"
        return segment(name, computed, self._met(computed, works.tensor(inside, waited=True)))

    @cached_method
    def unit_collective(
        self, index: int, plan: EncoderPlan, stage: int, op: str, unit: int
    ) -> Work:
        """Collectives in front of a unit of a stage, or behind the last where it is one more.

        Args:
            index: the encoder.
            plan: its plan.
            stage: the encoder stage.
            op: direction; backwards the last unit comes first.
            unit: the unit that follows.
        """
        works, span = self._encoder(index, plan.tp), plan.stage_units(stage)
        first, behind = (span[0], span[-1] + 1) if op == "F" else (span[-1], span[0] - 1)
        count = works.collectives
        if unit in (first, behind):
            count = works.edge(behind=unit == behind)
        return segment("tensor", works.tensor(count * self._encoder_rounds(index, op)))

    def _encoder_rounds(self, index: int, op: str) -> int:
        return 2 if op == "B" and self.encoder(index).recompute else 1

    def feature_bytes(self, index: int) -> int:
        """What one lane sends of an encoder's features to the backbone."""
        w = self.workload
        rows = w.microbatch * self.encoder(index).features
        return self.arithmetic.element_bytes * rows * self.backbone.hidden // self.plan.tp

    def encoder_hidden_bytes(self, index: int, tp: int) -> int:
        """What one lane sends from one encoder stage to the next."""
        elements = self.rows(index) * self.encoders[index].hidden
        return self.arithmetic.element_bytes * elements // tp

    def unit_bytes(self, index: int, tp: int, begin: int, end: int) -> int:
        """What halves ``[begin, end)`` keep of one micro-batch; nothing of a frozen encoder."""
        spec = self.encoder(index)
        if spec.frozen:
            return 0
        return unit_activation_bytes(
            self.encoders[index], begin, end, rows=self.rows(index), tokens=spec.tokens, tp=tp,
            recompute=bool(spec.recompute), element_bytes=self.arithmetic.element_bytes,
        )  # fmt: skip
