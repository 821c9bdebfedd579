"""`gantt_document`: a timeline as compact JSON for the page's drawing.

Columns instead of objects, whole numbers instead of floats: start (as difference to the action
before it in its lane) and duration in ticks of a ten-millionth of the run or less, so that an
action takes some twenty bytes. What a drawing of hundreds of thousands of actions cannot show
anyway is joined: neighbours of one lane become one block that says how many actions it stands for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.cost_models.schedule import COMPUTE, FloatArray, IntArray, Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.planner.report.text import plain

#: Actions of one timeline that a page holds; beyond it, neighbours are joined.
MOST = 50_000

LANES = ("compute", "transfers")

#: Gap in ticks from which on neighbours are joined whatever their op (F and B alternate for ever).
_ANY_OP = 1 << 16


def gantt_document(timeline: Timeline, most: int = MOST) -> dict[str, Any]:
    """Plain data for ``gantt.js``.

    Args:
        timeline: simulated or measured.
        most: actions to keep, about.

    Returns:
        ``tick_s``, ``makespan`` in ticks, ``ops``, and by rank and lane the columns ``start``
        (differences), ``length``, ``op``, ``stage``, ``microbatch``, ``step`` and ``count``; a
        column of equal values is that value. ``joined`` says whether neighbours were joined.
    """
    s = timeline.schedule
    zero = float(timeline.start_s.min(initial=math.inf)) if len(s) else 0.0
    tick = tick_of(timeline.makespan_s)
    lanes = [[_lane(timeline, rank, lane, zero, tick) for lane in LANES] for rank in range(s.ranks)]
    total = sum(len(columns["start"]) for rank in lanes for columns in rank)
    joined = total > most
    gap = 1
    while total > most and gap < 1 << 40:
        lanes = [[_join(columns, gap, gap < _ANY_OP) for columns in rank] for rank in lanes]
        total = sum(len(columns["start"]) for rank in lanes for columns in rank)
        gap *= 4
    return {
        "kind": timeline.kind,
        "tick_s": tick,
        "makespan": round(timeline.makespan_s / tick),
        "ops": [plain(op) for op in s.ops],
        "devices": [plain(device) for device in s.devices],
        "joined": joined,
        "ranks": [[_packed(columns) for columns in rank] for rank in lanes],
    }


def tick_of(makespan_s: float) -> float:
    """A power of ten of seconds, a ten-millionth of the run or less."""
    if not makespan_s > 0:
        return 1e-9
    return float(10.0 ** (math.floor(math.log10(makespan_s)) - 7))


def computes(schedule: Schedule) -> Any:
    """Mask of actions that occupy their rank's compute resource."""
    if COMPUTE not in schedule.resources:
        return np.zeros(len(schedule), dtype=bool)
    index = schedule.resources.index(COMPUTE)
    sets = [k for k, members in enumerate(schedule.resource_sets) if index in members]
    return np.isin(schedule.resource_set, sets)


def _lane(
    timeline: Timeline, rank: int, lane: str, zero: float, tick: float
) -> dict[str, IntArray]:
    """Columns of a rank's compute, or of its transfers that take time, by start."""
    s = timeline.schedule
    mine = (s.rank == rank) & (computes(s) == (lane == "compute"))
    if lane == "transfers":
        mine &= timeline.end_s > timeline.start_s
    index = np.flatnonzero(mine)
    index = index[np.lexsort((timeline.end_s[index], timeline.start_s[index]))]
    start = _ticks(timeline.start_s[index] - zero, tick)
    return {
        "start": start,
        "length": _ticks(timeline.end_s[index] - zero, tick) - start,
        "op": s.op[index],
        "stage": s.stage[index],
        "microbatch": s.microbatch[index],
        "step": s.step[index],
        "count": np.ones(len(index), dtype=np.int64),
    }


def _ticks(values: FloatArray, tick: float) -> IntArray:
    return np.round(values / tick).astype(np.int64)


def _join(columns: dict[str, IntArray], gap: int, same_op: bool) -> dict[str, IntArray]:
    """Join up to four neighbours (of one op) that are at most ``gap`` ticks apart."""
    start, end = columns["start"], columns["start"] + columns["length"]
    if len(start) < 2:
        return columns
    until = np.maximum.accumulate(end)
    apart = start[1:] - until[:-1] > gap
    if same_op:
        apart |= columns["op"][1:] != columns["op"][:-1]
    # Four at most in one pass, so that what remains is as even as the limit allows.
    first = np.concatenate(([True], apart | (np.arange(1, len(start)) % 4 == 0)))
    head = np.flatnonzero(first)
    joined = {name: column[head] for name, column in columns.items()}
    joined["length"] = np.maximum.reduceat(end, head) - joined["start"]
    joined["count"] = np.add.reduceat(columns["count"], head)
    return joined


def _packed(columns: dict[str, IntArray]) -> dict[str, Any]:
    start = columns["start"]
    packed: dict[str, Any] = {"start": np.diff(start, prepend=0).tolist()}
    for name, column in columns.items():
        if name == "start":
            continue
        same = len(column) > 0 and bool((column == column[0]).all())
        packed[name] = int(column[0]) if same else column.tolist()
    return packed


def busy_seconds(document: dict[str, Any], rank: int) -> float:
    """Compute time of a rank of a `gantt_document`, in seconds."""
    lane = document["ranks"][rank][0]
    length = lane["length"]
    ticks = length * len(lane["start"]) if isinstance(length, int) else sum(length)
    return float(ticks * document["tick_s"])
