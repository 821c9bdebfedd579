"""`OnlinePlanner`: measured steps fed back, and a new order when they drift from what was planned.

A plan rests on times of works on devices. Each measured step says what they take now; where one
drifts beyond a threshold for several steps in a row, the prices of that kind of work on that device
are scaled to what was measured, and what can change between two steps is decided anew: the order of
every rank and which replica of an encoder takes which micro-batch. Parameters stay where they are:
layout, stages, units and ranks of the encoders are kept, so that nothing is moved or restarted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from foreplan.cost_models.costs import Collective, CostBook, Estimate, Segment, Work
from foreplan.cost_models.schedule import FloatArray
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.backbone import BackboneTimeline, bare_decision
from foreplan.planner.bubbles.baselines import three_phase
from foreplan.planner.bubbles.blocks import kind_of
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.placement import encoder_plan
from foreplan.planner.bubbles.recompute import settled, stamped
from foreplan.planner.bubbles.replays import simulated
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep

#: Kind of work on a device: ``(device, name of the segment)``, such as ``("h/cuda:0", "encode")``.
Kind = tuple[str, str]

#: Share of a rank's busy time below which a kind of work is not looked at.
_NOTABLE = 0.02


class ScaledBook(CostBook):
    """Another book's prices, scaled by kind of work and device.

    Args:
        book: the prices.
        factors: what to multiply a segment's price by; 1 if left out.
    """

    def __init__(self, book: CostBook, factors: Mapping[Kind, float]) -> None:
        super().__init__(book.sources, given=book.given)
        self._book, self._factors = book, dict(factors)

    def cost(self, work: Work, device: str) -> Estimate:
        """Price of a work; see `CostBook.cost`."""
        found = self._book.cost(work, device)
        factor = self._factors.get((device, work.name)) if isinstance(work, Segment) else None
        if factor is None:
            return found
        return replace(
            found, mean_s=found.mean_s * factor, low_s=found.low_s * factor,
            high_s=found.high_s * factor,
        )  # fmt: skip


@dataclass(frozen=True)
class Replanned:
    """A new order.

    Attributes:
        decision: to carry out from the next step on.
        factors: of the prices it was decided with.
        before_s, after_s: simulated step of the former order and of the new one at those prices.
    """

    decision: BubblesDecision
    factors: Mapping[Kind, float]
    before_s: float
    after_s: float


class OnlinePlanner:
    """See the module.

    Args:
        problem: with the prices that the decision was made from.
        decision: the plan's, encoders colocated.
        threshold: relative deviation of a kind of work that counts as drift.
        patience: steps in a row that have to drift.
        gain: share by which a new order has to be shorter in the simulator.

    Attributes:
        decision: in force.
        factors: of the prices that it was decided with.

    Raises:
        SpecError: a threshold, patience or gain out of range; encoders that are not colocated in
            units of one size.
    """

    def __init__(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, *,
        threshold: float = 0.1, patience: int = 3, gain: float = 0.01,
    ) -> None:  # fmt: skip
        for name, value, fits in (
            ("threshold", threshold, threshold > 0.0),
            ("patience", patience, patience >= 1),
            ("gain", gain, 0.0 <= gain < 1.0),
        ):
            if not fits:
                raise SpecError(name, got=value, expected="a positive number (gain: below 1)")
        self._problem, self._threshold, self._gain = settled(problem, decision), threshold, gain
        self._recent: deque[Mapping[Kind, float]] = deque(maxlen=patience)
        self.decision, self.factors = decision, dict[Kind, float]()
        self._step = TrainingStep.of(problem, decision)
        # Lanes that wait for slower ones say nothing of the device that their rank is priced as.
        self._waiting = {
            one.label
            for rank, standing in enumerate(self._step.stand_ins)
            for one in self._step.block(rank) if kind_of(one) != kind_of(standing)
        }  # fmt: skip
        self._unit_layers = self._unit_size()

    def rehearse(self) -> None:
        """Decide once and forget it, so that no step waits for loops that are compiled first.

        On a machine that has planned nothing yet this takes some 5 s (measured), later 0.1-0.7 s.
        """
        self._choice()

    def observe(self, timeline: Timeline) -> Replanned | None:
        """Take in a measured step.

        Args:
            timeline: of the decision in force, one rank a process.

        Returns:
            A new decision, in force from now on, where drift has lasted and another order is
            shorter; ``None`` to go on.
        """
        self._recent.append(self._deviations(timeline))
        if len(self._recent) < (self._recent.maxlen or 1) or not self._drifts():
            return None
        found = {
            kind: float(np.median([seen[kind] for seen in self._recent if kind in seen]))
            for kind in {kind for seen in self._recent for kind in seen}
        }
        self.factors = {k: self.factors.get(k, 1.0) * f for k, f in found.items()}
        self._recent.clear()
        return self._replan()

    # ------------------------------------------------------------------------------- measuring

    def _deviations(self, timeline: Timeline) -> dict[Kind, float]:
        """Measured over priced seconds of each notable kind of work, by the prices in force."""
        schedule, book = timeline.schedule, ScaledBook(self._problem.costs, self.factors)
        lanes = schedule.ranks // self.decision.plan.pp
        length = timeline.end_s - timeline.start_s
        lost = self._lost_s(timeline, lanes)
        measured: dict[Kind, float] = defaultdict(float)
        priced: dict[Kind, float] = defaultdict(float)
        busy: dict[str, float] = defaultdict(float)
        for i in np.flatnonzero(timeline.is_compute):
            work, rank = schedule.works[schedule.work[i]], int(schedule.rank[i])
            if not isinstance(work, Segment) or schedule.devices[rank] in self._waiting:
                continue
            device = self._step.devices[rank // lanes]
            kind = device, work.name
            measured[kind] += max(0.0, float(length[i] - lost[i]))
            priced[kind] += book.cost(work, device).mean_s
            busy[device] += float(length[i])
        return {
            kind: seconds / priced[kind]
            for kind, seconds in measured.items()
            if priced[kind] > 0.0 and seconds > _NOTABLE * busy[kind[0]]
        }

    def _lost_s(self, timeline: Timeline, lanes: int) -> FloatArray:
        """Seconds by which each computation is as much longer as the exchange beside it takes.

        Prices have them as actions of their own, ``beside``, which take no time in a run; there a
        collective's share is spread over what its rank computes between its start and its end.
        """
        schedule, start, end = timeline.schedule, timeline.start_s, timeline.end_s
        lost = np.zeros(len(start))
        if "beside" not in schedule.ops:
            return lost

        def stage(i: int) -> int:
            return int(schedule.stage[i]) if schedule.step[i] >= 0 else -1

        places = {
            (int(schedule.rank[i]), work.kind, stage(i), int(schedule.step[i])): i
            for i in map(int, np.flatnonzero(schedule.rendezvous >= 0))
            if isinstance(work := schedule.works[schedule.work[i]], Collective)
        }
        computing = timeline.is_compute & (schedule.op != schedule.ops.index("beside"))
        for i in map(int, np.flatnonzero(schedule.op == schedule.ops.index("beside"))):
            work, rank = schedule.works[schedule.work[i]], int(schedule.rank[i])
            if not isinstance(work, Collective):
                continue
            at = places[rank, work.kind, stage(i), int(schedule.step[i])]
            price = self._problem.costs.cost(work, self._step.devices[rank // lanes]).mean_s
            common = np.minimum(end, end[at]) - np.maximum(start, start[at])
            common = np.where(computing & (schedule.rank == rank), np.maximum(common, 0.0), 0.0)
            # What passes while the rank computes nothing lengthens nothing.
            taken = max(0.0, price - float(end[i] - start[i]))
            lost += common * (taken / max(float(end[at] - start[at]), taken, 1e-12))
        return lost

    def _drifts(self) -> bool:
        """Whether one kind of work is off in the same direction in every recent step."""
        kinds = set.intersection(*(set(seen) for seen in self._recent))
        return any(
            all(sign * (seen[kind] - 1.0) > self._threshold for seen in self._recent)
            for kind in kinds
            for sign in (1.0, -1.0)
        )

    # ------------------------------------------------------------------------------- deciding

    def _unit_size(self) -> float | None:
        decision, step = self.decision, self._step
        for size in (None, *step.workload.unit_layers):
            if self._plans(size) == [
                e.model_copy(update={"slots": decision.encoders[0].slots})
                for e in decision.encoders
            ]:
                return size
        raise SpecError(
            "decision.encoders",
            got=f"{decision.fill} filling of its own",
            expected="encoders colocated on all ranks in units of one size",
        )

    def _plans(self, unit_layers: float | None) -> list[object]:
        decision, step = self.decision, self._step
        try:
            return [
                encoder_plan(
                    tower, step.plan, stages=len(plan.stages), unit_layers=unit_layers,
                    slots=decision.encoders[0].slots,
                )
                for tower, plan in zip(step.encoders, decision.encoders, strict=True)
            ]  # fmt: skip
        except SpecError:
            return []

    def _replan(self) -> Replanned | None:
        before, after, decision = self._choice()
        if after >= before * (1.0 - self._gain):
            return None
        self.decision = decision
        return Replanned(decision, MappingProxyType(dict(self.factors)), before, after)

    def _choice(self) -> tuple[float, float, BubblesDecision]:
        """Seconds of the order in force and of the best other one, and that."""
        book = ScaledBook(self._problem.costs, self.factors)
        workload = self._problem.workload.model_copy(update={"plan": self.decision.plan})
        problem = replace(self._problem, costs=book, workload=workload)
        step = TrainingStep(problem, self.decision.plan)

        def seconds(decision: BubblesDecision) -> float:
            return simulated(problem, decision).makespan_s

        before = seconds(self.decision)
        # What is computed again stays as it is, and stays said.
        kept = self.decision.recompute
        others = [stamped(other, kept) for other in self._orders(problem, step, book)]
        found = [(seconds(other), other) for other in others]
        return (before, *min(found, key=lambda pair: pair[0], default=(before, self.decision)))

    def _orders(
        self, problem: Problem[BubblesWorkload], step: TrainingStep, book: CostBook
    ) -> list[BubblesDecision]:
        """Fine filling, coarse filling and three phases of the same encoders."""
        old = self.decision
        stages = len(old.encoders[0].stages)
        timeline = BackboneTimeline.of(step, book, old.schedule, old.microbatches, None, old.stages)
        # The plan at hand may be one whose stages were cut by memory.
        cap = BubbleSearch(problem, by_memory=True).max_live(timeline, stages)
        made = []
        for how in ("fine", "coarse"):
            filled = None
            if cap != 0:
                filling = Filling(timeline, stages, self._unit_layers, how, max_live=cap)
                filled = fill(filling)
            if filled is not None:
                made.append(filled.decision)
        if self._unit_layers is None:
            bare = bare_decision(step, old.schedule, old.microbatches, stages=old.stages)
            made.append(three_phase(step, bare, stages))
        return made
