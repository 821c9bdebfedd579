"""`StepReplay`: time and memory of precision plans, hundreds a second, by the one simulator.

Tables are flattened into arrays, so that a plan costs a few gathers; the schedule's shape is the
same for every plan and is made ready once. The workers' seconds go into `Simulator.run`, which
knows rendezvous, queues and contention.

Steps repeat: when the last all-reduce of a step is over, every rank is idle and begins its update,
so that all that follows depends on nothing before. Two steps say what any number takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreplan.cost_models.costs import CostBook, HostLaunch, HostWait, Segment, Work
from foreplan.cost_models.schedule import FloatArray, IntArray, Schedule
from foreplan.cost_models.simulator import Contention, Simulator
from foreplan.datasets.tier import ContentionKind
from foreplan.planner.contention import pressure
from foreplan.planner.precision.flat_tables import Contending, Issue
from foreplan.planner.precision.pricing import StepTables, Works
from foreplan.planner.precision.saved import SavedBytes
from foreplan.planner.precision.spec import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER
from foreplan.planner.precision.step import Buckets, WorkerStep, all_reduce, step_schedule


class DeviceReplay:
    """Seconds and bytes of one device's plans.

    Args:
        tables: options and casts of the device.
        buckets: where the backward pass is cut.

    Attributes:
        issue: what a GPU's host takes; ``None`` where it is not known, or does not run ahead.
    """

    def __init__(self, tables: StepTables, buckets: Buckets) -> None:
        self.tables, self.buckets = tables, buckets
        self.saved = SavedBytes(tables)
        self._part = np.array(buckets.part)
        sizes = [len(options) for options in tables.options]
        self._start = np.concatenate(([0], np.cumsum(sizes)))[:-1]
        self._forward = np.array([p.forward_s for options in tables.options for p in options])
        self._backward = np.array([p.backward_s for options in tables.options for p in options])
        edges = tables.edges
        self._producer = np.array([e.producer for e in edges], dtype=np.int64)
        self._consumer = np.array([e.consumer for e in edges], dtype=np.int64)
        self._width = np.array([e.forward_s.shape[1] for e in edges], dtype=np.int64)
        counts = [e.forward_s.size for e in edges]
        self._edge = np.concatenate(([0], np.cumsum(counts)))[:-1].astype(np.int64)
        empty = np.zeros(0)
        self._cast = np.concatenate([empty, *(e.forward_s.ravel() for e in edges)])
        self._cast_back = np.concatenate([empty, *(e.backward_s.ravel() for e in edges)])
        # How much of what runs around a backward pass's calls falls into each of its parts.
        count = np.bincount(self._part, minlength=len(buckets.bytes))
        self._shares = tuple(float(share) for share in count / max(1, len(self._part)))
        self.issue = Issue.of(tables)

    def places(self, choice: IntArray) -> tuple[IntArray, IntArray]:
        """Where a choice's options and casts stand in flat arrays."""
        at = self._start + choice
        cell = self._edge + choice[self._producer] * self._width + choice[self._consumer]
        return at, cell

    def seconds(self, choice: IntArray) -> tuple[float, FloatArray]:
        """Seconds of the forward pass and of each part of the backward pass."""
        at, cell = self.places(choice)
        forward = float(self._forward[at].sum() + self._cast[cell].sum())
        backward = self._by_part(self._backward[at], self._cast_back[cell])
        host = self.issue
        if host is not None:
            forward = max(forward, host.forward_s(at, cell)) if forward else forward
            issued = self._by_part(host.backward[at], host.cast_back[cell])
            issued += host.once_backward_s * np.array(self._shares)
            backward = np.where(backward > 0, np.maximum(backward, issued), backward)
        return forward, backward

    def _by_part(self, operators: FloatArray, casts: FloatArray) -> FloatArray:
        """Sums over each part of the backward pass."""
        parts = len(self.buckets.bytes)
        found: FloatArray = np.bincount(self._part, operators, parts).astype(float)
        return found + np.bincount(self._part[self._consumer], casts, parts)

    def saved_bytes(self, choice: IntArray) -> IntArray:
        """Bytes of saved tensors that each part of the backward pass frees."""
        held = self.saved.held_bytes(choice)
        return np.bincount(self._part, held, len(self.buckets.bytes)).astype(np.int64)

    def works(self, choice: IntArray) -> tuple[Work, tuple[Work, ...]]:
        """The forward pass and the parts of the backward pass as works."""
        forward: Counter[Work] = Counter()
        backward: list[Counter[Work]] = [Counter() for _ in self.buckets.bytes]
        for i, options in enumerate(self.tables.options):
            _count(forward, options[choice[i]].forward)
            _count(backward[self._part[i]], options[choice[i]].backward)
        for edge in self.tables.edges:
            a, b = choice[edge.producer], choice[edge.consumer]
            _count(forward, edge.forward[a][b])
            _count(backward[self._part[edge.consumer]], edge.backward[a][b])
        waits = self.issue is not None
        return _segment(FORWARD, forward, 1.0 if waits else None), tuple(
            _segment(BACKWARD, part, share if waits else None)
            for part, share in zip(backward, self._shares, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay says of a plan.

    Attributes:
        iteration_s: seconds of a step, the mean over the steps of the replay.
        saved_bytes: tensors kept for the backward pass, by rank.
    """

    iteration_s: float
    saved_bytes: tuple[int, ...]


class StepReplay:
    """Replays plans of all workers.

    Args:
        devices: one a rank; ranks alike may share one.
        labels: label of each rank.
        optimizer: work of the update.
        costs: prices of collectives and of the update.
        contention: measured slowdown between ranks of one host.
        contends: in what they contend.
        taken: what the backward pass loses to an all-reduce beside it, over the all-reduce's own
            time (`Cluster.taken_beside`). The last one has the update behind it, which waits.
        steps: that a plan is judged by: all ranks begin the first at once, later ones each when its
            own update is over.
    """

    def __init__(
        self,
        devices: Sequence[DeviceReplay],
        labels: Sequence[str],
        optimizer: Work,
        costs: CostBook,
        contention: Contention | None,
        contends: ContentionKind = "memory",
        taken: float = 0.0,
        steps: int = 1,
    ) -> None:
        self.steps = steps
        self.devices, self.optimizer = tuple(devices), optimizer
        self.buckets = devices[0].buckets
        self._costs, self._contention, self._contends = costs, contention, contends
        self.labels = tuple(labels)
        updates = [self._update(device) for device in devices]
        self.optimizer_s = np.array(
            [costs.cost(w, label).mean_s for w, label in zip(updates, labels, strict=True)]
        )
        self.all_reduce_s = np.zeros(len(self.buckets.bytes))
        self._beside: tuple[Work, ...] = ()
        self.beside_s = np.zeros((len(labels), len(self.buckets.bytes)))
        if len(labels) > 1:
            works = [all_reduce(size, len(labels)) for size in self.buckets.bytes]
            self.all_reduce_s = np.array(
                [max(costs.cost(work, label).mean_s for label in labels) for work in works]
            )
            if taken:
                self._beside = tuple(
                    replace(work, bytes=max(1, round(taken * work.bytes))) for work in works[:-1]
                )
                self.beside_s[:, 1:] = [
                    [costs.cost(work, label).mean_s for work in self._beside] for label in labels
                ]
        full = [np.zeros(len(device.tables.graph), dtype=np.int64) for device in devices]
        self._schedule = self.schedule(full, min(steps, 2))
        self._simulator = Simulator(self._schedule, contention=contention)
        made: dict[int, Contending] = {}
        if contention is not None:
            for device in devices:
                if id(device) not in made:
                    made[id(device)] = Contending.of(device.tables, costs, contends)
        self._contending = [made[id(device)] for device in devices] if made else []
        self._place = {
            op: np.flatnonzero(self._schedule.op == k) for k, op in enumerate(self._schedule.ops)
        }
        # Of each step the last all-reduce; one rank alone has its update.
        last, step = self._place[ALL_REDUCE if len(labels) > 1 else OPTIMIZER], []
        if steps > 1:
            step = [last[self._schedule.microbatch[last] == number][-1] for number in range(2)]
        self._idle = tuple(int(action) for action in step)

    @property
    def update_s(self) -> FloatArray:
        """What updates add to a step, by rank: its own between steps, the longest after the last.

        No rank's forward and backward pass with its all-reduces and this is more than a step takes.
        """
        own = self.optimizer_s
        found: FloatArray = ((self.steps - 1) * own + own.max()) / self.steps
        return found

    def schedule(self, choices: Sequence[IntArray], steps: int = 1) -> Schedule:
        """The schedule of a plan, with its works."""
        made: list[WorkerStep] = []
        for label, device, choice in zip(self.labels, self.devices, choices, strict=True):
            forward, backward = device.works(choice)
            for q, lost in enumerate(self._beside, 1):
                parts = (*_parts(backward[q]), (lost, 1))
                backward = (*backward[:q], Segment(BACKWARD, parts), *backward[q + 1 :])
            whole = Segment(BACKWARD, tuple(p for w in backward for p in _parts(w)))
            update = Segment(OPTIMIZER, ((self.optimizer, 1),))
            made.append(
                WorkerStep(
                    label, forward, backward, self._update(device),
                    tuple(int(b) for b in device.saved_bytes(choice)),
                    (
                        pressure(self._costs, label, forward, self._contends),
                        pressure(self._costs, label, whole, self._contends),
                        pressure(self._costs, label, update, self._contends),
                    ),
                )
            )  # fmt: skip
        return step_schedule(made, self.buckets, steps)

    def _update(self, device: DeviceReplay) -> Work:
        """The update, and what a GPU waits for its host in it."""
        waits = None if device.issue is None else 1.0
        return _segment(OPTIMIZER, {self.optimizer: 1}, waits) if waits else self.optimizer

    def run(self, choices: Sequence[IntArray]) -> Replayed:
        """Time and saved bytes of a step.

        Args:
            choices: option of every operator, one array a rank.
        """
        s = self._schedule
        duration = np.zeros(len(s))
        forward, backward = np.zeros(s.ranks), np.zeros((s.ranks, len(self.buckets.bytes)))
        saved = []
        for rank, (device, choice) in enumerate(zip(self.devices, choices, strict=True)):
            forward[rank], backward[rank] = device.seconds(choice)
            backward[rank] += self.beside_s[rank]
            saved.append(int(device.saved.held_bytes(choice).sum()))
        for op, values in (
            (FORWARD, lambda at: forward[s.rank[at]]),
            (BACKWARD, lambda at: backward[s.rank[at], s.step[at]]),
            (ALL_REDUCE, lambda at: self.all_reduce_s[s.step[at]]),
            (OPTIMIZER, lambda at: self.optimizer_s[s.rank[at]]),
        ):
            if op in self._place:
                duration[self._place[op]] = values(self._place[op])
        timeline = self._simulated(choices, forward, backward).run(duration)
        total_s = timeline.makespan_s
        if self.steps > 2:
            first, second = self._idle
            total_s += (self.steps - 2) * float(timeline.end_s[second] - timeline.end_s[first])
        return Replayed(total_s / self.steps, tuple(saved))

    def _simulated(
        self, choices: Sequence[IntArray], forward: FloatArray, backward: FloatArray
    ) -> Simulator:
        """The simulator, where ranks contend by the shares of these plans' own works.

        Args:
            choices: option of every operator, one array a rank.
            forward: seconds of their forward passes.
            backward: ``[rank, part]`` of their backward passes.
        """
        if not self._contending:
            return self._simulator
        shares = np.zeros((2, len(choices)))
        whole = backward.sum(axis=1)
        for rank, (device, choice) in enumerate(zip(self.devices, choices, strict=True)):
            shares[:, rank] = self._contending[rank].shares(
                *device.places(choice), float(forward[rank]), float(whole[rank])
            )
        found = self._schedule.pressure.copy()
        for row, op in enumerate((FORWARD, BACKWARD)):
            at = self._place[op]
            found[at] = shares[row, self._schedule.rank[at]]
        return Simulator(replace(self._schedule, pressure=found), contention=self._contention)


def _count(parts: Counter[Work], works: Works) -> None:
    for work in works:
        parts[work] += 1


def _segment(name: str, counts: Mapping[Work, int], waits: float | None) -> Work:
    """A segment, or nothing that costs time: a segment without parts has no price.

    Args:
        name: its part of the step.
        counts: works, and how often each runs.
        waits: share of what runs around the part's calls, where a GPU's host is known.
    """
    parts = tuple(counts.items())
    if not parts:
        return HostLaunch(0)
    return Segment(name, parts if waits is None else (*parts, (HostWait(name, parts, waits), 1)))


def _parts(work: Work) -> tuple[tuple[Work, int], ...]:
    return work.parts if isinstance(work, Segment) else ()
