"""`Filler`: one pipeline's units placed at a head, and the matching of slots to pipelines.

Given the map, pipelines do not meet: each fills its own devices, and only the longest head and the
longest tail count. ``Filler.fill`` is that one pipeline's answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from foreplan.solvers._gap_place import matched, merged, mirrored, place_jobs, without
from foreplan.solvers._gap_rows import Direction, Rows
from foreplan.solvers.gap_fill_problem import FloatArray, IntArray
from foreplan.solvers.gap_fill_score import GapFillAnswer

BISECTIONS = 50
"""Halvings of an interval of heads; the last are below the tolerance."""

Pieces = tuple[FloatArray, FloatArray, FloatArray, IntArray]


def least_head(rows: Rows) -> tuple[float, float]:
    """Bracket of the least head at which the forwards alone meet every deadline (L3).

    Feasibility is monotone in the head, hence bisection. Returns ``(low, high)``: a proven lower
    bound and a head that does.
    """
    if not len(rows.forward.row):
        return 0.0, 0.0
    work = float(rows.forward.job_s.max())

    def fits(head: float) -> bool:
        return merged_map(rows, head)[1] == len(rows.deadline)

    if fits(0.0):
        return 0.0, 0.0
    low, high = 0.0, max(work, work - float(rows.deadline[0]))
    while not fits(high):
        low, high = high, 2.0 * high
    for _ in range(BISECTIONS):
        if high - low <= 0.1 * rows.tolerance:
            break
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high


def merged_map(rows: Rows, head: float) -> tuple[IntArray, int]:
    """Map by order of completion at a head, and how many slots meet their deadline (L2)."""
    pipeline = np.zeros(len(rows.deadline), dtype=np.int64)
    way = rows.forward
    met = merged(
        rows.start, rows.end, rows.rate, rows.first_piece, way.row, way.work, way.lag, way.edge,
        head, rows.deadline, rows.most, rows.tolerance, pipeline,
    )  # fmt: skip
    return pipeline, int(met)


def place(
    pieces: Pieces, way: Direction, j: int, release: FloatArray, tolerance: float,
    hold: FloatArray | None = None, idle: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """``place_jobs`` on one pipeline, into new arrays ``[n, U]``."""
    begins = np.empty((len(release), len(way.row)))
    ends = np.empty_like(begins)
    hold = np.full(len(release), -np.inf) if hold is None else hold
    idle = np.full(len(pieces[3]), -np.inf) if idle is None else idle
    place_jobs(
        *pieces, way.row, way.work[j], way.lag[j], release, hold, tolerance, idle, begins, ends
    )
    return begins, ends


@dataclass(slots=True)
class Filled:
    """One pipeline's jobs; arrays ``[n, U]``.

    Attributes:
        forward_s, forward_end_s, backward_s, backward_end_s: starts and ends.
        late_s: seconds by which forwards miss their deadlines, summed.
        tail_s: end of the last unit beyond T.
    """

    forward_s: FloatArray
    forward_end_s: FloatArray
    backward_s: FloatArray
    backward_end_s: FloatArray
    late_s: float
    tail_s: float


@dataclass(slots=True)
class Incumbent:
    """Best answer so far."""

    head: float = math.inf
    total: float = math.inf
    pipeline: IntArray | None = None
    answer: GapFillAnswer | None = None


@dataclass(slots=True)
class Filler:
    """Forwards leftmost from a head on, then backwards in what they leave."""

    rows: Rows
    mirror: Rows
    """Rows of the reversed problem."""
    evaluations: int = 0
    """Passes over one pipeline's units, the unit of limits."""
    _left: dict[tuple[float, int, int], tuple[FloatArray, Pieces]] = field(default_factory=dict)
    _filled: dict[tuple[float, int, tuple[int, ...]], Filled] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop what was kept for other heads."""
        self._left.clear()
        self._filled.clear()

    def place(
        self, pieces: Pieces, way: Direction, j: int, release: FloatArray,
        hold: FloatArray | None = None, idle: FloatArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:  # fmt: skip
        """Starts and ends of jobs on a pipeline whose free pieces are given."""
        self.evaluations += 1
        return place(pieces, way, j, release, self.rows.tolerance, hold, idle)

    def fill(self, head: float, j: int, slots: tuple[int, ...]) -> Filled:
        """The jobs of some slots on one pipeline."""
        key = (head, j, slots)
        if key not in self._filled:
            order = np.array(slots, dtype=np.int64)
            capped = 0 < self.rows.cap < len(slots)
            fill = self._fill_capped if capped else self._fill_free
            self._filled[key] = fill(head, j, order)
        return self._filled[key]

    def _release(self, j: int, slots: IntArray) -> FloatArray:
        return np.asarray(self.rows.release[slots] + self.rows.backward.edge[j])

    def _fill_free(self, head: float, j: int, slots: IntArray) -> Filled:
        rows = self.rows
        pieces = rows.of_pipeline(j)
        begins, ends = self.place(pieces, rows.forward, j, np.full(len(slots), -head))
        left = _without(pieces, rows.forward, begins, ends)
        back, back_ends = self.place(left, rows.backward, j, self._release(j, slots))
        return self._score(j, slots, begins, ends, back, back_ends)

    def _fill_capped(self, head: float, j: int, slots: IntArray) -> Filled:
        """Job by job, with the cap: a forward ends when the backward ``cap`` jobs before has."""
        rows, n = self.rows, len(slots)
        ways = (rows.forward, rows.backward)
        begins = [np.empty((n, len(way.row))) for way in ways]
        ends = [np.empty((n, len(way.row))) for way in ways]
        pieces = rows.of_pipeline(j)
        ready = [np.full(2 * self.rows.first_piece.shape[1], -np.inf) for _ in ways]
        release = [np.full(n, -head), self._release(j, slots)]
        # Forwards first, until the cap leaves no choice.
        order = [(0, q) for q in range(rows.cap)]
        for q in range(n):
            order += [(1, q)] + ([(0, q + rows.cap)] if q + rows.cap < n else [])
        for side, q in order:
            way, hold = ways[side], -math.inf
            if side == 0 and q >= rows.cap:
                hold = float(ends[1][q - rows.cap, -1])
            first = float(release[side][q])
            if side == 1:
                first = max(first, float(ends[0][q, -1]))
            begin, end = self.place(
                pieces, way, j, np.array([first]), np.array([hold]), ready[side]
            )
            begins[side][q], ends[side][q] = begin[0], end[0]
            pieces = _without(pieces, way, begin, end)
        return self._score(j, slots, begins[0], ends[0], begins[1], ends[1])

    def _score(
        self, j: int, slots: IntArray, begins: FloatArray, ends: FloatArray,
        back: FloatArray, back_ends: FloatArray,
    ) -> Filled:  # fmt: skip
        late = 0.0
        if ends.size:
            missed = ends[:, -1] + self.rows.forward.edge[j] - self.rows.deadline[slots]
            late = float(np.where(missed > 2 * self.rows.tolerance, missed, 0.0).sum())
        last = max(float(x.max(initial=self.rows.length)) for x in (ends, back_ends))
        return Filled(begins, ends, back, back_ends, late, last - self.rows.length)

    def score(self, head: float, pipeline: IntArray) -> tuple[float, float]:
        """Lateness and total of a map at a head."""
        parts = [self.fill(head, j, slots) for j, slots in self.slots(pipeline)]
        head_s = max(
            [0.0] + [-float(x.min()) for p in parts for x in (p.forward_s, p.backward_s) if x.size]
        )
        tail = max(part.tail_s for part in parts)
        return sum(part.late_s for part in parts), head_s + self.rows.length + tail

    def slots(self, pipeline: IntArray) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Slots of each pipeline that has some."""
        for j in range(len(self.rows.first_piece)):
            mine = np.flatnonzero(pipeline == j)
            if len(mine):
                yield j, tuple(mine.tolist())

    def answer(self, head: float, pipeline: IntArray) -> GapFillAnswer:
        """The placement behind ``score``."""
        starts = [np.empty((len(pipeline), len(w.row))) for w in self._ways]
        for j, slots in self.slots(pipeline):
            part = self.fill(head, j, slots)
            starts[0][list(slots)] = part.forward_s
            starts[1][list(slots)] = part.backward_s
        return GapFillAnswer(
            pipeline=pipeline, forward_start_s=starts[0], backward_start_s=starts[1]
        )

    @property
    def _ways(self) -> tuple[Direction, Direction]:
        return self.rows.forward, self.rows.backward

    def windows(self, head: float, tail: float, j: int, n: int) -> tuple[IntArray, IntArray]:
        """First and last slot that each of ``n`` jobs of a pipeline can take.

        Forwards run leftmost from the head on, backwards rightmost up to the tail in what is left;
        neither depends on the slots, so that any map within the windows is feasible.
        """
        rows, way = self.rows, self.mirror.forward
        key = (head, j, n)
        if key not in self._left:
            pieces = rows.of_pipeline(j)
            begins, ends = self.place(pieces, rows.forward, j, np.full(n, -head))
            left = _without(pieces, rows.forward, begins, ends)
            arrive = ends[:, -1] + rows.forward.edge[j] if ends.size else np.full(n, -np.inf)
            seen = mirrored(*left, rows.length)
            self._left[key] = (arrive, (*seen, left[3]))
        arrive, seen = self._left[key]
        low = np.searchsorted(rows.deadline, arrive - rows.tolerance, side="left")
        high = np.full(n, len(rows.release) - 1)
        if len(way.row):
            _, ends = self.place(seen, way, j, np.full(n, -tail))
            latest = rows.length - (ends[::-1, -1] + way.edge[j])
            high = np.searchsorted(rows.release, latest + rows.tolerance, side="right") - 1
        return low, high

    def match(self, head: float, tail: float, counts: IntArray) -> IntArray | None:
        """A map for a head and a tail, from counts of jobs that are changed one by one."""
        cache: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        slots = len(self.rows.deadline)

        def attempt(numbers: IntArray) -> tuple[int, IntArray]:
            jobs = [(j, int(n)) for j, n in enumerate(numbers) if n]
            for job in jobs:
                if job not in cache:
                    cache[job] = self.windows(head, tail, *job)
            low = np.concatenate([cache[job][0] for job in jobs])
            high = np.concatenate([cache[job][1] for job in jobs])
            pipeline = np.empty(slots, dtype=np.int64)
            owner = np.repeat([j for j, _ in jobs], [n for _, n in jobs])
            return int(matched(low, high, slots, pipeline, owner)), pipeline

        counts = counts.copy()
        best, pipeline = attempt(counts)
        while best < slots:
            step: tuple[int, int, int] | None = None
            for a, b in np.ndindex(len(counts), len(counts)):
                if a == b or counts[a] == 0 or counts[b] == self.rows.most:
                    continue
                counts[a] -= 1
                counts[b] += 1
                found, candidate = attempt(counts)
                counts[a] += 1
                counts[b] -= 1
                if found > best:
                    best, pipeline, step = found, candidate, (a, b, found)
                    if found == slots:
                        return pipeline
            if step is None:
                return None
            counts[step[0]] -= 1
            counts[step[1]] += 1
        return pipeline


def _without(pieces: Pieces, way: Direction, begins: FloatArray, ends: FloatArray) -> Pieces:
    new = without(*pieces, way.row_units, way.row_first, begins, ends)
    return new[0], new[1], new[2], new[3]
