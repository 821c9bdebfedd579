"""`BackboneTimeline`: what the language model alone does on every device, and where it is idle.

Any order of ``cost_models.pipeline`` is simulated as it is; the inside of a pass (pieces and tensor
parallel collectives in turn) is laid out afterwards, because nothing can come between. Idle time is
sorted by its cause as in Optimus (ATC 2025), table 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.pipeline import pipeline_order
from foreplan.cost_models.schedule import FloatArray, IntArray
from foreplan.cost_models.simulator import simulate
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step, parse_order, write_order
from foreplan.planner.bubbles.cuts import even_cuts, min_max_cuts
from foreplan.planner.bubbles.decision import BackboneStage, BubblesDecision
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.spec import BackbonePlan, PipelineName
from foreplan.planner.bubbles.training_step import TrainingStep

#: Causes of idle time, in the order of the paper's table 1.
BUBBLES = ("dp_all_gather", "dp_reduce_scatter", "pp_warm_up", "pp_cool_down", "pp_other", "tp")

#: Share by which uneven stages have to be faster than equal ones.
_WORTH = 1e-3

_OPS = {"F": "F", "BW": "B", "B": "I", "W": "W"}


def backbone_stages(layers: int, plan: BackbonePlan) -> tuple[BackboneStage, ...]:
    """Virtual stages of equal layers, or of one more in the first ones, dealt to ranks in turn.

    Raises:
        SpecError: fewer layers than virtual stages.
    """
    count = plan.pp * plan.chunks
    if layers < count:
        raise SpecError(
            "plan", got=f"{layers} layers over {plan.pp} ranks x {plan.chunks} chunks",
            expected=f"a layer for each of {count} virtual stages",
        )  # fmt: skip
    return tuple(
        BackboneStage(rank=s % plan.pp, start=start, end=end)
        for s, (start, end) in enumerate(itertools.pairwise(even_cuts(layers, count)))
    )


def schedule_name(name: PipelineName, chunks: int) -> PipelineName:
    """The schedule that is run: with one chunk interleaving is 1F1B."""
    return "1f1b" if name == "interleaved-1f1b" and chunks == 1 else name


def backbone_orders(
    name: PipelineName, plan: BackbonePlan, microbatches: int, warmup: Sequence[int] | None = None
) -> list[list[Step]]:
    """Passes of every rank in order.

    Args:
        name: the pipeline schedule.
        plan: ranks and chunks.
        microbatches: of a step.
        warmup: forwards of each rank before its first pair, instead of the schedule's own
            (interleaved only).

    Raises:
        SpecError: as `pipeline_order`.
    """
    orders = pipeline_order(
        schedule_name(name, plan.chunks), stages=plan.pp, microbatches=microbatches,
        chunks=plan.chunks, warmup=warmup,
    )  # fmt: skip
    return [[Step(_OPS[op], mb, stage) for op, stage, mb in order] for order in orders]


def forwards_first(order: Sequence[Step]) -> int:
    """Forward passes of a rank before its first backward pass."""
    passes = [item.op for item in order if item.encoder < 0]
    return next((k for k, op in enumerate(passes) if op != "F"), len(passes))


def balanced_stages(step: TrainingStep, costs: CostBook) -> tuple[BackboneStage, ...]:
    """Virtual stages of which the slowest is fastest, embedding and head counted.

    Equal stages where nothing else is shorter.

    Raises:
        SpecError: fewer layers than virtual stages.
        MissingDataError: a pass without a price.
    """
    even = backbone_stages(step.backbone.layers, step.plan)

    def longest(stages: Sequence[BackboneStage]) -> float:
        return max(
            sum(
                costs.cost(step.passes(s.start, s.end, op), step.devices[s.rank]).mean_s
                for op in ("F", "B")
            )
            for s in stages
        )

    layers = seconds_by_stage(layer_seconds, step, costs, len(even))
    longest_even = longest(even)
    shortest = layers.min(axis=0)  # of each layer, on the device that is fastest at it
    if longest_even <= max(shortest.max(), shortest.sum() / len(even)) * (1 + _WORTH):
        return even
    cuts = min_max_cuts(layers, len(even))
    stages = tuple(
        BackboneStage(rank=s % step.plan.pp, start=a, end=b)
        for s, (a, b) in enumerate(itertools.pairwise(cuts))
    )
    return stages if longest(stages) < longest_even * (1 - _WORTH) else even


def seconds_by_stage(
    seconds: Callable[[TrainingStep, CostBook, str], list[float]],
    step: TrainingStep,
    costs: CostBook,
    stages: int,
) -> FloatArray:
    """Seconds of each layer, ``[stages, layers]``, on the device that each virtual stage is on.

    Args:
        seconds: of each layer on a device.
        step: works under the layout.
        costs: prices of layers.
        stages: virtual stages, dealt to the ranks in turn.

    Raises:
        MissingDataError: a pass without a price.
    """
    rows = [seconds(step, costs, device) for device in step.devices]
    return np.array([rows[stage % len(rows)] for stage in range(stages)])


def layer_seconds(step: TrainingStep, costs: CostBook, device: str) -> list[float]:
    """Forward and backward of every layer of the backbone, embedding and head counted.

    Raises:
        MissingDataError: a pass without a price.
    """
    return [
        sum(costs.cost(step.passes(layer, layer + 1, op), device).mean_s for op in ("F", "B"))
        for layer in range(step.backbone.layers)
    ]


def bare_decision(
    step: TrainingStep,
    name: PipelineName,
    microbatches: int,
    warmup: Sequence[int] | None = None,
    stages: tuple[BackboneStage, ...] | None = None,
) -> BubblesDecision:
    """The backbone alone, without any encoder; in equal stages if none are given."""
    orders = backbone_orders(name, step.plan, microbatches, warmup)
    return BubblesDecision(
        plan=step.plan,
        schedule=schedule_name(name, step.plan.chunks),
        microbatches=microbatches,
        warmup=tuple(forwards_first(order) for order in orders),
        stages=stages or backbone_stages(step.backbone.layers, step.plan),
        encoders=(),
        orders=tuple(write_order(order) for order in orders),
        fill="unfilled",
    )


@dataclass(frozen=True, eq=False)
class BackboneTimeline:
    """When each pass of the backbone runs if no encoder stands in its way.

    Attributes:
        decision: the backbone alone.
        step: its works.
        orders: passes of each rank.
        start_s, end_s: of each pass of each rank.
        gathered_s: end of each rank's all-gather, 0 without one.
        reduced_s: start and end of each rank's reduction, both the end of the passes without one.
        activations: most bytes of activations on each rank.
        costs: the prices it was made with.
    """

    decision: BubblesDecision
    step: TrainingStep
    orders: tuple[tuple[Step, ...], ...]
    start_s: tuple[FloatArray, ...]
    end_s: tuple[FloatArray, ...]
    gathered_s: FloatArray
    reduced_s: FloatArray
    activations: tuple[int, ...]
    costs: CostBook

    @classmethod
    def of(
        cls,
        step: TrainingStep,
        costs: CostBook,
        name: PipelineName,
        microbatches: int,
        warmup: Sequence[int] | None = None,
        stages: tuple[BackboneStage, ...] | None = None,
    ) -> BackboneTimeline:
        """Simulate the backbone; in equal stages if none are given.

        Raises:
            SpecError: fewer layers than virtual stages, a warm-up that deadlocks.
            MissingDataError: a work without a price.
        """
        return cls._simulated(step, costs, bare_decision(step, name, microbatches, warmup, stages))

    @classmethod
    def alone(
        cls, step: TrainingStep, costs: CostBook, decision: BubblesDecision
    ) -> BackboneTimeline:
        """Simulate the backbone of a decision, in its stages and order, without its encoders.

        Raises:
            SpecError: an order that is not whole, or in which the passes wait for each other.
            MissingDataError: a work without a price.
        """
        orders = [
            write_order(x._replace(piece=-1) for x in parse_order(text)
                        if x.encoder < 0 and x.piece <= 0)
            for text in decision.orders
        ]  # fmt: skip
        bare = decision.model_copy(
            update={"orders": tuple(orders), "encoders": (), "fill": "unfilled"}
        )
        return cls._simulated(step, costs, bare)

    @classmethod
    def _simulated(
        cls, step: TrainingStep, costs: CostBook, decision: BubblesDecision
    ) -> BackboneTimeline:
        schedule = StepSchedule(step, decision).build()
        timeline = simulate(schedule, costs)
        passes = timeline.is_compute & (schedule.stage >= 0)
        starts, ends = [], []
        gathered = np.zeros(schedule.ranks)
        reduced = np.zeros((schedule.ranks, 2))
        for rank in range(schedule.ranks):
            mine = passes & (schedule.rank == rank)
            starts.append(timeline.start_s[mine])
            ends.append(timeline.end_s[mine])
            reduced[rank] = ends[-1].max()
        for i in np.flatnonzero(schedule.rendezvous >= 0):
            rank = schedule.rank[i]
            if schedule.ops[schedule.op[i]] == "all_gather":
                gathered[rank] = timeline.end_s[i]
            else:
                reduced[rank] = timeline.start_s[i], timeline.end_s[i]
        orders = map(parse_order, decision.orders)
        activations = tuple(sum(peak.values()) for peak in timeline.peak_memory())
        return cls(
            decision, step, tuple(tuple(order) for order in orders), tuple(starts), tuple(ends),
            gathered, reduced, activations, costs,
        )  # fmt: skip

    @property
    def total_s(self) -> float:
        """Start of the step to the last reduction; the optimizer comes after."""
        return float(self.reduced_s.max())

    @functools.cached_property
    def deadlines_s(self) -> FloatArray:
        """When stage 0 starts on each micro-batch (the paper's F_i)."""
        return self._of_first_stage("F", self.start_s)

    @functools.cached_property
    def releases_s(self) -> FloatArray:
        """When stage 0 has the gradient of each micro-batch's features (the paper's B_i)."""
        gradient = "I" if any(item.op == "I" for item in self.orders[0]) else "B"
        return self._of_first_stage(gradient, self.end_s)

    def _of_first_stage(self, op: str, times: tuple[FloatArray, ...]) -> FloatArray:
        rank = self.decision.stages[0].rank
        found = np.empty(self.decision.microbatches)
        for item, time in zip(self.orders[rank], times[rank], strict=True):
            if item.op == op and item.stage == 0:
                found[item.microbatch] = time
        return found

    # ------------------------------------------------------------------------------- inside passes

    @functools.cached_property
    def _insides(self) -> dict[tuple[int, int, str], FloatArray]:
        """``[2 pieces + 1]`` seconds of collectives and pieces in turn, by (rank, stage, op)."""
        found: dict[tuple[int, int, str], FloatArray] = {}
        for s, stage in enumerate(self.decision.stages):
            device = self.step.devices[stage.rank]
            for op in {item.op for item in self.orders[stage.rank]}:
                count = self.step.pieces(stage.start, stage.end)
                times = []
                for piece in range(count + 1):
                    link = self.step.collective(stage.start, stage.end, op, piece)
                    times.append(self.costs.cost(link, device).mean_s)
                    if piece < count:
                        work = self.step.piece(stage.start, stage.end, op, piece)
                        times.append(self.costs.cost(work, device).mean_s)
                found[stage.rank, s, op] = np.array(times)
        return found

    def pieces(self, rank: int) -> tuple[IntArray, FloatArray, FloatArray]:
        """The inside of every pass of a rank, in order.

        Returns:
            Number of the pass, start and end of each collective and piece in turn: rows with an
            even place within their pass are collectives.
        """
        inside = self._insides
        rows = [inside[rank, item.stage, item.op] for item in self.orders[rank]]
        owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        lengths = np.concatenate(rows)
        ends = np.cumsum(lengths)
        first = np.concatenate(([0.0], ends))[np.cumsum([0, *(len(r) for r in rows)])[:-1]]
        offset = (self.start_s[rank] - first)[owner]
        return owner, ends - lengths + offset, ends + offset

    @functools.cached_property
    def busy_s(self) -> tuple[tuple[FloatArray, FloatArray], ...]:
        """Intervals ``[n, 2]`` in which each rank's compute and tensor link are occupied."""
        found = []
        for rank in range(len(self.orders)):
            if not self.step.divisible:
                spans = _tidy(np.column_stack((self.start_s[rank], self.end_s[rank])), self.total_s)
                found.append((spans, np.empty((0, 2)) if self.step.plan.tp == 1 else spans))
                continue
            owner, start, end = self.pieces(rank)
            place = np.arange(len(owner)) - np.searchsorted(owner, owner)
            spans = np.column_stack((start, end))
            link = place % 2 == 0
            found.append((_tidy(spans[~link], self.total_s), _tidy(spans[link], self.total_s)))
        return tuple(found)

    # ------------------------------------------------------------------------------- bubbles

    def bubbles_s(self) -> list[dict[str, float]]:
        """Idle seconds of each rank's compute by cause; with its busy time they fill the step.

        All-gather and reduction count as far as the rank waits for them; ``pp_warm_up`` is the
        wait for the first forward pass, ``pp_cool_down`` what lies behind the last pass up to the
        end of the step, apart from its own reduction; ``pp_other`` lies between passes; ``tp`` is
        collectives inside passes.
        """
        found = []
        total = self.total_s
        for rank in range(len(self.orders)):
            start, end = self.start_s[rank], self.end_s[rank]
            gather = float(self.gathered_s[rank])
            own = float(self.reduced_s[rank, 1] - self.reduced_s[rank, 0])
            between = float(np.maximum(start[1:] - end[:-1], 0.0).sum())
            link = 0.0
            if self.step.plan.tp > 1:
                owner, begin, finish = self.pieces(rank)
                place = np.arange(len(owner)) - np.searchsorted(owner, owner)
                link = float((finish - begin)[place % 2 == 0].sum())
            found.append(
                {
                    "dp_all_gather": gather,
                    "dp_reduce_scatter": own,
                    "pp_warm_up": float(start[0]) - gather,
                    "pp_cool_down": total - float(end[-1]) - own,
                    "pp_other": between,
                    "tp": link,
                }
            )
        return found

    def compute_s(self) -> list[float]:
        """Seconds each rank computes, collectives inside passes taken out."""
        return [
            float((end - start).sum()) - row["tp"]
            for start, end, row in zip(self.start_s, self.end_s, self.bubbles_s(), strict=True)
        ]


def _tidy(spans: FloatArray, total: float) -> FloatArray:
    """Rising intervals of ``[0, total]`` that touch but don't overlap, rounding taken out."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    flat = np.clip(np.maximum.accumulate(spans.ravel()), 0.0, total)
    return flat.reshape(-1, 2)
