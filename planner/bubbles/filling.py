"""Encoder work into the backbone's idle time: a `GapFillProblem` and its answer as a decision.

With several encoders the units of one stage follow each other encoder by encoder, as if they were
one encoder (Optimus, section 4.4); a micro-batch is encoded when all of them are done.

With tensor parallelism a unit of half a layer leaves its collectives out, which then occupy the
link on their own, beside the backbone's computation; its computation may run while the backbone's
collectives occupy the link. Larger units keep their collectives inside.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from foreplan.cost_models.schedule import FloatArray
from foreplan.planner.bubbles.actions import Step, write_order
from foreplan.planner.bubbles.backbone import BackboneTimeline
from foreplan.planner.bubbles.decision import BubblesDecision, EncoderPlan
from foreplan.planner.bubbles.placement import encoder_plan
from foreplan.solvers.gap_fill import (
    GapFillAnswer,
    GapFillProblem,
    GapFillScore,
    Resource,
    UnitChain,
    evaluate,
    solve,
)
from foreplan.solvers.solution import Solution

#: Shortest time of a unit that the solver accepts.
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Filling:
    """One way to fill a backbone's idle time.

    Attributes:
        timeline: the backbone.
        stages: of each encoder pipeline.
        unit_layers: layers of a unit; see `placement.unit_cuts`.
        fill: ``fine`` uses all idle time, ``coarse`` what lies before the first and behind the last
            pass of a rank.
        max_live: cap on the micro-batches whose encoder activations one pipeline keeps.
    """

    timeline: BackboneTimeline
    stages: int
    unit_layers: float | None
    fill: Literal["fine", "coarse"] = "fine"
    max_live: int | None = None


@dataclass(frozen=True)
class Filled:
    """An answer.

    Attributes:
        filling: what was asked.
        problem: as the solver saw it.
        solution: of the solver; its objective leaves out what follows the encoders' last backward
            pass (reduction, optimizer).
        score: of its answer.
    """

    filling: Filling
    problem: GapFillProblem
    solution: Solution[GapFillAnswer]
    score: GapFillScore

    @property
    def inside(self) -> float:
        """Share of the encoders' time that lies inside the backbone's step."""
        return self.score.inside_fraction

    @property
    def head_s(self) -> float:
        """What the encoders add in front of the backbone's step."""
        return self.score.head_s

    @property
    def tail_s(self) -> float:
        """What they add behind it."""
        return self.score.tail_s

    @functools.cached_property
    def decision(self) -> BubblesDecision:
        """All orders; made when they are first asked for, because most answers are not taken."""
        answer = self.solution.value
        assert answer is not None
        slots = tuple(int(j) for j in answer.pipeline)
        plans = _plans(self.filling, slots)
        return self.filling.timeline.decision.model_copy(
            update={
                "encoders": tuple(plans),
                "orders": _orders(self.filling, _Chains(self.filling, plans), self),
                "fill": self.filling.fill,
                "head_s": self.head_s,
                "tail_s": self.tail_s,
            }
        )


class _Chains:
    """Units of one micro-batch, forward and backward, with the word of each."""

    def __init__(self, filling: Filling, plans: Sequence[EncoderPlan]) -> None:
        self._step = filling.timeline.step
        self._costs = filling.timeline.costs
        self.plans = plans
        # A real run has no sums apart from units that are computed again.
        whole = self._step.arithmetic.measurable and any(
            self._step.encoder(e).recompute for e in range(len(plans))
        )
        fine = filling.unit_layers == 0.5 and not whole and self._step.overlapping
        self.bare = fine and self._collective_s() > _SHORTEST_S
        self.rows: dict[str, list[tuple[int, int, Step]]] = {"F": [], "B": []}
        for stage in range(filling.stages):
            for e, plan in enumerate(plans):
                self.rows["F"] += self._stage(e, plan, stage, "F")
        for stage in reversed(range(filling.stages)):
            for e, plan in reversed(list(enumerate(plans))):
                if not self._step.encoder(e).frozen:
                    self.rows["B"] += self._stage(e, plan, stage, "B")

    def _collective_s(self) -> float:
        """Seconds of the shortest collective of the encoders; 0 without tensor parallelism."""
        step = self._step
        if step.plan.tp == 1:
            return 0.0
        # Behind its last unit every stage has one, and fewer than between two units.
        works = [
            step.unit_collective(e, plan, 0, "F", plan.stage_units(0)[-1] + 1)
            for e, plan in enumerate(self.plans)
        ]
        return min(self._costs.cost(work, step.devices[0]).mean_s for work in works)

    def _stage(
        self, e: int, plan: EncoderPlan, stage: int, op: str
    ) -> Iterator[tuple[int, int, Step]]:
        """(stage, resource, word) of each unit and, where they are apart, collective."""
        units = list(plan.stage_units(stage))
        turn = 1 if op == "F" else -1
        for unit in units[::turn]:
            if self.bare:
                yield stage, Resource.LINK, Step(op.lower(), 0, encoder=e, unit=unit)
            yield stage, Resource.COMPUTE, Step(op, 0, encoder=e, unit=unit)
        if self.bare:
            behind = units[-1] + 1 if op == "F" else units[0] - 1
            yield stage, Resource.LINK, Step(op.lower(), 0, encoder=e, unit=behind)

    def unit_chain(self, op: str) -> UnitChain:
        """The solver's form, seconds on each pipeline's own devices."""
        rows = self.rows[op]
        if not rows:
            return UnitChain.empty()
        step, ranks = self._step, self.plans[0].ranks
        price: dict[tuple[str, int, Step], float] = {}
        seconds = np.empty((len(ranks), len(rows)))
        for j, row in enumerate(ranks):
            for u, (stage, _, word) in enumerate(rows):
                device = step.devices[row[stage]]
                key = device, stage, word
                if key not in price:
                    price[key] = self._seconds(word, stage, device)
                seconds[j, u] = price[key]
        return UnitChain(
            stage=np.array([row[0] for row in rows]),
            resource=np.array([int(row[1]) for row in rows]),
            duration_s=np.maximum(seconds, _SHORTEST_S),
        )

    def _seconds(self, word: Step, stage: int, device: str) -> float:
        plan = self.plans[word.encoder]
        op = word.op.upper()
        if word.op.islower():
            work = self._step.unit_collective(word.encoder, plan, stage, op, word.unit)
        else:
            begin, end = plan.units[word.unit], plan.units[word.unit + 1]
            work = self._step.unit(word.encoder, plan.tp, begin, end, op, bare=self.bare)
        return self._costs.cost(work, device).mean_s


def fill(filling: Filling, *, gap: float = 1e-3, max_evaluations: int = 2_000) -> Filled | None:
    """Fill a backbone's idle time.

    Args:
        filling: what to fill and how.
        gap: relative gap at which the solver stops.
        max_evaluations: the solver's limit.

    Returns:
        The answer, or ``None`` where the cap on live micro-batches leaves none.

    Raises:
        SpecError: fewer layers than stages of an encoder.
        MissingDataError: a unit without a price.
    """
    count = filling.timeline.decision.microbatches
    problem = _problem(filling, _Chains(filling, _plans(filling, (0,) * count)))
    solution = solve(problem, gap=gap, max_evaluations=max_evaluations)
    if solution.value is None:
        return None
    return Filled(filling, problem, solution, evaluate(problem, solution.value))


def _plans(filling: Filling, slots: tuple[int, ...]) -> list[EncoderPlan]:
    step = filling.timeline.step
    return [
        encoder_plan(
            tower, step.plan, stages=filling.stages, unit_layers=filling.unit_layers, slots=slots
        )
        for tower in step.encoders
    ]


def _problem(filling: Filling, chains: _Chains) -> GapFillProblem:
    timeline = filling.timeline
    busy = timeline.busy_s
    if filling.fill == "coarse":
        busy = tuple((_hull(compute), _hull(link)) for compute, link in busy)
    ranks = np.array(chains.plans[0].ranks)
    first = timeline.decision.stages[0].rank
    forward, backward = np.zeros(ranks.shape), np.zeros(ranks.shape)
    for j, row in enumerate(ranks):
        for k, rank in enumerate(row):
            last = k == len(row) - 1
            target = first if last else row[k + 1]
            if target != rank:
                forward[j, k] = _transfer_s(filling, int(rank), int(target), last)
                backward[j, k] = _transfer_s(filling, int(target), int(rank), last)
    return GapFillProblem(
        backbone_s=timeline.total_s,
        busy_s=busy,
        stage_device=ranks,
        forward=chains.unit_chain("F"),
        backward=chains.unit_chain("B"),
        deadline_s=timeline.deadlines_s,
        release_s=timeline.releases_s,
        forward_lag_s=forward,
        backward_lag_s=backward,
        max_live_jobs=filling.max_live if chains.rows["B"] else None,
    )


def _hull(spans: FloatArray) -> FloatArray:
    """One interval from the first start to the last end."""
    return spans if not len(spans) else np.array([[spans[0, 0], spans[-1, 1]]])


def _transfer_s(filling: Filling, source: int, target: int, last: bool) -> float:
    """Longest transfer of the encoders between two ranks."""
    step = filling.timeline.step
    ends = step.cluster_rank(source), step.cluster_rank(target)
    found = []
    for e in range(len(step.encoders)):
        size = step.feature_bytes(e) if last else step.encoder_hidden_bytes(e, step.plan.tp)
        work = step.steps.transfer(size, *ends)
        found.append(filling.timeline.costs.cost(work, step.devices[source]).mean_s)
    return max(found)


def _orders(filling: Filling, chains: _Chains, filled: Filled) -> tuple[str, ...]:
    """Backbone and encoder work of every rank by start."""
    timeline, answer, score = filling.timeline, filled.solution.value, filled.score
    assert answer is not None
    units: list[list[tuple[float, int, Step]]] = [[] for _ in timeline.orders]
    ends: list[list[float]] = [[] for _ in timeline.orders]
    for op, starts, finish in (
        ("F", answer.forward_start_s, score.forward_end_s),
        ("B", answer.backward_start_s, score.backward_end_s),
    ):
        for mb, pipeline in enumerate(answer.pipeline):
            row = chains.plans[0].ranks[int(pipeline)]
            for u, (stage, _, word) in enumerate(chains.rows[op]):
                rank = row[stage]
                placed = (float(starts[mb, u]), len(units[rank]), word._replace(microbatch=mb))
                units[rank].append(placed)
                ends[rank].append(float(finish[mb, u]))
    slack = filled.problem.tolerance_s
    return tuple(
        write_order(_merged(timeline, rank, units[rank], ends[rank], slack))
        for rank in range(len(units))
    )


def _merged(
    timeline: BackboneTimeline,
    rank: int,
    units: Sequence[tuple[float, int, Step]],
    ends: Sequence[float],
    slack: float,
) -> Iterator[Step]:
    """One rank's work in order; passes that units reach into piece by piece."""
    passes = timeline.orders[rank]
    start, end = timeline.start_s[rank], timeline.end_s[rank]
    touched = np.zeros(len(passes), dtype=bool)
    if timeline.step.divisible:
        for (begin, _, _), finish in zip(units, ends, strict=True):
            a = int(np.searchsorted(end, begin + slack, side="right"))
            b = int(np.searchsorted(start, finish - slack, side="left"))
            touched[a:b] = True
    # A piece's word carries the collective in front of it, so that it stands where the piece
    # starts; units and their collectives stand at the middle of their time, which lies clearly on
    # one side of that whatever the rounding: both queues then keep their planned order.
    rows: list[tuple[float, int, Step]] = []
    inside = timeline.pieces(rank) if touched.any() else None
    for k, item in enumerate(passes):
        if not touched[k] or inside is None:
            rows.append((float(start[k]), k, item))
            continue
        owner, begins, _ = inside
        first, after = np.searchsorted(owner, [k, k + 1])
        # Pieces stand at odd places; behind the last one its collective.
        times = [*begins[first + 1 : after : 2], begins[after - 1]]
        rows += [(float(t), k, item._replace(piece=p)) for p, t in enumerate(times)]
    rows += [
        ((begin + finish) / 2, k, word)
        for (begin, k, word), finish in zip(units, ends, strict=True)
    ]
    for _, _, word in sorted(rows, key=lambda row: row[0]):
        yield word


def describe_unfit(filling: Filling) -> str | None:
    """Why nothing of the encoders can be placed inside the step, or ``None``.

    Says so where every unit is longer than every idle interval, on any of the devices.
    """
    if filling.fill != "fine" or filling.unit_layers is None:
        return None
    step = filling.timeline.step
    longest = 0.0
    for compute, _ in filling.timeline.busy_s:
        edges = np.concatenate(([0.0], compute.ravel(), [filling.timeline.total_s]))
        longest = max(longest, float((edges[1::2] - edges[::2]).max()))
    shortest = math.inf
    for e, tower in enumerate(step.encoders):
        plan = encoder_plan(
            tower, step.plan, stages=filling.stages, unit_layers=filling.unit_layers, slots=()
        )
        work = step.unit(e, step.plan.tp, plan.units[0], plan.units[1], "F", bare=True)
        for device in step.unlike_devices:
            shortest = min(shortest, filling.timeline.costs.cost(work, device).mean_s)
    if shortest <= longest:
        return None
    return (
        f"a unit of {filling.unit_layers:g} layers takes {shortest * 1e3:.3g} ms, the longest idle "
        f"interval is {longest * 1e3:.3g} ms"
    )


__all__ = ["Filled", "Filling", "describe_unfit", "fill"]
