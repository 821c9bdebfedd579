"""`Timeline`: when every action of a schedule ran, simulated or measured.

One type for both, so that prediction and measurement are drawn, compared and exported by the same
code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.schedule import COMPUTE, FloatArray, IntArray, Schedule
from foreplan.datasets.quantity import format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Exposure:
    """What one rank did with the step, in seconds.

    Attributes:
        compute_s: busy on its compute resource.
        communication_s: idle while a transfer it waited for was under way.
        bubble_s: idle for every other reason (dependencies, warm-up, cool-down).
    """

    compute_s: float
    communication_s: float
    bubble_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action, in seconds.

    Attributes:
        schedule: what ran.
        start_s, end_s: one value an action.
        binding: the action whose end let this one start, -1 for none or unknown.
        kind: ``simulated`` or ``measured``.
    """

    schedule: Schedule
    start_s: FloatArray
    end_s: FloatArray
    binding: IntArray
    kind: Literal["simulated", "measured"] = "simulated"

    @property
    def makespan_s(self) -> float:
        """Last end minus first start."""
        if not len(self.schedule):
            return 0.0
        return float(self.end_s.max() - self.start_s.min())

    def spans(self) -> list[tuple[float, float]]:
        """(first start, last end) of each rank's compute actions."""
        compute = self.is_compute
        result = []
        for rank in range(self.schedule.ranks):
            mine = compute & (self.schedule.rank == rank)
            if mine.any():
                result.append((float(self.start_s[mine].min()), float(self.end_s[mine].max())))
            else:
                result.append((0.0, 0.0))
        return result

    def busy_s(self) -> list[float]:
        """Compute time of each rank."""
        compute = self.is_compute
        length = np.where(compute, self.end_s - self.start_s, 0.0)
        sums = np.bincount(self.schedule.rank, weights=length, minlength=self.schedule.ranks)
        return [float(s) for s in sums]

    def total_s(self, op: str) -> FloatArray:
        """Summed duration of the actions called ``op``, by rank."""
        chosen = self.schedule.op == self._op(op)
        length = np.where(chosen, self.end_s - self.start_s, 0.0)
        sums = np.bincount(self.schedule.rank, weights=length, minlength=self.schedule.ranks)
        return sums.astype(np.float64)

    def exposure(self) -> list[Exposure]:
        """Where each rank's share of the whole makespan went.

        An idle interval before a compute action counts as communication as far as the transfer
        that released the action was under way, and as bubble otherwise; so does all of a rank that
        never computes. The three add up to the makespan on every rank.
        """
        compute, schedule = self.is_compute, self.schedule
        begin = float(self.start_s.min(initial=np.inf))
        # A receive ends when its send does: follow instant actions to the one that took time.
        instant = ~compute & (self.end_s <= self.start_s)
        cause = np.where(compute, self.binding, -1)
        while (passing := (cause >= 0) & instant[cause]).any():
            cause[passing] = self.binding[cause[passing]]
        result = []
        for rank in range(schedule.ranks):
            mine = np.flatnonzero(compute & (schedule.rank == rank))
            mine = mine[np.argsort(self.start_s[mine], kind="stable")]
            start, end, by = self.start_s[mine], self.end_s[mine], cause[mine]
            clock = np.maximum.accumulate(np.concatenate(([begin], end)))[:-1]
            gap = np.maximum(start - clock, 0.0)
            moved = np.minimum(self.end_s[by], start) - np.maximum(self.start_s[by], clock)
            waits = (gap > 0.0) & (by >= 0) & ~compute[by]
            communication = float(np.where(waits, np.clip(moved, 0.0, gap), 0.0).sum())
            busy = float((end - start).sum())
            rest = self.makespan_s - busy - communication
            result.append(Exposure(busy, communication, max(rest, 0.0)))
        return result

    def critical_path(self) -> list[int]:
        """Actions from the first start to the last end, each released by the one before it."""
        if not len(self.schedule):
            return []
        path = [int(np.argmax(self.end_s))]
        while self.binding[path[-1]] >= 0:
            path.append(int(self.binding[path[-1]]))
        return path[::-1]

    def peak_memory(self) -> list[dict[str, int]]:
        """For each rank the bytes by item at the moment of its highest total."""
        schedule = self.schedule
        peaks: list[dict[str, int]] = []
        for rank in range(schedule.ranks):
            mine = np.flatnonzero((schedule.rank == rank) & (schedule.memory_item >= 0))
            time = np.concatenate((self.start_s[mine], self.end_s[mine]))
            delta = np.concatenate((schedule.allocate_bytes[mine], -schedule.free_bytes[mine]))
            item = np.concatenate((schedule.memory_item[mine],) * 2)
            # At one moment what ends frees before what starts allocates, except that an action
            # without duration starts where its rank's list has it, and before it ends.
            is_end = np.repeat([0, 1], len(mine))
            instant = np.tile(self.end_s[mine] <= self.start_s[mine], 2)
            turn = np.where((is_end == 1) & ~instant, -1, np.tile(np.arange(len(mine)), 2))
            order = np.lexsort((is_end, turn, time))
            level = np.cumsum(delta[order])
            if not level.size:
                peaks.append({})
                continue
            upto = order[: int(np.argmax(level)) + 1]
            sums = np.bincount(item[upto], weights=delta[upto], minlength=len(schedule.items))
            peaks.append({name: int(sums[k]) for k, name in enumerate(schedule.items)})
        return peaks

    def to_frame(self) -> pd.DataFrame:
        """One row an action: rank, device, label, op, stage, microbatch, step, start_s, end_s."""
        import pandas as pd

        s = self.schedule
        return pd.DataFrame(
            {
                "rank": s.rank,
                "device": [s.devices[r] for r in s.rank],
                "label": [action.label for action in s],
                "op": [s.ops[o] for o in s.op],
                "stage": s.stage,
                "microbatch": s.microbatch,
                "step": s.step,
                "start_s": self.start_s,
                "end_s": self.end_s,
            }
        )

    def trace_events(self, *, process: int = 0, name: str | None = None) -> list[dict[str, Any]]:
        """Chrome trace events; what overlaps goes to threads of its own, so that events nest.

        Args:
            process: the trace's process number, to lay several timelines side by side.
            name: process name; the timeline's kind if left out.
        """
        s = self.schedule
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name or self.kind}}
        ]
        free_from: dict[tuple[int, str], list[float]] = {}  # of each thread of a lane
        threads: dict[tuple[int, str, int], int] = {}
        for i in np.lexsort((self.end_s, self.start_s)):
            action, start, end = s[int(i)], float(self.start_s[i]), float(self.end_s[i])
            lane = action.resources[0] if action.resources else "delay"
            free = free_from.setdefault((action.rank, lane), [])
            row = next((k for k, since in enumerate(free) if since <= start), len(free))
            if row == len(free):
                free.append(end)
                threads[action.rank, lane, row] = len(threads)
                label = f"rank {action.rank} {s.devices[action.rank]} {lane}"
                events.append(
                    {"ph": "M", "name": "thread_name", "pid": process, "tid": len(threads) - 1,
                     "args": {"name": f"{label} {row + 1}" if row else label}}
                )  # fmt: skip
            free[row] = end
            events.append(
                {
                    "ph": "X",
                    "name": action.label,
                    "cat": action.op,
                    "pid": process,
                    "tid": threads[action.rank, lane, row],
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
            )
        return events

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw a Gantt chart of the compute resources, one row a rank, time in milliseconds."""
        import matplotlib.pyplot as plt

        if axes is None:
            _, axes = plt.subplots(figsize=(10, 0.6 * self.schedule.ranks + 1.2))
        compute, s = self.is_compute, self.schedule
        for o, op in enumerate(s.ops):
            for rank in range(s.ranks):
                mine = np.flatnonzero(compute & (s.op == o) & (s.rank == rank))
                bars = [(self.start_s[i] * 1e3, (self.end_s[i] - self.start_s[i]) * 1e3)
                        for i in mine]  # fmt: skip
                if bars:
                    axes.broken_barh(
                        bars, (rank - 0.4, 0.8), facecolors=f"C{o % 10}", edgecolor="white",
                        linewidth=0.3, label=op if rank == min(s.rank[s.op == o]) else None,
                    )  # fmt: skip
        axes.set_yticks(range(s.ranks), [f"{r}: {d}" for r, d in enumerate(s.devices)])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{self.kind}: {format_seconds(self.makespan_s)}", loc="left")
        # Above the bars, not on them.
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize="small")
        return axes

    def __repr__(self) -> str:
        """One line, as a notebook's last line or ``print`` shows it."""
        return (
            f"<Timeline: {self.kind}, {format_seconds(self.makespan_s)}, {len(self.schedule)} "
            f"actions on {self.schedule.ranks} rank{'s' * (self.schedule.ranks != 1)}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{r}</td><td>{device}</td><td>{e.compute_s * 1e3:.4g}</td>"
            f"<td>{e.communication_s * 1e3:.4g}</td><td>{e.bubble_s * 1e3:.4g}</td></tr>"
            for r, (device, e) in enumerate(
                zip(self.schedule.devices, self.exposure(), strict=True)
            )
        )
        return (
            f"<p>{self.kind}: {self.makespan_s * 1e3:.4g} ms</p><table><tr><th>rank</th>"
            "<th>device</th><th>compute ms</th><th>communication ms</th><th>bubble ms</th></tr>"
            f"{rows}</table>"
        )

    @property
    def is_compute(self) -> npt.NDArray[np.bool_]:
        """Mask of actions that occupy their rank's compute resource."""
        s = self.schedule
        if COMPUTE not in s.resources:
            return np.zeros(len(s), dtype=bool)
        index = s.resources.index(COMPUTE)
        sets = [k for k, members in enumerate(s.resource_sets) if index in members]
        mask: npt.NDArray[np.bool_] = np.isin(s.resource_set, sets)
        return mask

    def _op(self, op: str) -> int:
        return self.schedule.ops.index(op) if op in self.schedule.ops else -1


def chrome_trace(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Several timelines as one Chrome trace (JSON text), each its own process."""
    events = [
        event
        for process, (name, timeline) in enumerate(timelines)
        for event in timeline.trace_events(process=process, name=name)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
