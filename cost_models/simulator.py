"""Event simulator: a `Schedule` and prices in, a `Timeline` out.

Everything a planner claims about time goes through `simulate`; the same schedule is then executed
and its measured `Timeline` compared. Rules of time are those of ``schedule.py``. Resources of a
rank are queues in list order, so without shared queues and contention the schedule is a DAG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models._event_loop import (
    dag_end,
    dag_order,
    queue_edges,
    run_dag,
    run_events,
    successors,
)
from foreplan.cost_models.costs import CostBook, Work
from foreplan.cost_models.schedule import SHARED_PREFIX, FloatArray, IntArray, Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import MissingDataError, SpecError


@dataclass(frozen=True, slots=True)
class Contention:
    """How ranks of one host slow each other down.

    Attributes:
        host: host of each rank, as small integers; ranks of unlike hosts never contend.
        slowdown: factor on memory-bound time while 0, 1, 2, ... other memory-bound processes of the
            host run; the first is 1. Linear between and beyond the entries.
        processes: of its host that each rank stands for, which do the same at the same time (lanes,
            replicas); 1 each if left out.
    """

    host: tuple[int, ...]
    slowdown: tuple[float, ...]
    processes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        factors = self.slowdown
        if len(factors) < 2 or factors[0] != 1.0 or not all(1.0 <= f < np.inf for f in factors):
            raise SpecError("contention.slowdown", got=factors, expected="1.0, then factors >= 1")
        if min(self.host, default=0) < 0:
            raise SpecError("contention.host", got=min(self.host), expected="numbers of at least 0")
        if self.processes and (len(self.processes) != len(self.host) or min(self.processes) < 1):
            raise SpecError(
                "contention.processes", got=self.processes,
                expected=f"at least 1 for each of {len(self.host)} ranks",
            )  # fmt: skip


class Simulator:
    """A schedule made ready to be timed many times (resampled costs, jitter).

    Args:
        schedule: what runs.
        contention: measured slowdown between ranks of one host; none if left out.
        capacities: places in a ``shared:`` queue, by its name; 1 if left out.

    Raises:
        SpecError: contention that does not describe these ranks, an action in two shared queues, a
            queue without a place.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        contention: Contention | None = None,
        capacities: Mapping[str, int] | None = None,
    ) -> None:
        self.schedule = schedule
        count = len(schedule)
        # Actions are numbered anew, rank by rank: how the lists of the ranks were interleaved while
        # the schedule was built must not decide who is served first.
        self._order = np.argsort(schedule.rank, kind="stable")
        self._unit = _units(schedule.rendezvous[self._order])
        source, target, self._shared, self._capacity = _edges(
            schedule, self._order, self._unit, capacities or {}
        )
        self._source, self._target = self._unit[source], self._unit[target]
        self._indegree = np.bincount(self._target, minlength=count).astype(np.int64)
        self._own = self._unit == np.arange(count)
        self._joined = not bool(self._own.all())
        self._events = contention is not None or bool((self._shared >= 0).any())
        if self._events:  # successors in their order, for the same reason
            _, sort = successors(self._target, np.arange(len(self._target)), count)
            self._source, self._target = self._source[sort], self._target[sort]
        self._edge_start, self._edge_target = successors(self._source, self._target, count)
        self._domain = np.full(count, -1, dtype=np.int64)
        self._slowdown = np.array([1.0, 1.0])
        self._pressure = schedule.pressure[self._order]
        self._dag_order: IntArray | None = None  # once it is asked for makespans alone
        self._load = self._pressure  # what an action adds to its host's
        if contention is not None:
            if len(contention.host) != schedule.ranks:
                raise SpecError(
                    "contention.host",
                    got=len(contention.host),
                    expected=f"one host for each of {schedule.ranks} ranks",
                )
            host = np.asarray(contention.host, dtype=np.int64)
            self._domain = host[schedule.rank[self._order]]
            self._slowdown = np.asarray(contention.slowdown, dtype=np.float64)
            if contention.processes:
                processes = np.asarray(contention.processes, dtype=np.float64)
                self._load = self._pressure * processes[schedule.rank[self._order]]

    def run(self, duration: FloatArray) -> Timeline:
        """Time every action.

        Args:
            duration: seconds of each action, shape ``(len(schedule),)``.

        Raises:
            SpecError: a duration that is no time, or the schedule deadlocks; names who waits for
                whom.
        """
        order, unit = self._order, self._unit
        start, end, binding = self._times(duration)
        begin, finish, released = (np.empty(len(order), t) for t in (float, float, np.int64))
        begin[order], finish[order] = start[unit], end[unit]
        released[order] = np.where(binding >= 0, order[binding], -1)[unit]
        return Timeline(self.schedule, begin, finish, released, kind="simulated")

    def makespan_s(self, duration: FloatArray) -> float:
        """End of the last action, without a timeline; arguments and errors are those of `run`."""
        if self._events:
            return float(self._times(duration)[1].max(initial=0.0))
        length = self._length(duration)
        if self._dag_order is None:
            self._dag_order = dag_order(self._edge_start, self._edge_target, self._indegree)
        if len(self._dag_order) < len(length):
            self._times(duration)  # which says who waits for whom
        return float(dag_end(length, self._edge_start, self._edge_target, self._dag_order))

    def _times(self, duration: FloatArray) -> tuple[FloatArray, FloatArray, IntArray]:
        """Start, end and binding predecessor of every unit, numbered rank by rank."""
        length, indegree = self._length(duration), self._indegree.copy()
        if self._events:
            start, end, binding, ran = run_events(
                length, self._edge_start, self._edge_target, indegree, self._shared,
                self._capacity, self._domain, self._pressure, self._load, self._slowdown,
                int(self._domain.max(initial=0)) + 1,
            )  # fmt: skip
        else:
            start, end, binding, ran = run_dag(
                length, self._edge_start, self._edge_target, indegree
            )
        if ran < len(length):
            raise self._deadlock(indegree)
        return start, end, binding

    def _length(self, duration: FloatArray) -> FloatArray:
        """Checked durations of the units: of a rendezvous its longest, 0 of what is no unit."""
        schedule, order, unit = self.schedule, self._order, self._unit
        count = len(schedule)
        if duration.shape != (count,):
            raise SpecError("duration", got=duration.shape, expected=f"one for each of {count}")
        wrong = ~(np.isfinite(duration) & (duration >= 0.0))
        if wrong.any():
            i = int(np.argmax(wrong))
            raise SpecError(
                f"duration of {schedule[i].label} on rank {schedule.rank[i]}",
                got=float(duration[i]), expected="a time of at least 0",
            )  # fmt: skip
        length: FloatArray = duration[order]
        if self._joined:
            longest = np.zeros(count)
            np.maximum.at(longest, unit, length)
            length = np.where(self._own, longest, 0.0)
        return length

    def _deadlock(self, indegree: IntArray) -> SpecError:
        """What each stuck rank waits for; ``indegree`` is what each unit still waited for."""
        schedule, order = self.schedule, self._order
        stuck = indegree > 0
        waits: list[str] = []
        for rank in range(schedule.ranks):
            mine = np.flatnonzero(stuck[self._unit] & (schedule.rank[order] == rank))
            if not mine.size:
                continue
            needed = self._source[self._target == self._unit[mine[0]]]
            needed = order[needed[stuck[needed]]]
            text = f"rank {rank} at {schedule[order[mine[0]]].label}"
            if needed.size:
                # What another rank owes says more than what waits behind it on the same rank.
                other = min(needed, key=lambda i: (schedule.rank[i] == rank, i))
                text += f" waits for {schedule[other].label} of rank {schedule.rank[other]}"
            waits.append(text)
        more = [f"{len(waits) - 4} more ranks"] if len(waits) > 4 else []
        return SpecError(
            "schedule: " + ", ".join(waits[:4] + more),
            got="a deadlock",
            expected="an order in which every action can start",
        )


def simulate(
    schedule: Schedule,
    costs: CostBook | Mapping[Work, float],
    *,
    contention: Contention | None = None,
    capacities: Mapping[str, int] | None = None,
) -> Timeline:
    """Time every action of a schedule once; see `Simulator` for the arguments.

    Args:
        schedule: what runs.
        costs: prices each action's work on its rank's device, or plain seconds by work.
        contention: measured slowdown between ranks of one host.
        capacities: places in a ``shared:`` queue, by its name.

    Returns:
        Start and end of every action in seconds, the first start at 0.

    Raises:
        MissingDataError: a work has no price.
        SpecError: the schedule deadlocks; names who waits for whom.
    """
    simulator = Simulator(schedule, contention=contention, capacities=capacities)
    return simulator.run(durations(schedule, costs))


def durations(schedule: Schedule, costs: CostBook | Mapping[Work, float]) -> FloatArray:
    """Price of every action in seconds; each distinct (work, device) is priced once.

    Raises:
        MissingDataError: a work has no price.
    """
    names = sorted(set(schedule.devices))
    device = np.asarray([names.index(d) for d in schedule.devices], dtype=np.int64)
    key = schedule.work * len(names) + device[schedule.rank]
    table = np.zeros(len(schedule.works) * len(names))
    for code in np.flatnonzero(np.bincount(key, minlength=len(table))):
        work = schedule.works[code // len(names)]
        if isinstance(costs, CostBook):
            table[code] = costs.cost(work, names[code % len(names)]).mean_s
        elif work in costs:
            table[code] = costs[work]
        else:
            raise MissingDataError(f"no cost for {work}", fix="give its seconds")
    priced: FloatArray = table[key]
    return priced


def _units(rendezvous: IntArray) -> IntArray:
    """Index of the first action of each action's rendezvous; its own where it has none."""
    unit = np.arange(len(rendezvous))
    meeting = np.flatnonzero(rendezvous >= 0)
    if meeting.size:
        _, first, inverse = np.unique(rendezvous[meeting], return_index=True, return_inverse=True)
        unit[meeting] = meeting[first][inverse]
    return unit


def _edges(
    schedule: Schedule, order: IntArray, unit: IntArray, capacities: Mapping[str, int]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """What precedes what (dependencies and queues of ranks), and the shared queue of each unit.

    Returns:
        Sources and targets of edges, each unit's shared queue or -1, and the queues' capacities;
        actions numbered as in ``order``.
    """
    count, names = len(schedule), schedule.resources
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    owner = place[np.repeat(np.arange(count), np.diff(schedule.dependency_start))]

    # One entry for each (action, resource).
    members = np.asarray([r for s in schedule.resource_sets for r in s], dtype=np.int64)
    sizes = np.asarray([len(s) for s in schedule.resource_sets], dtype=np.int64)
    chosen = schedule.resource_set[order]
    ends = np.cumsum(sizes[chosen])
    user = np.repeat(np.arange(count), sizes[chosen])
    first = (np.cumsum(sizes) - sizes)[chosen]
    resource = members[np.arange(len(user)) - (ends - sizes[chosen])[user] + first[user]]

    is_shared = np.asarray([name.startswith(SHARED_PREFIX) for name in names], dtype=bool)
    queued = is_shared[resource]
    shared = np.full(count, -1, dtype=np.int64)
    shared[unit[user[queued]]] = resource[queued]
    twice = shared[unit[user[queued]]] != resource[queued]
    if twice.any():
        name = names[resource[queued][np.argmax(twice)]]
        raise SpecError("action.resources", got=name, expected="one shared queue an action")
    capacity = np.asarray([capacities.get(name, 1) for name in names], dtype=np.int64)
    for name, places in zip(names, capacity, strict=True):
        if name.startswith(SHARED_PREFIX) and places < 1:
            raise SpecError(f"capacity of {name}", got=int(places), expected="at least 1")

    rank = schedule.rank[order][user]
    before, after = queue_edges(
        (rank * len(names) + resource)[~queued], user[~queued], schedule.ranks * len(names)
    )
    return (
        np.concatenate((place[schedule.dependency], before)),
        np.concatenate((owner, after)),
        shared,
        capacity,
    )
