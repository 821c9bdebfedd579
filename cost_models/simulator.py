"""Event simulator: a `Schedule` and prices in, a `Timeline` out.

Everything a planner claims about time goes through `simulate`; the same schedule is then executed
and its measured `Timeline` compared. Rules of time are those of ``schedule.py``. Resources of a
rank are queues in list order, so without shared queues and contention the schedule is a DAG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models._event_loop import queue_edges, run_dag, run_events, successors
from foreplan.cost_models.costs import CostBook, Work
from foreplan.cost_models.schedule import SHARED_PREFIX, FloatArray, IntArray, Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError


@dataclass(frozen=True, slots=True)
class Contention:
    """How ranks of one host slow each other down.

    Attributes:
        host: host of each rank, as small integers; ranks of unlike hosts never contend.
        slowdown: factor on memory-bound time while 0, 1, 2, ... other memory-bound ranks of the
            host run; the first is 1. Linear between and beyond the entries.
    """

    host: tuple[int, ...]
    slowdown: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.slowdown) < 2 or self.slowdown[0] != 1.0 or min(self.slowdown) < 1.0:
            raise SpecError(
                "contention.slowdown", got=self.slowdown, expected="1.0 and then factors >= 1"
            )


class Simulator:
    """A schedule made ready to be timed many times (resampled costs, jitter).

    Args:
        schedule: what runs.
        contention: measured slowdown between ranks of one host; none if left out.
        capacities: places in a ``shared:`` queue, by its name; 1 if left out.

    Raises:
        SpecError: contention that does not describe these ranks, an action in two shared queues.
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
        self._unit = _units(schedule)
        self._source, self._target, self._shared, self._capacity = _edges(
            schedule, self._unit, capacities or {}
        )
        own_source, own_target = self._unit[self._source], self._unit[self._target]
        self._edge_start, self._edge_target = successors(own_source, own_target, count)
        self._indegree = np.bincount(own_target, minlength=count).astype(np.int64)
        self._own = self._unit == np.arange(count)
        self._joined = not bool(self._own.all())
        self._events = contention is not None or bool((self._shared >= 0).any())
        self._domain = np.full(count, -1, dtype=np.int64)
        self._slowdown = np.array([1.0, 1.0])
        if contention is not None:
            if len(contention.host) != schedule.ranks:
                raise SpecError(
                    "contention.host",
                    got=len(contention.host),
                    expected=f"one host for each of {schedule.ranks} ranks",
                )
            self._domain = np.asarray(contention.host, dtype=np.int64)[schedule.rank]
            self._slowdown = np.asarray(contention.slowdown, dtype=np.float64)

    def run(self, duration: FloatArray) -> Timeline:
        """Time every action.

        Args:
            duration: seconds of each action, shape ``(len(schedule),)``.

        Raises:
            SpecError: the schedule deadlocks; names who waits for whom.
        """
        count = len(self.schedule)
        unit_duration = duration
        if self._joined:
            unit_duration = duration.copy()
            np.maximum.at(unit_duration, self._unit, duration)
            unit_duration[~self._own] = 0.0
        indegree = self._indegree.copy()
        if self._events:
            start, end, binding, ran = run_events(
                unit_duration, self._edge_start, self._edge_target, indegree, self._shared,
                self._capacity, self._domain, self.schedule.pressure, self._slowdown,
                int(self._domain.max(initial=0)) + 1,
            )  # fmt: skip
        else:
            start, end, binding, ran = run_dag(
                unit_duration, self._edge_start, self._edge_target, indegree
            )
        if ran < count:
            raise _deadlock(self.schedule, self._unit, self._source, self._target, indegree)
        if self._joined:
            start, end, binding = start[self._unit], end[self._unit], binding[self._unit]
        return Timeline(self.schedule, start, end, binding, kind="simulated")


def simulate(
    schedule: Schedule,
    costs: CostBook | Mapping[Work, float],
    *,
    contention: Contention | None = None,
    capacities: Mapping[str, int] | None = None,
) -> Timeline:
    """Time every action of a schedule once; see `Simulator` for the arguments.

    Args:
        costs: prices each action's work on its rank's device, or plain seconds by work.

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
        else:
            table[code] = costs[work]
    priced: FloatArray = table[key]
    return priced


def _units(schedule: Schedule) -> IntArray:
    """Index of the first action of each action's rendezvous; its own where it has none."""
    unit = np.arange(len(schedule))
    meeting = np.flatnonzero(schedule.rendezvous >= 0)
    if meeting.size:
        _, first, inverse = np.unique(
            schedule.rendezvous[meeting], return_index=True, return_inverse=True
        )
        unit[meeting] = meeting[first][inverse]
    return unit


def _edges(
    schedule: Schedule, unit: IntArray, capacities: Mapping[str, int]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Precedence edges (dependencies and queues of ranks) and the shared queue of each unit."""
    count = len(schedule)
    owner = np.repeat(np.arange(count), np.diff(schedule.dependency_start))
    sources, targets = [schedule.dependency], [owner]
    shared = np.full(count, -1, dtype=np.int64)
    capacity: list[int] = []
    names = len(schedule.resources)
    keys: list[IntArray] = []
    owners: list[IntArray] = []
    place = {name: i for i, name in enumerate(schedule.resources)}
    for name, index in place.items():
        sets = [s for s, members in enumerate(schedule.resource_sets) if index in members]
        users = np.flatnonzero(np.isin(schedule.resource_set, sets))
        if name.startswith(SHARED_PREFIX):
            taken = unit[users]
            if bool((shared[taken] >= 0).any()):
                raise SpecError("action.resources", got=name, expected="one shared queue an action")
            shared[taken] = len(capacity)
            capacity.append(capacities.get(name, 1))
        else:
            keys.append(schedule.rank[users] * names + index)
            owners.append(users)
    if keys:
        key, user = np.concatenate(keys), np.concatenate(owners)
        before, after = queue_edges(key, user, schedule.ranks * names)
        sources.append(before)
        targets.append(after)
    limits = np.asarray(capacity or [1], dtype=np.int64)
    return np.concatenate(sources), np.concatenate(targets), shared, limits


def _deadlock(
    schedule: Schedule,
    unit: IntArray,
    source: IntArray,
    target: IntArray,
    indegree: IntArray,
) -> SpecError:
    """What each stuck rank waits for."""
    stuck = indegree[unit] > 0
    waits: list[str] = []
    for rank in range(schedule.ranks):
        mine = np.flatnonzero(stuck & (schedule.rank == rank))
        if not mine.size:
            continue
        head = int(mine[0])
        needed = source[(unit[target] == unit[head]) & stuck[source]]
        other = next((int(n) for n in needed if schedule.rank[n] != rank), None)
        other = int(needed[0]) if other is None and needed.size else other
        text = f"rank {rank} at {schedule[head].label}"
        if other is not None:
            text += f" waits for {schedule[other].label} of rank {schedule.rank[other]}"
        waits.append(text)
    shown: Sequence[str] = waits[:4] + ([f"{len(waits) - 4} more ranks"] if len(waits) > 4 else [])
    return SpecError(
        "schedule",
        got="a deadlock: " + ", ".join(shown),
        expected="an order in which every action can start",
    )
