"""`PrecisionPlanner`: the precision of each operator of a training step, device by device.

Trains one network on unlike devices with equal local batches, fp32 masters and fp32 gradients: fast
devices keep precision, slow or small ones give some up, and no more than the step's time and the
device's memory ask for (QSync, IPDPS 2024). See ``search.py`` for how it chooses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.tier import ContentionKind
from foreplan.errors import SpecError
from foreplan.planner.base import Agreement, Bound, Choice, Kernels, Planner, Problem, TimeLimit
from foreplan.planner.contention import contended
from foreplan.planner.precision.baselines import precision_baselines
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.indicator import omega_table
from foreplan.planner.precision.near import precision_near
from foreplan.planner.precision.search import PrecisionSearch
from foreplan.planner.precision.situation import Situation, refuse_too_large
from foreplan.planner.precision.spec import PrecisionDecision, PrecisionWorkload
from foreplan.planner.precision.starting import GAP, starting_plans
from foreplan.planner.precision.task import training_task

if TYPE_CHECKING:
    import torch


#: Problems whose captured step and search are kept.
_KEPT = 2


class PrecisionPlanner(Planner[PrecisionWorkload, PrecisionDecision]):
    """Plans the precisions of a training step on a cluster of unlike devices."""

    kind: ClassVar[str] = "precision"
    workload_type = PrecisionWorkload
    decision_type = PrecisionDecision
    needs_model: ClassVar[bool] = False
    modes: ClassVar[tuple[str, ...]] = ("reference", "fast")
    issues: ClassVar[bool] = True

    def __init__(self) -> None:
        # The problem and the one that it is compared with, the latest last.
        self._known: list[tuple[Problem[PrecisionWorkload], Situation]] = []
        self._searched: list[tuple[Situation, PrecisionSearch]] = []

    def check(
        self, model: Model | None, cluster: Cluster, workload: PrecisionWorkload,
        decision: PrecisionDecision,
    ) -> None:  # fmt: skip
        """A worker for each rank of the cluster, on its device."""
        labels = [rank.label for rank in cluster.ranks()]
        if len(decision.workers) != len(labels):
            raise SpecError(
                "decision.workers", got=len(decision.workers), expected=f"{len(labels)}, one a rank"
            )
        for i, worker in enumerate(decision.workers):
            if worker.device != labels[worker.rank]:
                raise SpecError(
                    f"decision.workers[{i}].device", got=worker.device,
                    expected=f"{labels[worker.rank]}, its rank's device",
                )  # fmt: skip

    # ------------------------------------------------------------------------------- decide

    def decide(self, problem: Problem[PrecisionWorkload]) -> Choice[PrecisionDecision]:
        """Least omega within the target and every device's memory.

        Raises:
            InfeasibleError: memory does not hold the step, or nothing meets the target.
            MissingDataError: an operator has no price, or a device no known memory.
            SpecError: a network that cannot be traced, or whose calibration is not finite.
        """
        refuse_too_large(problem)
        search = self._search(problem)
        found = search.run()
        decision = search.situation.decision(found.choices, search.omega, search.target_s)
        gap = found.gap
        proven = found.status == "optimal" and gap is not None and gap <= GAP
        bound = Bound(
            status="optimal" if proven else found.status,
            lower_s=None,
            gap=gap,
            solver="multiple_choice",
            evaluations=found.evaluations,
        )
        near = precision_near(search, found.choices)
        return Choice(decision, bound, self._assumptions(problem, search.situation), near)

    def _assumptions(
        self, problem: Problem[PrecisionWorkload], situation: Situation
    ) -> tuple[str, ...]:
        notes = [
            "equal local batches, fp32 masters and gradients; the bound and the gap are of omega, "
            "the summed indicator, not of time",
            "dropout and other operators of training mode alone are not in the step's price",
        ]
        for k, device in enumerate(situation.devices):
            have = {p.name for options in device.tables.options for p in options if "/" in p.name}
            label = situation.ranks[situation.kinds[k][0]].label
            notes.append(f"{label} chooses among {', '.join(sorted(have))}")
        notes += _kept(situation.graph)
        if problem.model is not None and problem.model.weights == "random":
            notes.append(
                f"{problem.model.name} has random weights: indicator and times are of a network "
                "at the start of its training"
            )
        return tuple(notes)

    def baselines(self, problem: Problem[PrecisionWorkload]) -> dict[str, PrecisionDecision | str]:
        """Uniform precisions, QSync's heap and a random order; see `precision_baselines`."""
        return precision_baselines(self._search(problem), problem.seed)

    def objective(
        self, problem: Problem[PrecisionWorkload], decision: PrecisionDecision, total_s: float
    ) -> float:
        """Omega: time is a limit here, not what is sought."""
        return decision.omega

    def time_limit(self, problem: Problem[PrecisionWorkload]) -> TimeLimit[PrecisionDecision]:
        """The workload's target, or what the starting plan takes."""
        search, w = self._search(problem), problem.workload
        if w.target_s is not None:
            return TimeLimit(w.target_s * w.steps, 1.0 + w.slack)
        start = search.situation.decision(search.start, search.omega, search.target_s)
        return TimeLimit(start, 1.0 + w.slack)

    def judged(
        self, problem: Problem[PrecisionWorkload], decision: PrecisionDecision
    ) -> PrecisionDecision:
        """Held to this problem's target, which is another one where it comes from other prices.

        Raises:
            MissingDataError: a variant has no price here.
        """
        search = self._search(problem)
        s = search.situation
        met = decision.limits_met and search.meets(s.replay.run(s.choices(decision)))
        return decision.model_copy(update={"target_s": search.target_s, "limits_met": met})

    # ------------------------------------------------------------------------------- schedule

    def contends(self, problem: Problem[PrecisionWorkload]) -> ContentionKind:
        """In passes, where ranks at work together were timed by those."""
        return contended(problem.cluster)

    def processes(self, problem: Problem[PrecisionWorkload], decision: PrecisionDecision) -> int:
        """One a worker; the network is not traced for that."""
        return len(decision.workers)

    def schedule(
        self, problem: Problem[PrecisionWorkload], decision: PrecisionDecision
    ) -> Schedule:
        """The workload's training steps, one after another.

        Raises:
            SpecError: a decision for another network, cluster or workload.
        """
        situation = self._situation(problem)
        return situation.replay.schedule(situation.choices(decision), problem.workload.steps)

    def memory(
        self, problem: Problem[PrecisionWorkload], decision: PrecisionDecision
    ) -> tuple[MemoryLedger, ...]:
        """Weights, gradients, optimizer states and workspace; saved tensors come by actions."""
        situation = self._situation(problem)
        return tuple(
            MemoryLedger(
                rank.label,
                int(situation.capacity[i] * (1.0 - problem.workload.memory_headroom)),
                situation.static_bytes(situation.kind_of[i]),
            )
            for i, rank in enumerate(situation.ranks)
        )

    def metrics(
        self,
        problem: Problem[PrecisionWorkload],
        decision: PrecisionDecision,
        timeline: Timeline,
    ) -> dict[str, float]:
        """Seconds and samples of a step, omega, and the share of modules at each precision."""
        w = problem.workload
        iteration_s = timeline.makespan_s / w.steps
        figures = {
            "iteration_s": iteration_s,
            "target_s": decision.target_s,
            "throughput_samples_per_s": w.batch * len(decision.workers) / iteration_s,
            "omega": decision.omega,
        }
        words = [text.split("/")[1] for o in decision.workers for text in o.operators.values()]
        for word in sorted(set(words)):
            figures[f"share_{word}"] = float(np.mean([w == word for w in words]))
        return figures

    # ------------------------------------------------------------------------------- real runs

    def preload(self) -> None:
        """Import the execution, and what torch imports in a process's first step.

        Its optimizers import `torch._dynamo`, which takes seconds in each rank of each candidate.
        """
        import torch._dynamo
        import torch.fx.experimental.symbolic_shapes  # noqa: F401

        from foreplan.planner.precision.execution import kernels, reference  # noqa: F401

    def kernels(
        self,
        problem: Problem[PrecisionWorkload],
        decision: PrecisionDecision,
        rank: int,
        *,
        mode: str,
    ) -> Kernels:
        """The training step of ``rank``; imports torch."""
        from foreplan.planner.precision.execution.kernels import TrainingKernels

        task = training_task(problem.model, problem.workload, problem.seed)
        return TrainingKernels(
            task, problem.workload, decision, rank, mode=mode, device=_torch_device(decision, rank),
            count_memory=mode == "fast",
        )  # fmt: skip

    def reference(
        self,
        problem: Problem[PrecisionWorkload],
        decision: PrecisionDecision,
        *,
        mode: str,
    ) -> dict[str, Any] | None:
        """Losses and gradients of the same steps in one process, on the first rank's device.

        There, because no processor has all of a GPU's formats.
        """
        from foreplan.planner.precision.execution.reference import single_process_training

        task = training_task(problem.model, problem.workload, problem.seed)
        return single_process_training(
            task, problem.workload, decision, mode=mode, steps=problem.workload.steps,
            device=_torch_device(decision, 0),
        )  # fmt: skip

    def agree(self, result: dict[str, Any], reference: dict[str, Any], *, mode: str) -> Agreement:
        """Within fp32's rounding in mode ``reference``; close losses and gradients as planned."""
        from foreplan.planner.precision.execution.reference import compare_training

        return compare_training(result, reference, mode=mode)

    # ---------------------------------------------------------------------------------- cache

    def _situation(self, problem: Problem[PrecisionWorkload]) -> Situation:
        """Made once a problem: decide, baselines and every forecast share it.

        Problems that differ in prices or devices alone share the captured step as well.
        """
        for known, situation in self._known:
            if known is problem:
                return situation
        asked = (problem.model, problem.workload, problem.seed)
        alike = (s for p, s in self._known if (p.model, p.workload, p.seed) == asked)
        made = Situation(problem, captured=next(alike, None))
        self._known = [*self._known, (problem, made)][-_KEPT:]
        return made

    def _search(self, problem: Problem[PrecisionWorkload]) -> PrecisionSearch:
        situation = self._situation(problem)
        for known, search in self._searched:
            if known is situation:
                return search
        start = starting_plans(situation)  # refuses what no device holds, which an indicator is not
        # One task of one workload and seed: the indicator knows no prices.
        alike = (search.omega for known, search in self._searched if known.task is situation.task)
        omega = next(alike, None) or omega_table(
            situation.task, situation.graph, problem.workload, problem.seed
        )
        made = PrecisionSearch(situation, omega, start)
        self._searched = [*self._searched, (situation, made)][-_KEPT:]
        return made


def _kept(graph: TrainingGraph) -> list[str]:
    """What keeps its precision though it has weights to multiply by, in one line."""
    kept = graph.kept()
    if not kept:
        return []
    share = sum(node.flops for node in kept) / sum(o.node.flops for o in graph.operators)
    where = dict.fromkeys(re.sub(r"\d+", "*", node.module or node.name) for node in kept)
    names = [*list(where)[:4], *(["..."] if len(where) > 4 else [])]
    count = "1 product stays" if len(kept) == 1 else f"{len(kept)} products stay"
    return [
        f"{count} at fp32 ({100 * share:.0f} % of a forward pass's arithmetic): "
        f"plans are for torch.nn.Linear, Embedding and undilated Conv2d, not for "
        f"{', '.join(names)}"
    ]


def _torch_device(decision: PrecisionDecision, rank: int) -> torch.device:
    """Torch's device of a rank's process, which has become the rank's device."""
    import torch

    if "/cuda" in decision.workers[rank].device:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
