"""What a bubble planner has to beat, as answers of the same gap-filling problem.

- `coarse`: whole jobs before the device's first and after its last backbone computation (the
  paper's InitSchedule), with our own search for map, head and tail, so that it is no straw man;
- `accept_or_stop`: the paper's Algorithm 2. From the coarse schedule of a partition, the pipeline
  that determines the head moves one job into the gaps between backbone computations; the move is
  kept if the job arrives in time, otherwise the direction is done. First forwards, then backwards,
  every partition of the slots in turn.

Where the paper is silent or unsound: the check is made on the candidate, not on the schedule before
it; backwards follow the map of the forwards; the moved jobs are the last forwards and the first
backwards of their pipeline, which are the ones with the most room.

Source: Optimus (ATC'25), section 4, Algorithms 1 and 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from foreplan.solvers._gap_filler import BISECTIONS, Pieces, place
from foreplan.solvers._gap_place import mirrored, without
from foreplan.solvers._gap_rows import Direction, Rows, reversed_problem
from foreplan.solvers.gap_fill import solve
from foreplan.solvers.gap_fill_check import violations
from foreplan.solvers.gap_fill_problem import FloatArray, GapFillProblem, IntArray, Resource
from foreplan.solvers.gap_fill_score import GapFillAnswer, evaluate

MAX_SORTED = 10_000
"""Partitions up to which all are looked at before the most even ones are taken."""
Placed = tuple[FloatArray, FloatArray]
"""Starts and ends ``[n, U]`` of one pipeline's jobs."""


def coarse(problem: GapFillProblem) -> GapFillAnswer | None:
    """Whole jobs before and after the backbone's computations; ``None`` if a cap forbids it."""
    answer = solve(_split(problem, inner=False)).value
    return None if answer is None or violations(problem, answer) else answer


def accept_or_stop(problem: GapFillProblem, *, max_partitions: int = 100) -> GapFillAnswer | None:
    """The paper's greedy, best of the partitions that it is given time for.

    Args:
        problem: the instance.
        max_partitions: partitions to try; of more, those nearest to equal parts.

    Returns:
        The best answer, ``None`` if all break the cap, which the paper does not know.
    """
    greedy = _Greedy(problem)
    parts = min(problem.n_slots, problem.n_pipelines)
    best, objective = None, math.inf
    for counts in _balanced_first(problem.n_slots, parts, max_partitions):
        padded = np.zeros(problem.n_pipelines, dtype=np.int64)
        padded[: len(counts)] = counts
        answer = greedy.run(padded)
        total = evaluate(problem, answer).total_s
        if total < objective and not violations(problem, answer):
            best, objective = answer, total
    return best


def partitions(slots: int, pipelines: int) -> Iterator[tuple[int, ...]]:
    """Ordered partitions into positive parts, ``C(slots - 1, pipelines - 1)`` of them."""
    for cuts in itertools.combinations(range(1, slots), pipelines - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, slots)))


def _balanced_first(slots: int, pipelines: int, limit: int) -> list[tuple[int, ...]]:
    """Partitions nearest to equal parts; of very many, only those of parts that differ by one."""
    if math.comb(slots - 1, pipelines - 1) <= MAX_SORTED:
        every = partitions(slots, pipelines)
        return sorted(every, key=lambda counts: sum(n * n for n in counts))[:limit]
    least, more = divmod(slots, pipelines)
    longer = itertools.islice(itertools.combinations(range(pipelines), more), limit)
    return [tuple(least + (j in chosen) for j in range(pipelines)) for chosen in longer]


def _split(problem: GapFillProblem, *, inner: bool) -> GapFillProblem:
    """The problem with time between the computations of each device blocked, or all other time.

    Blocked time is busy on both resources. What lies beyond [0, T] stays open; inner jobs begin
    after 0 and miss their deadlines beyond T.
    """
    busy = []
    for rows in problem.busy_s:
        compute = rows[Resource.COMPUTE]
        if len(compute):
            a, b = float(compute[0, 0]), float(compute[-1, 1])
            blocked = [(0.0, a), (b, problem.backbone_s)] if inner else [(a, b)]
        else:
            blocked = [(0.0, problem.backbone_s)] if inner else []
        busy.append((_union(rows[0], blocked), _union(rows[1], blocked)))
    return replace(problem, busy_s=tuple(busy))


def _union(spans: FloatArray, blocked: list[tuple[float, float]]) -> FloatArray:
    """Disjoint intervals that cover both."""
    rows: list[list[float]] = []
    for a, b in sorted([*map(tuple, spans.tolist()), *blocked]):
        if rows and a <= rows[-1][1]:
            rows[-1][1] = max(rows[-1][1], b)
        elif b > a:
            rows.append([a, b])
    return np.array(rows).reshape(-1, 2)


@dataclass(slots=True)
class _Line:
    """One pipeline and direction: jobs at the end of the timeline, the others between.

    Attributes:
        outer, inner: free pieces before the computations, and between them.
        way: the direction, as a forward.
        j: pipeline.
        tolerance: of placement.
    """

    outer: Pieces
    inner: Pieces
    way: Direction
    j: int
    tolerance: float

    def place(self, head: float, whole: int, moved: int) -> Placed:
        """``whole`` jobs from the head on, then ``moved`` ones between the computations."""
        way, j, slack = self.way, self.j, self.tolerance
        idle = np.full(len(self.outer[3]), -np.inf)  # both keep it up to date: FIFO across them
        first = place(self.outer, way, j, np.full(whole, -head), slack, idle=idle)
        second = place(self.inner, way, j, np.zeros(moved), slack, idle=idle)
        return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])

    def arrivals(self, head: float, whole: int, moved: int) -> FloatArray:
        """When each job has reached the backbone."""
        if not len(self.way.row):
            return np.full(whole + moved, -np.inf)
        return np.asarray(self.place(head, whole, moved)[1][:, -1] + self.way.edge[self.j])


class _Greedy:
    def __init__(self, problem: GapFillProblem) -> None:
        self.problem = problem
        outer, inner = (_split(problem, inner=x) for x in (False, True))
        self.outer, self.inner = Rows.of(outer), Rows.of(inner)
        self.mirror = Rows.of(reversed_problem(outer))
        self.tolerance = self.outer.tolerance

    def run(self, counts: IntArray) -> GapFillAnswer:
        """Forwards, the map by arrival, then backwards on it."""
        problem, length = self.problem, self.problem.backbone_s
        pipelines = range(problem.n_pipelines)
        lines = [
            _Line(self.outer.of_pipeline(j), self.inner.of_pipeline(j), self.outer.forward, j,
                  self.tolerance)
            for j in pipelines
        ]  # fmt: skip
        moved = self._move(lines, counts, self._heads(lines, counts))
        head = self._least(lambda head: self._arrive(lines, counts, moved, head)[0])
        pipeline = self._arrive(lines, counts, moved, head)[1]
        begins, back = [], []
        for line, x in zip(lines, moved, strict=True):
            mine = line.place(head, int(counts[line.j]) - x, x)
            begins.append(mine[0])
            whole = len(mine[0]) - x
            back.append(
                replace(
                    line,
                    outer=self._left(line, line.outer, [part[:whole] for part in mine]),
                    inner=self._left(line, line.inner, [part[whole:] for part in mine]),
                    way=self.mirror.forward,
                )
            )
        own = [self.mirror.deadline[::-1][pipeline == j][::-1] for j in pipelines]

        def tails(moved: list[int]) -> list[float]:
            return [
                self._own(line, int(n) - x, x, limit)
                for line, n, x, limit in zip(back, counts, moved, own, strict=True)
            ]

        moved = self._move(back, counts, tails)
        tail = max(tails(moved))
        starts = [np.empty((problem.n_slots, len(x))) for x in (problem.forward, problem.backward)]
        for j in pipelines:
            ends = back[j].place(tail, int(counts[j]) - moved[j], moved[j])[1]
            starts[0][pipeline == j] = begins[j]
            starts[1][pipeline == j] = length - ends[::-1, ::-1]
        return GapFillAnswer(
            pipeline=pipeline, forward_start_s=starts[0], backward_start_s=starts[1]
        )

    def _left(self, line: _Line, pieces: Pieces, jobs: list[FloatArray]) -> Pieces:
        """What forwards leave of the pieces they were placed in, seen backwards in time.

        Whole jobs count as well: where a device computes little, its time before the computations
        serves both directions.
        """
        left = without(*pieces, line.way.row_units, line.way.row_first, *jobs)
        return (*mirrored(*left, self.problem.backbone_s), left[3])

    def _heads(self, lines: list[_Line], counts: IntArray) -> Callable[[list[int]], list[float]]:
        """Head that each pipeline needs for its slots, in the map by arrival."""
        deadline = self.outer.deadline

        def heads(moved: list[int]) -> list[float]:
            head = self._least(lambda head: self._arrive(lines, counts, moved, head)[0])
            if not math.isfinite(head):
                return [math.inf] * len(lines)
            pipeline = self._arrive(lines, counts, moved, head)[1]
            return [
                self._own(line, int(n) - x, x, deadline[pipeline == line.j])
                for line, n, x in zip(lines, counts, moved, strict=True)
            ]

        return heads

    def _move(
        self, lines: list[_Line], counts: IntArray, needs: Callable[[list[int]], list[float]]
    ) -> list[int]:
        """Accept moves of the critical pipeline until one fails."""
        moved = [0] * len(lines)
        need = needs(moved)
        while max(need) > self.tolerance:
            critical = int(np.argmax(need))
            candidate = [x + (j == critical) for j, x in enumerate(moved)]
            if candidate[critical] > counts[critical]:
                break
            after = needs(candidate)
            if max(after) > max(need) + self.tolerance:
                break
            moved, need = candidate, after
        return moved

    def _arrive(
        self, lines: list[_Line], counts: IntArray, moved: list[int], head: float
    ) -> tuple[bool, IntArray]:
        """Whether arrivals in order meet the deadlines, and the map that order gives."""
        times = [
            line.arrivals(head, int(n) - x, x)
            for line, n, x in zip(lines, counts, moved, strict=True)
        ]
        every = np.concatenate(times)
        order = np.argsort(every, kind="stable")
        met = bool((every[order] <= self.outer.deadline + self.tolerance).all())
        return met, np.repeat(np.arange(len(counts)), counts)[order]

    def _own(self, line: _Line, whole: int, moved: int, limit: FloatArray) -> float:
        def met(head: float) -> bool:
            return bool((line.arrivals(head, whole, moved) <= limit + self.tolerance).all())

        return self._least(met)

    def _least(self, met: Callable[[float], bool]) -> float:
        """Least head that will do, ``inf`` if none does."""
        if met(0.0):
            return 0.0
        ways = (self.outer.forward, self.mirror.forward)
        job = max(float(way.job_s.max()) for way in ways)
        low, high = 0.0, self.problem.backbone_s + job * self.problem.n_slots
        if not met(high):
            return math.inf
        for _ in range(BISECTIONS):
            if high - low <= 0.1 * self.tolerance:
                break
            middle = 0.5 * (low + high)
            low, high = (low, middle) if met(middle) else (middle, high)
        return high
