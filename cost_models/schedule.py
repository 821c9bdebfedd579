"""`Schedule`: per rank an ordered list of `Action`; simulated, executed, drawn and exported as is.

Semantics, the same for the simulator and for the runtime of ``planner/verify``:

- An action starts when every action it depends on has ended, and when every earlier action of its
  rank that shares one of its *resources* has ended. So a resource of a rank (``compute``,
  ``send:1``) is a queue served in list order; actions without a common resource may overlap.
- Actions that carry the same *rendezvous* number (a collective, one action a rank) start together,
  when all of them could.
- A resource that starts with ``shared:`` is one queue for all ranks, served in the order in which
  actions become ready (a link tier, a disk); at one moment, lower ranks and then earlier places in
  the rank's list go first.
- ``memory`` allocates at the start and frees at the end of the action.

Storage is by column, so that schedules with millions of actions stay cheap; `Action` is the view
of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.costs import Work
from foreplan.errors import SpecError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

COMPUTE = "compute"
#: Queue of the host that issues what a device runs.
HOST = "host"
SHARED_PREFIX = "shared:"
#: Most actions of a schedule: half a kilobyte each while it is built.
MOST_ACTIONS = 2_000_000


def refuse_long(actions: int) -> None:
    """Refuse a schedule of so many actions, best before any is built.

    Raises:
        SpecError: more than `MOST_ACTIONS`.
    """
    if actions > MOST_ACTIONS:
        raise SpecError(
            "schedule", got=f"more than {MOST_ACTIONS} actions", expected="fewer",
            fix="larger micro-batches, or fewer of them (samples, tokens, steps)",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that an action allocates when it starts and frees when it ends.

    Attributes:
        item: line of the ledger (``activations``, ``kv_cache``).
        allocate_bytes: taken at the start.
        free_bytes: given back at the end, also of what earlier actions took.
    """

    item: str
    allocate_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    Attributes:
        op: what it is to the planner's kernels (``F``, ``prefill``, ``send``, ``recv``); the words
            ``send``, ``recv`` and the collectives' names are executed by the runtime itself.
        rank: who runs it.
        work: what it costs, priced on the rank's device.
        stage: pipeline stage or model chunk, -1 where it has none.
        microbatch: -1 where it has none.
        step: token or training step, -1 where it has none.
        peer: other rank of a send or receive, -1 otherwise.
        dependencies: indices of earlier actions of the schedule, of any rank.
        resources: queues it occupies; () overlaps with everything (a pure delay).
        memory: what it does to the ledger.
        rendezvous: number shared by the actions of one collective, -1 for none.
        pressure: share of its time that is bound by memory bandwidth, 0..1; what it suffers when
            other ranks of its host run at the same time (measured contention).
    """

    op: str
    rank: int
    work: Work
    stage: int = -1
    microbatch: int = -1
    step: int = -1
    peer: int = -1
    dependencies: tuple[int, ...] = ()
    resources: tuple[str, ...] = (COMPUTE,)
    memory: Memory | None = None
    rendezvous: int = -1
    pressure: float = 0.0

    @property
    def label(self) -> str:
        """Short name in drawings, as PyTorch writes schedules: ``<stage><op><batch>``."""
        text = f"{self.stage if self.stage >= 0 else ''}{self.op}"
        if self.microbatch >= 0:
            text += str(self.microbatch)
        return text if self.step < 0 else f"{text}.{self.step}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """An immutable schedule; make one with `ScheduleBuilder`.

    Attributes:
        devices: device name of each rank.
        works: the distinct works; ``work`` indexes them.
        resources: the distinct resource names; ``resource_sets`` lists sets of their indices.
        rank, op, work, stage, microbatch, step, peer, rendezvous, resource_set: one int per action.
        pressure: one float per action.
        dependency_start, dependency: dependencies in compressed rows.
        memory_item: index into ``items`` or -1; allocate_bytes, free_bytes: one int per action.
    """

    devices: tuple[str, ...]
    works: tuple[Work, ...]
    ops: tuple[str, ...]
    items: tuple[str, ...]
    resources: tuple[str, ...]
    resource_sets: tuple[tuple[int, ...], ...]
    rank: IntArray
    op: IntArray
    work: IntArray
    stage: IntArray
    microbatch: IntArray
    step: IntArray
    peer: IntArray
    rendezvous: IntArray
    resource_set: IntArray
    pressure: FloatArray
    dependency_start: IntArray
    dependency: IntArray
    memory_item: IntArray
    allocate_bytes: IntArray
    free_bytes: IntArray
    notes: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def __getitem__(self, index: int) -> Action:
        i = range(len(self))[index]
        item = int(self.memory_item[i])
        memory = None
        if item >= 0:
            memory = Memory(self.items[item], int(self.allocate_bytes[i]), int(self.free_bytes[i]))
        first, last = int(self.dependency_start[i]), int(self.dependency_start[i + 1])
        return Action(
            op=self.ops[self.op[i]],
            rank=int(self.rank[i]),
            work=self.works[self.work[i]],
            stage=int(self.stage[i]),
            microbatch=int(self.microbatch[i]),
            step=int(self.step[i]),
            peer=int(self.peer[i]),
            dependencies=tuple(int(d) for d in self.dependency[first:last]),
            resources=tuple(self.resources[r] for r in self.resource_sets[self.resource_set[i]]),
            memory=memory,
            rendezvous=int(self.rendezvous[i]),
            pressure=float(self.pressure[i]),
        )

    def __iter__(self) -> Iterator[Action]:
        return (self[i] for i in range(len(self)))

    def of_rank(self, rank: int) -> list[int]:
        """Indices of the actions of one rank, in its order."""
        return [int(i) for i in np.flatnonzero(self.rank == rank)]


#: Columns of a builder's rows.
_OP, _WORK, _STAGE, _STEP, _RENDEZVOUS, _WIDTH = 1, 2, 3, 5, 7, 12


@dataclass(frozen=True, slots=True)
class _Columns:
    """Actions of a builder as arrays.

    Attributes:
        rows: one int a column of `Schedule`, in the order in which `ScheduleBuilder.add` puts them.
        pressure: one float per action.
        dependency: dependencies of all actions, one after another.
        dependencies: how many of them each action has.
    """

    rows: IntArray = field(default_factory=lambda: np.zeros((0, _WIDTH), dtype=np.int64))
    pressure: FloatArray = field(default_factory=lambda: np.zeros(0))
    dependency: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    dependencies: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def followed(
        self, rows: IntArray, pressure: FloatArray, dependency: IntArray, dependencies: IntArray
    ) -> _Columns:
        """These actions and then others."""
        return _Columns(
            np.concatenate((self.rows, rows)),
            np.concatenate((self.pressure, pressure)),
            np.concatenate((self.dependency, dependency)),
            np.concatenate((self.dependencies, dependencies)),
        )


class ScheduleBuilder:
    """Collects actions; the order of `add` is the order of each rank's list.

    Args:
        devices: device name of each rank.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        if not devices:
            raise SpecError("schedule.devices", got=list(devices), expected="at least one rank")
        self._devices = tuple(devices)
        self._works: dict[Work, int] = {}
        self._work_by_id: dict[int, int] = {}
        self._ops: dict[str, int] = {}
        self._items: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._sets: dict[tuple[str, ...], int] = {}
        self._done = _Columns()
        self._rows: list[tuple[int, ...]] = []
        self._pressure: list[float] = []
        self._dependency: list[int] = []
        self._dependencies: list[int] = []

    def __len__(self) -> int:
        return len(self._done.rows) + len(self._rows)

    def add(
        self,
        op: str,
        rank: int,
        work: Work,
        *,
        stage: int = -1,
        microbatch: int = -1,
        step: int = -1,
        peer: int = -1,
        dependencies: Sequence[int] = (),
        resources: tuple[str, ...] = (COMPUTE,),
        memory: Memory | None = None,
        rendezvous: int = -1,
        pressure: float = 0.0,
    ) -> int:
        """Append an action to its rank's list; see `Action` for the fields.

        Returns:
            The action's index. Dependencies may name actions that are added later.

        Raises:
            SpecError: more than `MOST_ACTIONS`.
        """
        refuse_long(len(self) + 1)
        item, allocate, free = -1, 0, 0
        if memory is not None:
            item = self._items.setdefault(memory.item, len(self._items))
            allocate, free = memory.allocate_bytes, memory.free_bytes
        self._rows.append(
            (
                rank,
                self._ops.setdefault(op, len(self._ops)),
                self._work_index(work),
                stage,
                microbatch,
                step,
                peer,
                rendezvous,
                self._sets.setdefault(resources, len(self._sets)),
                item,
                allocate,
                free,
            )
        )
        self._pressure.append(pressure)
        self._dependency.extend(dependencies)
        self._dependencies.append(len(dependencies))
        return len(self) - 1

    def repeat(self, begin: int, op: str, works: Sequence[Mapping[int, Work]]) -> None:
        """Append the actions from ``begin`` on once for each of ``works``, as `add` would.

        A copy is one step later than what it is a copy of, meets in rendezvous of its own, and
        depends on the actions that stand as far before it as those of the original do.

        Args:
            begin: first of the actions to repeat.
            op: of the actions whose work differs from copy to copy.
            works: of each copy, the work of these actions by stage; of the same stages in all of
                them.

        Raises:
            SpecError: more than `MOST_ACTIONS`.
        """
        size, copies = len(self) - begin, len(works)
        refuse_long(len(self) + size * copies)
        if not size or not copies:
            return
        done = self._frozen()
        rows = np.tile(done.rows[begin:], (copies, 1))
        later = np.repeat(np.arange(1, copies + 1), size)
        rows[:, _STEP] += later
        meets = rows[:, _RENDEZVOUS] >= 0
        if meets.any():
            numbers = rows[meets, _RENDEZVOUS]
            rows[meets, _RENDEZVOUS] += later[meets] * (numbers.max() - numbers.min() + 1)
        own = np.flatnonzero(
            (rows[:, _OP] == self._ops.get(op, -1)) & np.isin(rows[:, _STAGE], list(works[0]))
        )
        stages, first, slot = np.unique(rows[own, _STAGE], return_index=True, return_inverse=True)
        indices = np.zeros((copies, len(stages)), dtype=np.int64)
        for copy, by_stage in enumerate(works):
            for place in np.argsort(first).tolist():  # as they would be added
                indices[copy, place] = self._work_index(by_stage[int(stages[place])])
        rows[own, _WORK] = indices[later[own] - 1, slot]
        taken = int(done.dependencies[:begin].sum())
        needed = len(done.dependency) - taken
        self._done = done.followed(
            rows,
            np.tile(done.pressure[begin:], copies),
            np.tile(done.dependency[taken:], copies)
            + size * np.repeat(np.arange(1, copies + 1), needed),
            np.tile(done.dependencies[begin:], copies),
        )

    def _frozen(self) -> _Columns:
        """All actions so far."""
        self._done = self._done.followed(
            np.asarray(self._rows, dtype=np.int64).reshape(-1, _WIDTH),
            np.asarray(self._pressure, dtype=np.float64),
            np.asarray(self._dependency, dtype=np.int64),
            np.asarray(self._dependencies, dtype=np.int64),
        )
        self._rows, self._pressure, self._dependency, self._dependencies = [], [], [], []
        return self._done

    def build(self, notes: Mapping[str, str] | None = None) -> Schedule:
        """Check and freeze.

        Raises:
            SpecError: an unknown rank, a dependency on itself or on an action that does not exist,
                a rank twice in a rendezvous, a pressure outside 0..1.
        """
        done = self._frozen()
        rows, dependency, pressure = done.rows, done.dependency, done.pressure
        count = len(rows)
        start = np.concatenate(([0], np.cumsum(done.dependencies)))
        owner = np.repeat(np.arange(count), done.dependencies)
        _refuse_any(
            "schedule.rank", rows[:, 0], (rows[:, 0] < 0) | (rows[:, 0] >= len(self._devices)),
            f"a rank of 0..{len(self._devices) - 1}",
        )  # fmt: skip
        _refuse_any(
            "schedule.dependencies", dependency,
            (dependency < 0) | (dependency >= count) | (dependency == owner),
            f"other actions of 0..{count - 1}",
        )  # fmt: skip
        _refuse_any("schedule.pressure", pressure, ~((pressure >= 0.0) & (pressure <= 1.0)), "0..1")
        meeting = rows[rows[:, _RENDEZVOUS] >= 0]
        number = meeting[:, _RENDEZVOUS] * len(self._devices) + meeting[:, 0]
        _, times = np.unique(number, return_counts=True)
        _refuse_any("schedule.rendezvous", times, times > 1, "one action of a rank in a rendezvous")
        for name in self._sets:
            for resource in name:
                self._resources.setdefault(resource, len(self._resources))
        columns = [np.ascontiguousarray(rows[:, c]) for c in range(_WIDTH)]
        return Schedule(
            devices=self._devices,
            works=tuple(self._works),
            ops=tuple(self._ops),
            items=tuple(self._items),
            resources=tuple(self._resources),
            resource_sets=tuple(tuple(self._resources[r] for r in name) for name in self._sets),
            rank=columns[0],
            op=columns[1],
            work=columns[2],
            stage=columns[3],
            microbatch=columns[4],
            step=columns[5],
            peer=columns[6],
            rendezvous=columns[7],
            resource_set=columns[8],
            memory_item=columns[9],
            allocate_bytes=columns[10],
            free_bytes=columns[11],
            pressure=pressure,
            dependency_start=start,
            dependency=dependency,
            notes=dict(notes or {}),
        )

    def _work_index(self, work: Work) -> int:
        # Segments are long tuples: hashing one for every action would dominate, so the object's
        # identity is tried first; ``_works`` keeps the first of equal works alive, so that its
        # identity stays its own.
        known = self._work_by_id.get(id(work))
        if known is None:
            new = len(self._works)
            known = self._works.setdefault(work, new)
            if known == new:
                self._work_by_id[id(work)] = new
        return known


def _refuse_any(where: str, values: npt.NDArray[Any], wrong: Any, expected: str) -> None:
    """Raise `SpecError` for the first wrong value."""
    if wrong.any():
        raise SpecError(where, got=values[np.argmax(wrong)].item(), expected=expected)
