"""`BubblesPlanner`: encoders of a multimodal model into the idle time of its language model.

How it chooses: layouts of the backbone are ranked by an estimate (or given), the best ones
simulated; for each, encoders are colocated in every number of stages, cut into units of several
sizes, and ``solvers.gap_fill`` places the units beside the backbone's own passes, in the idle time
of pipelines, data and tensor parallelism; the best answers are replayed by the simulator, which
also knows what follows the encoders (reductions, the optimizer). Where filling does not pay, a
baseline is faster in the simulator and becomes the plan. Stages are cut by time; where nothing fits
so, everything is tried once more with stages cut by memory (`MemoryCuts`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from foreplan.cost_models.costs import Work
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.tier import ContentionKind
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Agreement, Bound, Choice, Kernels, Planner, Problem
from foreplan.planner.bubbles import recompute
from foreplan.planner.bubbles.assumptions import assumptions, unlike_blocks
from foreplan.planner.bubbles.baseline_search import searched_baselines
from foreplan.planner.bubbles.bounds import describe
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.figures import step_figures
from foreplan.planner.bubbles.filling import Filled, describe_unfit
from foreplan.planner.bubbles.ledger import ledgers
from foreplan.planner.bubbles.module_sizes import with_sizes
from foreplan.planner.bubbles.multimodal import completed
from foreplan.planner.bubbles.replays import Replay, simulated
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.bubbles.widen import widen
from foreplan.planner.bubbles.works import given_prices
from foreplan.planner.contention import contended

if TYPE_CHECKING:
    pass

#: Reasons against other candidates that a plan repeats.
_REASONS = 8
#: Steps that differ by less, relatively, are as long as each other.
_ALIKE = 1e-6


class BubblesPlanner(Planner[BubblesWorkload, BubblesDecision]):
    """Plans one training step of a multimodal model."""

    kind: ClassVar[str] = "bubbles"
    workload_type = BubblesWorkload
    decision_type = BubblesDecision
    needs_model: ClassVar[bool] = False
    told: ClassVar[frozenset[str]] = frozenset({"fill", "head_s", "tail_s", "limits_met"})

    # ------------------------------------------------------------------------------- decide

    def decide(self, problem: Problem[BubblesWorkload]) -> Choice[BubblesDecision]:
        """Best decision found and what is proven about it.

        Raises:
            SpecError: sizes that do not divide.
            InfeasibleError: backbone or encoders do not fit.
            MissingDataError: a price or the memory of a device is not known.
        """
        if recompute.is_open(problem.workload):
            return recompute.search(problem, self._decided, lambda posed: _searched(posed).lower_s)
        return self._decided(problem)[1]

    def _decided(self, problem: Problem[BubblesWorkload]) -> tuple[float, Choice[BubblesDecision]]:
        """Simulated seconds and decision where the workload leaves nothing open."""
        with contextlib.suppress(InfeasibleError):
            return self._decide(problem, BubbleSearch(problem))
        return self._decide(problem, BubbleSearch(problem, by_memory=True))

    def _decide(
        self, problem: Problem[BubblesWorkload], search: BubbleSearch
    ) -> tuple[float, Choice[BubblesDecision]]:
        """The best decision under one way to cut stages."""
        answers = search.candidates()
        replays = search.best(answers)
        notes, about = list(assumptions(problem)), []
        if search.by_memory:
            notes.insert(0, "stages are cut by memory, because nothing fits in stages cut by time")
        if replays:
            best = replays[0]
            assert best.filled is not None
            decision, found, total = best.decision, best.filled, best.total_s
            whose = ""
            if (why := _pays_not(found)) is not None:
                decision, kept = self._as_fast(search, best)
                about.append(f"filling does not pay: {why}; {kept}")
                whose = "" if decision is best.decision else "the best filling: "
            about.append(
                f"{whose}{found.filling.stages} encoder stages, units of "
                f"{found.filling.unit_layers:g} layers; {describe(found)}"
            )
        else:
            decision = self._fallback(problem, search)
            total = search.replay(decision).total_s
            notes.append("filling is not possible: " + str(search.nothing_fits()))
        # Why the decision's own layout is not filled otherwise says most, then the best estimate's.
        told = search.findings.reasons((decision.plan, *(x.plan for x in search.layouts)))
        notes += [f"not taken: {name}: {reason}" for name, reason in told[:_REASONS]]
        lower = min(search.lower_s, total)
        bound = Bound(
            status="heuristic", lower_s=lower, gap=(total - lower) / total,
            solver="layout search, gap_fill", evaluations=search.findings.evaluations,
        )  # fmt: skip
        near = {
            f"answer {k} of the search ({_described(replay)})": replay.decision
            for k, replay in enumerate(replays[1:], 2)
        }
        return total, Choice(decision, bound, tuple(notes), near, tuple(about))

    def _as_fast(self, search: BubbleSearch, best: Replay) -> tuple[BubblesDecision, str]:
        """The fastest baseline, where the search's best is no faster, and what becomes of it."""
        name, other = _fastest_baseline(search)
        if other is None or other.total_s > best.total_s * (1.0 + _ALIKE):
            return best.decision, "no baseline is as fast as encoding before and behind the step"
        return other.decision, f"{name} takes no longer and is kept"

    def _fallback(self, problem: Problem[BubblesWorkload], search: BubbleSearch) -> BubblesDecision:
        """The fastest baseline that fits, where nothing can be filled."""
        found = searched_baselines(search)
        made = [d for d in found.values() if not isinstance(d, str)]
        if not made:
            # What each lacks; the fixes are one and the same.
            raise search.nothing_fits(
                {k: d.partition(";")[0] for k, d in found.items() if isinstance(d, str)}
            )
        return min(made, key=lambda decision: search.replay(decision).total_s)

    # ------------------------------------------------------------------------------- decisions

    def baselines(self, problem: Problem[BubblesWorkload]) -> dict[str, BubblesDecision | str]:
        """Encoders on the first stage, balanced, three-phase and coarse; see `baselines.py`.

        Each in its fastest form, under any recomputation that the workload leaves open.
        """
        if not recompute.is_open(problem.workload):
            return self._baselines(problem)
        found: dict[str, BubblesDecision | str] = {}
        totals: dict[str, float] = {}
        for chosen in recompute.candidates(problem)[0]:
            posed = recompute.under(problem, chosen)
            try:
                made = self._baselines(posed)
            except InfeasibleError:
                continue
            for name, decision in made.items():
                if isinstance(decision, str):
                    found.setdefault(name, decision)
                    continue
                total = simulated(posed, decision).makespan_s
                if total < totals.get(name, math.inf):
                    found[name], totals[name] = recompute.stamped(decision, chosen), total
        return found

    def _baselines(self, problem: Problem[BubblesWorkload]) -> dict[str, BubblesDecision | str]:
        """The baselines where the workload leaves nothing open."""
        with contextlib.suppress(InfeasibleError):
            search = BubbleSearch(problem)
            found = searched_baselines(search)
            fits = any(not isinstance(decision, str) for decision in found.values())
            if fits or search.best(search.candidates()):
                return found
        return searched_baselines(BubbleSearch(problem, by_memory=True))

    def schedule(self, problem: Problem[BubblesWorkload], decision: BubblesDecision) -> Schedule:
        """The orders of all ranks with their communication; see `StepSchedule`.

        Raises:
            SpecError: a decision for another model or workload, or orders that are not whole.
        """
        step = TrainingStep.of(problem, decision)
        _check(problem, step, decision)
        return StepSchedule(step, decision).build()

    def ranks(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision
    ) -> tuple[int, ...]:
        """Cluster rank of lane 0 in replica 0 of each pipeline rank."""
        step = TrainingStep.of(problem, decision)
        return tuple(step.cluster_rank(rank) for rank in range(decision.plan.pp))

    def occupied(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision
    ) -> tuple[int, ...]:
        """Every lane of every replica."""
        return tuple(range(decision.plan.devices))

    def contends(self, problem: Problem[BubblesWorkload]) -> ContentionKind:
        """In all that is computed, where passes were timed together."""
        return contended(problem.cluster)

    def real(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision
    ) -> tuple[Schedule, tuple[int, ...]]:
        """Every lane of a pipeline rank is a process; of replicas one is run."""
        schedule, ranks = self.schedule(problem, decision), self.ranks(problem, decision)
        lanes, every = decision.plan.tp, problem.cluster.ranks()
        members = tuple(rank + lane for rank in ranks for lane in range(lanes))
        # Each is its own device here, not the one that it is priced as.
        labels = tuple(every[member].label for member in members)
        if labels == schedule.devices:
            return schedule, ranks
        return widen(schedule, labels, lanes), members

    def processes(self, problem: Problem[BubblesWorkload], decision: BubblesDecision) -> int:
        """One a lane of a pipeline rank; the schedule of a real run is not made for that."""
        return decision.plan.pp * decision.plan.tp

    def memory(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision
    ) -> tuple[MemoryLedger, ...]:
        """Model states of backbone and encoders, and workspace, of one device of each rank."""
        return ledgers(problem, TrainingStep.of(problem, decision), decision)

    def completed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes from modules, and from the folders of encoders and of ``multimodal``."""
        return completed(with_sizes(fields))

    def given(self, workload: BubblesWorkload) -> Mapping[Work, float]:
        """Times that the workload states."""
        return given_prices(workload)

    def metrics(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, timeline: Timeline
    ) -> dict[str, float]:
        """Throughput, encoder time inside the backbone's step, idle time by cause, jitter."""
        return step_figures(problem, decision, timeline)

    def remarks(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision
    ) -> tuple[str, ...]:
        """What is computed again and which device each rank takes, where that is open."""
        step = TrainingStep.of(problem, decision)
        notes = list(unlike_blocks(step))
        if decision.recompute is not None:
            notes.insert(0, recompute.described(problem, decision.recompute))
        if decision.plan.device_order is not None:
            first = ", ".join(step.block(rank)[0].label for rank in range(step.plan.pp))
            notes.append(f"ranks of the pipeline take {first}, in this order")
        return tuple(notes)

    # ------------------------------------------------------------------------------- real runs

    def preload(self) -> None:
        """Import the execution, and what torch imports in a process's first backward pass."""
        import torch.fx.experimental.symbolic_shapes  # noqa: F401

        from foreplan.planner.bubbles.execution import entry  # noqa: F401

    def kernels(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, rank: int, *, mode: str
    ) -> Kernels:
        """The passes and units of ``rank``; imports torch."""
        from foreplan.planner.bubbles.execution.entry import rank_kernels

        # On processors the round that warms up does as well, candidate by candidate.
        gpu = problem.cluster.ranks()[0].name.kind == "cuda"
        return rank_kernels(problem, decision, rank, mode=mode, rehearsed=gpu)

    def reference(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, *, mode: str
    ) -> dict[str, Any] | None:
        """Losses and gradients of the same step in one process."""
        from foreplan.planner.bubbles.execution.entry import reference_step

        return reference_step(problem, decision, mode=mode)

    def compared(self, problem: Problem[BubblesWorkload]) -> tuple[str, ...]:
        """On processors both modes compute in fp32, so that one of them is enough."""
        kinds = {rank.name.kind for rank in problem.cluster.ranks()}
        return ("fast",) if kinds == {"cpu"} else self.modes

    def agree(self, result: dict[str, Any], reference: dict[str, Any], *, mode: str) -> Agreement:
        """Losses and gradients within the rounding of another order of additions."""
        from foreplan.planner.bubbles.execution.entry import compare_steps

        return compare_steps(result, reference)


def _searched(problem: Problem[BubblesWorkload]) -> BubbleSearch:
    """The search of a problem, by memory where no layout fits by time."""
    with contextlib.suppress(InfeasibleError):
        return BubbleSearch(problem)
    return BubbleSearch(problem, by_memory=True)


def _fastest_baseline(search: BubbleSearch) -> tuple[str, Replay | None]:
    """Name and simulation of the fastest baseline; ``None`` where none fits."""
    made = {
        name: search.replay(decision)
        for name, decision in searched_baselines(search).items()
        if not isinstance(decision, str)
    }
    name = min(made, key=lambda name: made[name].total_s, default="")
    return name, made.get(name)


def _pays_not(found: Filled) -> str | None:
    """Why nothing of the encoders lies in idle time inside the backbone's step, or ``None``."""
    if (why := describe_unfit(found.filling)) is not None:
        return why
    if found.inside > 0.0:
        return None
    return (
        "no idle time inside the backbone's step comes before a micro-batch's features are needed "
        "or after their gradient is there"
    )


def _described(replay: Replay) -> str:
    """What makes an answer of the search another one."""
    plan, filled = replay.decision.plan, replay.filled
    text = f"dp {plan.dp}, tp {plan.tp}, pp {plan.pp}"
    if filled is not None and filled.filling.unit_layers is not None:
        f = filled.filling
        text += f", {f.stages} encoder stages, units of {f.unit_layers:g} layers"
    return text


def _check(
    problem: Problem[BubblesWorkload], step: TrainingStep, decision: BubblesDecision
) -> None:
    """Refuse a decision for another problem."""
    if decision.stages[-1].end != step.backbone.layers:
        raise SpecError(
            "decision.stages", got=f"{decision.stages[-1].end} layers",
            expected=f"the {step.backbone.layers} of {step.backbone.name}",
        )  # fmt: skip
    names = tuple(encoder.name for encoder in decision.encoders)
    wanted = tuple(encoder.name for encoder in problem.workload.encoders)
    if names != wanted:
        raise SpecError("decision.encoders", got=names, expected=f"{wanted}")
    for plan, tower in zip(decision.encoders, step.encoders, strict=True):
        if plan.stages[-1][1] != tower.layers:
            raise SpecError(
                f"decision: encoder {plan.name}", got=f"{plan.stages[-1][1]} layers",
                expected=f"{tower.layers}",
            )  # fmt: skip
    if decision.plan.devices > len(problem.cluster.ranks()):
        raise SpecError(
            "decision.plan", got=f"{decision.plan.devices} devices",
            expected=f"at most the cluster's {len(problem.cluster.ranks())}",
        )  # fmt: skip
