"""`joint_schedule`: schedules that run beside each other on ranks of their own, as one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.cost_models.costs import Work
from foreplan.cost_models.schedule import MOST_ACTIONS, IntArray, Schedule
from foreplan.errors import SpecError


def joint_schedule(parts: Sequence[tuple[Schedule, int]]) -> Schedule:
    """Put schedules beside each other.

    Ranks are numbered on, part by part. Where a part runs several times, its actions without
    dependencies wait for those of their rank in the round before that nothing depends on, or for
    those of all ranks where their own has none. (A real run cannot wait for another rank: a part
    that ends on another rank sends word.)

    Args:
        parts: schedules and how many times in a row each runs.

    Returns:
        One schedule; actions part by part and round by round, each part's in its own order.

    Raises:
        SpecError: no part, or more than `MOST_ACTIONS` in all.
    """
    total = sum(len(schedule) * rounds for schedule, rounds in parts)
    if not parts or total > MOST_ACTIONS:
        raise SpecError("schedule", got=f"{total} actions", expected=f"1..{MOST_ACTIONS}")
    works: dict[Work, int] = {}
    ops: dict[str, int] = {}
    items: dict[str, int] = {}
    resources: dict[str, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    columns: dict[str, list[IntArray]] = {}
    pressure, starts, dependencies = [], [np.zeros(1, dtype=np.int64)], []
    devices: list[str] = []
    at = needed = meetings = 0
    for schedule, rounds in parts:
        names = [resources.setdefault(name, len(resources)) for name in schedule.resources]
        renamed = {
            "work": [works.setdefault(work, len(works)) for work in schedule.works],
            "op": [ops.setdefault(op, len(ops)) for op in schedule.ops],
            "resource_set": [
                sets.setdefault(tuple(names[r] for r in members), len(sets))
                for members in schedule.resource_sets
            ],
            "memory_item": [items.setdefault(item, len(items)) for item in schedule.items],
        }
        first = np.diff(schedule.dependency_start) == 0
        ends = np.setdiff1d(np.arange(len(schedule)), schedule.dependency)
        ends_of = {
            int(rank): own if len(own := ends[schedule.rank[ends] == rank]) else ends
            for rank in np.unique(schedule.rank[first])
        }
        for turn in range(rounds):
            for name, table in renamed.items():
                columns.setdefault(name, []).append(_renamed(getattr(schedule, name), table))
            for name in ("stage", "microbatch", "step", "allocate_bytes", "free_bytes"):
                columns.setdefault(name, []).append(getattr(schedule, name))
            columns.setdefault("rank", []).append(schedule.rank + len(devices))
            for name, shift in (("peer", len(devices)), ("rendezvous", meetings)):
                values = getattr(schedule, name)
                columns.setdefault(name, []).append(np.where(values >= 0, values + shift, values))
            pressure.append(schedule.pressure)
            own, offsets = schedule.dependency + at, schedule.dependency_start
            if turn:
                before = [ends_of[rank] for rank in schedule.rank[first]]
                sizes = np.zeros(len(schedule), dtype=np.int64)
                sizes[first] = [len(each) for each in before]
                last = np.concatenate(before) + at - len(schedule)
                own = np.insert(own, np.repeat(offsets[:-1], sizes), last)
                offsets = np.concatenate(([0], np.cumsum(np.diff(offsets) + sizes)))
            dependencies.append(own)
            starts.append(offsets[1:] + needed)
            at += len(schedule)
            needed += len(own)
            meetings += int(schedule.rendezvous.max(initial=-1)) + 1
        devices += schedule.devices
    joined: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    return Schedule(
        devices=tuple(devices), works=tuple(works), ops=tuple(ops), items=tuple(items),
        resources=tuple(resources), resource_sets=tuple(sets), pressure=np.concatenate(pressure),
        dependency_start=np.concatenate(starts), dependency=np.concatenate(dependencies), **joined,
    )  # fmt: skip


def _renamed(values: IntArray, table: list[int]) -> IntArray:
    """Indices into another table; -1 stays."""
    if not table:
        return values
    return np.where(values >= 0, np.asarray(table, dtype=np.int64)[values], values)
