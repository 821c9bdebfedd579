"""`ScheduleBuilder`: collects the actions of a `Schedule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.costs import Work
from foreplan.cost_models.schedule import (
    COMPUTE,
    FloatArray,
    IntArray,
    Memory,
    Schedule,
    refuse_long,
)
from foreplan.errors import SpecError

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
