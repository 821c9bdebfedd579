"""`Situation`: everything that the decisions of one precision plan are judged by.

Made once a plan: the captured step, each device's tables, the replay, memory limits and, where a
decision is sought, the indicator. Decisions become arrays of options here, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.ddp_buckets import GRADIENT_BYTES, ddp_buckets
from foreplan.cost_models.memory import show_bytes, show_missing
from foreplan.cost_models.schedule import IntArray
from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.contention import contended, contention
from foreplan.planner.precision.allocation import Allocation, Omega
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.pricing import StepTables, Unpriced
from foreplan.planner.precision.replay import DeviceReplay, Replayed, StepReplay
from foreplan.planner.precision.spec import (
    PRECISIONS,
    TRAINING_VARIANTS,
    Precision,
    PrecisionDecision,
    PrecisionWorkload,
    WorkerDecision,
    training_variant,
)
from foreplan.planner.precision.step import Buckets
from foreplan.planner.precision.task import TrainingTask, training_task

#: fp32 states a parameter: momentum, or both moments.
STATES_OF = {"sgd": 1, "adamw": 2}
FLOAT_BYTES = 4
Choices = list[IntArray]


class Situation:
    """See the module.

    Args:
        problem: with prices, or without in a rank's process, where works alone matter.
        captured: of the same network, whose captured step is taken over.
        apart: decide for each rank by itself, though several be alike.

    Raises:
        SpecError: a network that cannot be traced, a rank in ``full_precision`` that is not there.
        MissingDataError: an operator without a price, a device without known memory.
    """

    def __init__(
        self, problem: Problem[PrecisionWorkload], *, captured: Situation | None = None,
        apart: bool = False,
    ) -> None:  # fmt: skip
        self.problem, self.workload = problem, problem.workload
        # A process that only carries a decision out knows no prices.
        self.costs = problem.costs if problem.costs.sources else CostBook([Unpriced()])
        self.ranks = problem.cluster.ranks()
        self._check_precisions()
        self._check_full()
        self.task: TrainingTask
        self.graph: TrainingGraph
        if captured is None:
            self.task = training_task(problem.model, problem.workload, problem.seed)
            self.graph = TrainingGraph.of(self.task, problem.workload.batch)
        else:
            self.task, self.graph = captured.task, captured.graph
        w = self.workload
        names = ddp_buckets(
            self.graph.parameters, first_bucket_bytes=w.first_bucket_bytes,
            bucket_bytes=w.bucket_bytes,
        )  # fmt: skip
        self.buckets = Buckets.of(self.graph, names)
        self.kinds = self._kinds(apart=apart)
        tables = {k: self._tables(self.ranks[members[0]]) for k, members in enumerate(self.kinds)}
        self.kind_of = [next(k for k, m in enumerate(self.kinds) if r in m)
                        for r in range(len(self.ranks))]  # fmt: skip
        self.devices = [DeviceReplay(tables[k], self.buckets) for k in range(len(self.kinds))]
        contends = contended(problem.cluster)
        self.replay = StepReplay(
            [self.devices[k] for k in self.kind_of],
            [rank.label for rank in self.ranks],
            self.graph.update(w.optimizer),
            self.costs,
            contention(problem.cluster, tuple(range(len(self.ranks))), kind=contends),
            contends,
            problem.cluster.taken_beside("all_reduce", range(len(self.ranks))),
            w.steps,
        )
        self.capacity = tuple(rank.capacity for rank in self.ranks)

    def _check_precisions(self) -> None:
        """Refuse a precision that no device of the cluster can have.

        Raises:
            SpecError: names it.
        """
        here = {rank.kernel_kind for rank in self.ranks}
        for word in self.workload.precisions:
            having = {k for v in TRAINING_VARIANTS.values() if v.precision == word for k in v.kinds}
            if not having & here:
                raise SpecError(
                    "workload.precisions", got=word,
                    expected=f"precisions of {' and '.join(sorted(here))} devices",
                    fix=f"leave it out, or add a {' or '.join(sorted(having))} device",
                )  # fmt: skip

    def _kinds(self, *, apart: bool) -> list[list[int]]:
        """Ranks that the same decision fits, by what the cluster says of them."""
        found: dict[object, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            key = (rank.host, rank.name, rank.profile, rank.memory_bytes, self._stays_full(rank))
            found.setdefault(index if apart else key, []).append(index)
        return list(found.values())

    def _check_full(self) -> None:
        """Refuse to keep a device at fp32 that the cluster does not have.

        Raises:
            SpecError: names it.
        """
        here = {word for rank in self.ranks for word in (rank.label, str(rank.name))}
        if unknown := set(self.workload.full_precision) - here:
            raise SpecError(
                "workload.full_precision", got=sorted(unknown)[0],
                expected=f"devices of the cluster: {', '.join(r.label for r in self.ranks)}",
            )  # fmt: skip

    def _stays_full(self, rank: Rank) -> bool:
        return bool({rank.label, str(rank.name)} & set(self.workload.full_precision))

    def _tables(self, rank: Rank) -> StepTables:
        precisions = ("fp32",) if self._stays_full(rank) else self.workload.precisions
        return StepTables(self.graph, self.costs, rank.label, rank.kernel_kind, precisions)

    # -------------------------------------------------------------------------------- memory

    def static_bytes(self, kind: int) -> dict[str, int]:
        """What a rank holds for the whole run, by item."""
        parameters = sum(self.graph.parameters.values())
        return {
            **state_bytes(parameters, self.workload.optimizer),
            "weights": self.graph.held_bytes,
            "workspace": self.devices[kind].saved.workspace_bytes(),
        }

    def saved_limit(self, kind: int) -> int:
        """Bytes that saved tensors may take on devices of a kind; negative where nothing fits."""
        capacity = self.capacity[self.kinds[kind][0]]
        room = int(capacity * (1.0 - self.workload.memory_headroom))
        return room - sum(self.static_bytes(kind).values())

    def fits(self, replayed: Replayed) -> bool:
        """Whether every rank's saved tensors fit."""
        return all(
            size <= self.saved_limit(k)
            for k, size in zip(self.kind_of, replayed.saved_bytes, strict=True)
        )

    # ----------------------------------------------------------------------------- decisions

    def each(self, by_kind: Sequence[IntArray]) -> Choices:
        """One array a rank from one a kind."""
        return [by_kind[k] for k in self.kind_of]

    def uniform(self, kind: int, precision: Precision) -> IntArray:
        """Every module at one precision, or at the next higher one that it has.

        Where a precision has several kernels, those that hand on one dtype and are quicker than the
        others; of the dtypes the one whose passes take less with all that follows from it: casts,
        and operators without a choice that compute in what they are handed.
        """
        order = PRECISIONS[::-1]
        allowed = order[order.index(precision) :]
        tables = self.devices[kind].tables
        seconds: dict[str, float] = {}
        for i in self.graph.adjustable:
            for p in tables.options[i]:
                seconds[p.name] = seconds.get(p.name, 0.0) + p.forward_s + p.backward_s
        found = []
        for output in dict.fromkeys(training_variant(name).output for name in seconds):
            chosen = {}
            for i in self.graph.adjustable:
                names = [p.name for p in tables.options[i]]
                chosen[self.graph.operators[i].module] = min(
                    names,
                    key=lambda n: (
                        _rank(n, allowed), training_variant(n).output != output, seconds[n]
                    ),
                )  # fmt: skip
            found.append(tables.choice(chosen))
        return least_seconds(found, self.devices[kind])

    def choices(self, decision: PrecisionDecision) -> Choices:
        """Options of every operator of every rank.

        Raises:
            SpecError: a decision for another network, cluster or workload.
        """
        if decision.network != self.graph.digest:
            raise SpecError(
                "decision.network", got=decision.network,
                expected=f"{self.graph.digest}, that of {self.graph.name}",
                fix="plan for this network, or give the one the plan was made for",
            )  # fmt: skip
        if len(decision.workers) != len(self.ranks):
            raise SpecError(
                "decision.workers", got=len(decision.workers),
                expected=f"one for each of {len(self.ranks)} ranks",
            )  # fmt: skip
        if decision.buckets != self.buckets.names:
            raise SpecError(
                "decision.buckets", got=f"{len(decision.buckets)} buckets",
                expected=f"the {len(self.buckets.names)} buckets of the workload's limits",
            )  # fmt: skip
        return [
            self.devices[k].tables.choice(worker.operators)
            for k, worker in zip(self.kind_of, decision.workers, strict=True)
        ]

    def decision(
        self, by_kind: Sequence[IntArray], omega: Omega, target_s: float, *, limits_met: bool = True
    ) -> PrecisionDecision:
        """The decision that options of each kind of device stand for."""
        total = 0.0
        workers = []
        for index, (rank, k) in enumerate(zip(self.ranks, self.kind_of, strict=True)):
            names = self.devices[k].tables.names(by_kind[k])
            total += sum(omega[module][text] for module, text in names.items())
            workers.append(WorkerDecision(rank=index, device=rank.label, operators=names))
        return PrecisionDecision(
            workers=tuple(workers), buckets=self.buckets.names, network=self.graph.digest,
            omega=total, target_s=target_s, limits_met=limits_met,
        )  # fmt: skip

    def allocations(self, omega: Mapping[str, Mapping[str, float]]) -> list[Allocation]:
        """The multiple-choice problem of each kind of device."""
        return [
            Allocation(
                device,
                omega,
                self.replay.all_reduce_s,
                self.replay.beside_s[self.kind_of.index(kind)],
                share_layers=self.workload.share_layers,
            )
            for kind, device in enumerate(self.devices)
        ]

    def check_memory(self, kind: int, least_bytes: float) -> None:
        """Refuse a device on which even the least saved tensors do not fit.

        Raises:
            InfeasibleError: says what is missing.
        """
        limit = self.saved_limit(kind)
        if least_bytes <= limit:
            return
        need = least_bytes + sum(self.static_bytes(kind).values())
        items = {**self.static_bytes(kind), "activations": round(least_bytes)}
        largest = max(items, key=lambda name: items[name])
        raise InfeasibleError(
            f"{self.graph.name} at a batch of {self.workload.batch} needs at least "
            f"{show_bytes(need)} on {self.ranks[self.kinds[kind][0]].label}, above all {largest} "
            f"({show_bytes(items[largest])}); there is {show_bytes(need - least_bytes + limit)}",
            fix=f"add {show_missing(least_bytes - limit)}, or {self._smaller(limit)}",
        )

    def _smaller(self, limit: float) -> str:
        """What would need less memory; ``limit`` bytes are left for saved tensors."""
        w = self.workload
        ways = []
        if limit > 0:  # else what lacks is not for the samples
            ways += ["lower the batch"] if w.batch > 1 else []
            ways += ["shorten sequence_length"] if w.sequence_length not in (None, 1) else []
        ways += ["lower memory_headroom"] if w.memory_headroom else []
        ways += ["train by optimizer=sgd, one state a parameter"] if w.optimizer == "adamw" else []
        return " or ".join(ways or ["train a smaller network"])


def state_bytes(parameters: int, optimizer: str) -> dict[str, int]:
    """What every rank holds of a network's parameters, by item."""
    return {
        "weights": FLOAT_BYTES * parameters,
        "gradients": GRADIENT_BYTES * parameters,
        "optimizer": FLOAT_BYTES * STATES_OF[optimizer] * parameters,
    }


def refuse_too_large(problem: Problem[PrecisionWorkload]) -> None:
    """Refuse a decoder whose states no step can be beside, before minutes go into its capture.

    Raises:
        InfeasibleError: they alone are more than a device holds.
        MissingDataError: a device without known memory.
    """
    model, w = problem.model, problem.workload
    if model is None or w.network != "model":  # other networks are known once they are captured
        return
    tight = min(problem.cluster.ranks(), key=lambda rank: rank.capacity)
    room = int(tight.capacity * (1.0 - w.memory_headroom))
    need = sum(state_bytes(model.parameters, w.optimizer).values())
    if need > room:
        raise InfeasibleError(
            f"{model.name} needs at least {show_bytes(need)} on {tight.label} for weights, "
            f"gradients and the states of {w.optimizer} alone; there is {show_bytes(room)}",
            fix="leave out devices that small, or train a smaller model",
        )


def _rank(text: str, allowed: Sequence[str]) -> int:
    """Place of a variant's precision in an order of preference."""
    word = training_variant(text).precision
    return allowed.index(word) if word in allowed else len(allowed)


def least_seconds(choices: Sequence[IntArray], device: DeviceReplay) -> IntArray:
    """The choice whose both passes take the least time."""

    def seconds(choice: IntArray) -> float:
        forward, backward = device.seconds(choice)
        return forward + float(np.sum(backward))

    return min(choices, key=seconds)
