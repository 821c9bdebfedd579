"""Lower bounds of the gap-filling problem, each by name.

All hold for every answer, whatever its map; ``path`` and ``fluid`` are implied by
``separate``, which costs more. None knows the cap.

- ``backbone`` (LB0): T.
- ``work`` (LB1): a resource of a device is occupied by the backbone, by pieces too short for any
  unit, and by the jobs of its pipeline; least maximum over all ways to share the jobs out, and the
  average over devices.
- ``path`` (LB2): ``max(F_1, e_f) + (B_N - F_1) + max(T - B_N, e_b)`` with the latencies ``e`` of
  one job, transfers included.
- ``fluid`` (LB3): before every deadline ``F_k`` the gaps have room for k jobs of fluid work, by
  stage and resource, and mirrored for the releases; least head and tail by bisection.
- ``separate`` (LB4): least head of the forwards alone plus least tail of the backwards alone (L3).

Source: the decomposition in the project's notes (bounds LB0-LB4).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from foreplan.solvers._gap_filler import BISECTIONS, least_head, place
from foreplan.solvers._gap_rows import Rows, reversed_problem
from foreplan.solvers.gap_fill_problem import FloatArray, GapFillProblem, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class GapFillBounds:
    """Lower bounds on ``total_s`` in seconds, see the module.

    Attributes:
        backbone_s: LB0.
        work_s: LB1.
        path_s: LB2.
        fluid_s: LB3.
        separate_s: LB4.
    """

    backbone_s: float
    work_s: float
    path_s: float
    fluid_s: float
    separate_s: float

    @property
    def best_s(self) -> float:
        """The largest of them."""
        return max(float(getattr(self, each.name)) for each in fields(self))

    @property
    def best_name(self) -> str:
        """Field of the largest, the first of equals."""
        return next(f.name for f in fields(self) if getattr(self, f.name) == self.best_s)

    def gap(self, total_s: float) -> float:
        """``(total - best) / best``, how far an answer may be from optimal."""
        return (total_s - self.best_s) / self.best_s


def lower_bounds(problem: GapFillProblem) -> GapFillBounds:
    """Every bound of an instance."""
    return bounds_and_ends(problem, Rows.of(problem), Rows.of(reversed_problem(problem)))[0]


def least_cap(problem: GapFillProblem) -> int:
    """Live jobs of some pipeline that no answer can avoid.

    At a deadline every forward up to its slot has ended. Backwards that even alone on the best
    pipeline end after it have not, and their jobs are live together, on all pipelines at best
    evenly.
    """
    if not (len(problem.forward) and len(problem.backward)):
        return 0
    rows = Rows.of(problem)
    way, done = rows.backward, np.full(problem.n_slots, np.inf)
    for j in range(problem.n_pipelines):
        pieces = rows.of_pipeline(j)
        for i, t in enumerate(problem.release_s + way.edge[j]):
            end = place(pieces, way, j, np.array([t]), rows.tolerance)[1][0, -1]
            done[i] = min(done[i], float(end))
    live = [
        int((done[: k + 1] > t + problem.tolerance_s).sum())
        for k, t in enumerate(problem.deadline_s)
    ]
    return -(-max(live) // problem.n_pipelines)


def bounds_and_ends(
    problem: GapFillProblem, rows: Rows, mirror: Rows
) -> tuple[GapFillBounds, float, float]:
    """The bounds, and a head and a tail at which each direction alone is feasible."""
    length = rows.length
    (head_low, head), (tail_low, tail) = least_head(rows), least_head(mirror)
    bounds = GapFillBounds(
        backbone_s=length,
        work_s=max(_forced_work(problem, rows), _average_work(problem, rows)),
        path_s=length + _path_head(rows) + _path_head(mirror),
        fluid_s=length + _fluid_head(rows) + _fluid_head(mirror),
        separate_s=length + head_low + tail_low,
    )
    return bounds, head, tail


def _path_head(rows: Rows) -> float:
    latency = float(rows.forward.job_s.min())
    return max(0.0, latency - float(rows.deadline[0])) if len(rows.forward.row) else 0.0


def _occupied(rows: Rows) -> tuple[FloatArray, FloatArray]:
    """``[M, 2 S]`` seconds no unit can use within [0, T], and seconds of work of one job."""
    shape = rows.first_piece.shape
    useless, job = np.zeros(shape), np.zeros(shape)
    for j, r in np.ndindex(shape):
        work = [
            way.work[j, way.row_units[way.row_first[r] : way.row_first[r + 1]]]
            for way in (rows.forward, rows.backward)
        ]
        units = np.concatenate(work)
        job[j, r] = units.sum()
        shortest = units.min(initial=np.inf)
        begin, end, room = _gaps(rows, j, r)
        # Time that a gap offers, not work: beside the other resource a unit takes longer, never
        # shorter. The first and the last gap are open and never too short.
        inside = np.minimum(end, rows.length) - np.maximum(begin, 0.0)
        usable = (room >= shortest - 10 * rows.tolerance) & (inside > 0)
        useless[j, r] = rows.length - float(inside[usable].sum())
    return useless, job


def _gaps(rows: Rows, j: int, r: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Start, end and room for work of each gap of a row."""
    first = rows.first_piece.ravel()
    at = j * rows.first_piece.shape[1] + r
    stop = int(first[at + 1]) if at + 1 < len(first) else len(rows.start)
    start, end, rate = (x[first[at] : stop] for x in (rows.start, rows.end, rows.rate))
    opens = np.flatnonzero(np.concatenate([[True], start[1:] != end[:-1]]))
    room = np.add.reduceat((end - start) * rate, opens)
    return start[opens], end[np.append(opens[1:], len(end)) - 1], room


def _forced_work(problem: GapFillProblem, rows: Rows) -> float:
    """Least maximum over pipelines of occupied time plus their jobs' work."""
    useless, job = _occupied(rows)
    counts, top = np.zeros(len(job)), rows.length
    for _ in range(problem.n_slots):
        after = (useless + (counts[:, None] + 1) * job).max(axis=1)
        j = int(np.argmin(after))
        counts[j] += 1
        top = max(top, float(after[j]))
    return top


def _average_work(problem: GapFillProblem, rows: Rows) -> float:
    """Average over devices, by resource, of the same."""
    useless, job = _occupied(rows)
    best = rows.length
    for r in Resource:
        used = job[:, r :: len(Resource)] > 0
        if used.any():
            least = float(job[:, r :: len(Resource)].sum(axis=1).min()) * problem.n_slots
            busy = float(useless[:, r :: len(Resource)][used].sum())
            best = max(best, (busy + least) / int(used.sum()))
    return best


def _fluid_head(rows: Rows) -> float:
    """Least head at which every deadline has room for the fluid work before it."""
    way = rows.forward
    if not len(way.row):
        return 0.0
    need = np.arange(1, len(rows.deadline) + 1)
    rooms = []
    for r in range(rows.first_piece.shape[1]):
        mine = way.row_units[way.row_first[r] : way.row_first[r + 1]]
        if len(mine):
            # What follows the row's last unit at the least until the backbone has the job.
            after = slice(int(mine.max()) + 1, None)
            rest = (way.work[:, after] + way.lag[:, after]).sum(axis=1) + way.edge
            work = way.work[:, mine].sum(axis=1)
            rooms.append(
                [
                    (_Room(rows, j, r), work[j], rows.deadline - rest[j] + 2 * rows.tolerance)
                    for j in range(len(work))
                ]
            )

    def fits(head: float) -> bool:
        for row in rooms:
            jobs = np.zeros(len(need))
            for room, work, by in row:
                jobs += np.maximum(room.until(by, head), 0.0) / work
            if (jobs < need * (1 - 1e-12)).any():
                return False
        return True

    if fits(0.0):
        return 0.0
    low, high = 0.0, float(way.job_s.max()) * len(need) + max(0.0, -float(rows.deadline[0]))
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


class _Room:
    """Work that a row's gaps have room for between ``-head`` and given times."""

    def __init__(self, rows: Rows, j: int, r: int) -> None:
        first = rows.first_piece.ravel()
        at = j * rows.first_piece.shape[1] + r
        stop = int(first[at + 1]) if at + 1 < len(first) else len(rows.start)
        self._start = rows.start[first[at] : stop]
        self._end, self._rate = (x[first[at] : stop] for x in (rows.end, rows.rate))
        inner = np.maximum(self._start, 0.0)
        work = (self._end[:-1] - inner[:-1]) * self._rate[:-1]
        self._before = np.concatenate([[0.0], np.cumsum(work)])
        self._inner = inner

    def until(self, t: FloatArray, head: float) -> FloatArray:
        at = np.maximum(np.searchsorted(self._start, t, side="right") - 1, 0)
        inside = (np.minimum(t, self._end[at]) - self._inner[at]) * self._rate[at]
        return np.asarray(self._before[at] + inside + head)
