"""The search: layouts of the backbone, warm-ups, encoder stages and unit sizes, each one filled.

For every layout worth it and every number of encoder stages the idle time is filled in units of
every size; the best two are filled again with other warm-ups of the backbone, because running
fewer forwards ahead moves its need for features to later (Optimus, section 4.3, figure 12), at a
price once transfers take time. Answers are ranked by the simulator.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from foreplan.cost_models.memory import show_bytes
from foreplan.datasets.quantity import format_seconds
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.backbone import (
    BackboneTimeline,
    backbone_stages,
    balanced_stages,
    schedule_name,
)
from foreplan.planner.bubbles.decision import BackboneStage, BubblesDecision
from foreplan.planner.bubbles.device_order import device_orders
from foreplan.planner.bubbles.exchange_cost import exchange_cost_s
from foreplan.planner.bubbles.filling import Filled, Filling, describe_unfit, fill
from foreplan.planner.bubbles.layouts import CLOSER, Layout, layouts
from foreplan.planner.bubbles.ledger import capacity_bytes, live_bytes, static_items
from foreplan.planner.bubbles.memory_cuts import MemoryCuts
from foreplan.planner.bubbles.placement import encoder_plan
from foreplan.planner.bubbles.replays import Replay, lacks, simulated
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.cached_method import cached_method

#: Answers whose warm-up is searched, answers that are simulated.
REFINED, REPLAYED = 2, 6
#: Layouts that are not filled of which a plan says why.
REJECTED = 8
#: Orders of unlike devices that a layout is filled on beside the cluster's own.
PLACED = 2
#: Digits to which steps are compared.
_DIGITS = 6


@dataclass(slots=True)
class Findings:
    """What the search saw.

    Attributes:
        rejected: candidates that were not filled, and why; `unfilled` names those of one layout.
        evaluations: of the solver.
    """

    rejected: dict[str, str] = field(default_factory=dict)
    evaluations: int = 0

    def unfilled(self, plan: BackbonePlan, what: str, reason: str) -> None:
        """Note why a way to fill a layout was not taken."""
        self.rejected[f"{plan.words}: {what}"] = reason

    def reasons(self, plans: Iterable[BackbonePlan]) -> list[tuple[str, str]]:
        """All of them, those against ways to fill some layouts first, layout by layout."""
        names = [f"{plan.words}: " for plan in plans]

        def place(item: tuple[str, str]) -> int:
            starts = (k for k, name in enumerate(names) if item[0].startswith(name))
            return next(starts, len(names))

        return sorted(self.rejected.items(), key=place)


class BubbleSearch:
    """Searches one problem; keeps timelines between calls.

    Args:
        problem: what to plan.
        by_memory: cut stages by memory (`MemoryCuts`) where the layout has one a rank, instead of
            by time alone; for problems that nothing else fits.

    Attributes:
        found: all layouts that may fit, best estimate first.
        layouts: those that are searched, on the orders of devices that suit them.
        lower_s: no step under any layout is shorter.
        findings: what was seen on the way.
    """

    def __init__(self, problem: Problem[BubblesWorkload], *, by_memory: bool = False) -> None:
        self.problem, self.by_memory = problem, by_memory
        self.findings = Findings()
        self.found, rejected = layouts(problem, by_memory=by_memory)
        self.layouts = [each for layout in self.found[:CLOSER] for each in self._placed(layout)]
        self.findings.rejected |= rejected
        self.lower_s = min(layout.work_s for layout in self.found)
        if any(layout.plan.tp > 1 for layout in self.layouts):
            self.findings.rejected["encoders on fewer lanes than the backbone"] = (
                "lanes of one tensor parallel group would run unlike work, and one rank of the "
                "schedule stands for all of them"
            )
        for layout in self.found[CLOSER:][:REJECTED]:
            p = layout.plan
            # On unlike devices it may be taken as a chain of encoder and backbone all the same.
            name = f"{'filling ' if self.orders(layout) else ''}{p.words}"
            self.findings.rejected[name] = (
                f"the backbone alone is estimated at {format_seconds(layout.estimate_s)}, the best "
                f"at {format_seconds(self.found[0].estimate_s)}"
            )

    def orders(self, layout: Layout) -> list[Layout]:
        """A layout on every other order of unlike devices; none where they are alike or stated."""
        if layout.plan.device_order is not None:
            return []
        return [
            replace(layout, plan=layout.plan.model_copy(update={"device_order": order}))
            for order in device_orders(self.problem.cluster, layout.plan)[1:]
        ]

    def _placed(self, layout: Layout) -> list[Layout]:
        """A layout on the cluster's own order of devices and on those that suit the backbone best.

        Like devices, or an order that the workload states, have one order.
        """
        placed = self.orders(layout)
        alone = {other: self._alone_s(other) for other in placed}
        best = sorted((other for other in placed if alone[other] < math.inf), key=alone.__getitem__)
        return [layout, *best[:PLACED]]

    def _alone_s(self, layout: Layout) -> float:
        """Seconds of the backbone alone."""
        timeline = self._timeline(layout, None, self._by_time(layout))
        return math.inf if timeline is None else timeline.total_s

    # ------------------------------------------------------------------------------- timelines

    @cached_method
    def step(self, layout: Layout) -> TrainingStep:
        """Works under a layout."""
        return TrainingStep(self.problem, layout.plan)

    @cached_method
    def cuts(self, layout: Layout, encoder_stages: int) -> tuple[tuple[BackboneStage, ...], ...]:
        """Virtual stages of the backbone beside colocated encoders; 0: encoders on rank 0.

        Several ways to cut by memory. By time that whose longest stage is shortest and, since units
        fill what unlike stages leave, that into equal layers; by time also where no cut fits, so
        that what is lacking can be said.
        """
        if self.by_memory and layout.plan.chunks == 1:
            cuts = MemoryCuts(self.problem, self.step(layout), layout.microbatches)
            with contextlib.suppress(InfeasibleError):
                if encoder_stages:
                    return cuts.colocated(encoder_stages)
                return (cuts.first_stage(),)
        by_time = self._by_time(layout)
        if not encoder_stages:
            return (by_time,)
        even = backbone_stages(self.step(layout).backbone.layers, layout.plan)
        return tuple(dict.fromkeys((by_time, even)))

    @cached_method
    def _by_time(self, layout: Layout) -> tuple[BackboneStage, ...]:
        return balanced_stages(self.step(layout), self.problem.costs)

    def chain_cuts(self, layout: Layout, chunks: int) -> list[int] | None:
        """Cuts of encoder and backbone as one chain, ``None`` for those by time; see `cuts`."""
        step = self.step(layout)
        if self.by_memory and chunks == 1 and len(step.encoders) == 1:
            with contextlib.suppress(InfeasibleError):
                return MemoryCuts(self.problem, step, layout.microbatches).chain()
        return None

    def timelines(
        self, layout: Layout, warmup: tuple[int, ...] | None, encoder_stages: int
    ) -> list[BackboneTimeline]:
        """The backbone alone, in each cut for such encoders; none where a warm-up deadlocks."""
        found = (self._timeline(layout, warmup, c) for c in self.cuts(layout, encoder_stages))
        return [timeline for timeline in found if timeline is not None]

    @cached_method
    def _timeline(
        self, layout: Layout, warmup: tuple[int, ...] | None, stages: tuple[BackboneStage, ...]
    ) -> BackboneTimeline | None:
        try:
            return BackboneTimeline.of(
                self.step(layout), self.problem.costs, self.problem.workload.schedule,
                layout.microbatches, warmup, stages,
            )  # fmt: skip
        except SpecError:
            if warmup is None:
                raise
            return None

    def warmups(self, layout: Layout) -> Iterator[tuple[int, ...]]:
        """Warm-ups beside the schedule's own: between it and the paper's adjusted one.

        Rank r of p with v chunks runs ``2 (p - 1 - r) + (v - 1) p`` chunk forwards ahead by
        default and ``(p - 1 - r) + (v - 1) p`` adjusted.
        """
        plan, count = layout.plan, layout.microbatches
        name = schedule_name(self.problem.workload.schedule, plan.chunks)
        if name != "interleaved-1f1b" or plan.pp == 1 or count % plan.pp:
            return
        p, base = plan.pp, (plan.chunks - 1) * plan.pp
        yield tuple(p - 1 - r + base for r in range(p))
        if p > 2:
            yield tuple(-(-3 * (p - 1 - r) // 2) + base for r in range(p))

    # ------------------------------------------------------------------------------- filling

    def stages(self, layout: Layout) -> list[int]:
        """Numbers of encoder stages to try; the others go to the findings."""
        w, pp = self.problem.workload, layout.plan.pp
        wanted = w.encoder_stages or tuple(k for k in range(1, pp + 1) if pp % k == 0)
        found = []
        for stages in wanted:
            reason = self._unsuitable(layout, stages)
            if reason is None:
                found.append(stages)
            else:
                plan = layout.plan.model_copy(update={"device_order": None})  # true of any order
                self.findings.unfilled(plan, f"{stages} encoder stages", reason)
        return found

    def _unsuitable(self, layout: Layout, stages: int) -> str | None:
        pp = layout.plan.pp
        if pp % stages:
            return f"{stages} does not divide the {pp} ranks of the backbone"
        if pp // stages > layout.microbatches:
            return (
                f"{pp // stages} encoder pipelines for {layout.microbatches} micro-batches: some "
                "would have none"
            )
        for tower in self.step(layout).encoders:
            if tower.layers < stages:
                return f"{stages} are more than the {tower.layers} layers of {tower.name}"
        return None

    def max_live(self, timeline: BackboneTimeline, stages: int) -> int | None:
        """Micro-batches of encoder activations that fit beside everything else.

        The solver counts a micro-batch from the end of its forward pass, memory from the start: one
        more than the cap is held. Features that wait on the first rank count for all micro-batches.

        Returns:
            The cap, ``None`` where all fit, 0 where not one does.
        """
        step, count = timeline.step, timeline.decision.microbatches
        plans = tuple(
            encoder_plan(t, step.plan, stages=stages, unit_layers=None, slots=(0,) * count)
            for t in step.encoders
        )
        trial = timeline.decision.model_copy(update={"encoders": plans})
        # Pipelines take even shares, as a rule; where memory is short there is no relying on it.
        most = count if self.by_memory else -(-count // (step.plan.pp // stages))
        cap = most
        features = count * sum(step.feature_bytes(e) for e in range(len(plans)))
        for rank in range(step.plan.pp):
            held = live_bytes(step, plans, rank % stages)
            room = capacity_bytes(self.problem, step, rank) - timeline.activations[rank]
            room -= sum(static_items(step, trial, rank).values())
            room -= features if rank == timeline.decision.stages[0].rank else 0
            if room < held:
                self._short = (rank, held - room)
                return 0
            if held and room < most * held:
                # Where one micro-batch alone fits, the next starts when its backward pass is done.
                cap = min(cap, max(1, room // held - 1))
        return None if cap >= most else int(cap)

    def fillings(
        self, layout: Layout, warmup: tuple[int, ...] | None, stages: Sequence[int]
    ) -> list[Filled]:
        """Every unit size for every number of encoder stages."""
        found = []
        ways = [(n, timeline) for n in stages for timeline in self.timelines(layout, warmup, n)]
        for count, timeline in ways:
            cap = self.max_live(timeline, count)
            if cap == 0:
                rank, short = self._short
                self.findings.unfilled(
                    layout.plan, f"{count} encoder stages",
                    f"rank {rank} lacks {show_bytes(short)} for one micro-batch of the encoders",
                )  # fmt: skip
                continue
            for size in self.problem.workload.unit_layers:
                filling = Filling(timeline, count, size, max_live=cap)
                answer = self._fill(filling)
                if answer is not None:
                    found.append(answer)
        return found

    def _fill(self, filling: Filling) -> Filled | None:
        answer, plan = fill(filling), filling.timeline.decision.plan
        name = f"{filling.stages} encoder stages, units of {filling.unit_layers:g} layers"
        if answer is None:
            lost = "no order keeps the encoders' activations in memory"
            self.findings.unfilled(plan, name, lost)
            return None
        self.findings.evaluations += answer.solution.evaluations
        if (unfit := describe_unfit(filling)) is not None:
            self.findings.unfilled(plan, f"{name}, inside the step", unfit)
        return answer

    def candidates(self) -> list[Filled]:
        """Answers of every layout, best by the solver's objective first."""
        found: list[Filled] = []
        for layout in self.layouts:
            stages = self.stages(layout)
            plain = sorted(self.fillings(layout, None, stages), key=self.estimate_s)
            found += plain
            again = dict.fromkeys(f.filling.stages for f in plain[:REFINED])
            for warmup in self.warmups(layout):
                found += self.fillings(layout, warmup, list(again))
        return sorted(found, key=self.estimate_s)

    def estimate_s(self, filled: Filled) -> float:
        """The solver's objective and what exchange and optimizer of the encoders add to it."""
        return filled.solution.objective + exchange_cost_s(filled.filling)

    # ------------------------------------------------------------------------------- replays

    def replay(self, decision: BubblesDecision, filled: Filled | None = None) -> Replay:
        """Simulate a decision and write down what it adds to the backbone's own step."""
        return Replay(decision, simulated(self.problem, decision), filled)

    def best(self, answers: Sequence[Filled], count: int = REPLAYED) -> list[Replay]:
        """The first answers that fit, simulated, fastest first, of equal ones those of fewer units.

        Args:
            answers: by estimate; at most two of them for one layout and cut, number of encoder
                stages and size of units are simulated.
            count: how many to simulate.
        """
        kept: list[Replay] = []
        seen: Counter[tuple[object, ...]] = Counter()
        for answer in answers:
            if len(kept) == count:
                break
            f = answer.filling
            kind = answer.decision.plan, answer.decision.stages, f.stages, f.unit_layers
            known = any(replay.decision.orders == answer.decision.orders for replay in kept)
            if known or seen[kind] == 2:
                continue
            seen[kind] += 1
            replay = self.replay(answer.decision, answer)
            lacking = lacks(self.problem, replay)
            if lacking is None:
                kept.append(replay)
            else:
                name = f"{f.stages} encoder stages, units of {f.unit_layers:g} layers"
                self.findings.unfilled(answer.decision.plan, name, lacking)
        if not kept:
            return []
        least = min(replay.total_s for replay in kept)

        def rank(replay: Replay) -> tuple[float, int, float]:
            units = sum(len(encoder.units) for encoder in replay.decision.encoders)
            return round(replay.total_s / least, _DIGITS), units, replay.total_s

        return sorted(kept, key=rank)

    def nothing_fits(self, others: Mapping[str, str] = MappingProxyType({})) -> InfeasibleError:
        """Why no encoder can be placed anywhere.

        Args:
            others: why ways without filling do not fit either, by name.
        """
        reasons = {**dict(list(self.findings.rejected.items())[-4:]), **others}
        shown = "; ".join(f"{k}: {v}" for k, v in reasons.items())
        return InfeasibleError(
            "no way was found to fit the encoders beside the backbone, in stages cut by time"
            f"{' or, with one stage a rank, by memory' if self.by_memory else ''}: "
            f"{shown or 'nothing was tried'}",
            fix="recompute the encoders, use more devices, a smaller micro-batch or more stages",
        )
