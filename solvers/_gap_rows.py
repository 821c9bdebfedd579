"""A gap-filling problem as the arrays of ``_gap_place``, and the same problem mirrored in time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.gap_fill_problem import (
    FloatArray,
    GapFillProblem,
    IntArray,
    Resource,
    UnitChain,
)
from foreplan.solvers.gap_fill_score import GapFillAnswer, evaluate


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction's units.

    Attributes:
        row: ``[U]`` stage * 2 + resource.
        work: ``[M, U]`` seconds alone.
        lag: ``[M, U]`` seconds between the unit before in the job and this one; 0 for the first.
        edge: ``[M]`` lag between the backbone and the end of the chain that faces it.
        row_units: ``[U]`` units by row.
        row_first: ``[2 S + 1]`` where each row begins in it.
    """

    row: IntArray
    work: FloatArray
    lag: FloatArray
    edge: FloatArray
    row_units: IntArray
    row_first: IntArray

    @property
    def job_s(self) -> FloatArray:
        """``[M]`` latency of one job on an idle pipeline, lags included."""
        if not len(self.row):
            return np.zeros(len(self.edge))
        return np.asarray((self.work + self.lag).sum(axis=1) + self.edge)


@dataclass(frozen=True, slots=True)
class Rows:
    """Free pieces of every row, pipeline after pipeline, and both directions.

    Attributes:
        start: ``[P]`` start of each free piece, ``end`` and ``rate`` likewise.
        first_piece: ``[M, 2 S]`` first piece of each row; rows are packed without holes.
        forward, backward: the units.
        length: ``T``.
        deadline: ``[N]``.
        release: ``[N]``.
        tolerance: slack in seconds, below the checker's.
        cap: live jobs of a pipeline; 0 for no cap.
        most: jobs of a pipeline, with ``M * most >= N``.
    """

    start: FloatArray
    end: FloatArray
    rate: FloatArray
    first_piece: IntArray
    forward: Direction
    backward: Direction
    length: float
    deadline: FloatArray
    release: FloatArray
    tolerance: float
    cap: int
    most: int

    @classmethod
    def of(cls, problem: GapFillProblem) -> Rows:
        """Pack a problem."""
        parts, first, count = [], [], 0
        for d in problem.stage_device.ravel():
            for r in Resource:
                part = free_pieces(
                    problem.busy_s[d][r], problem.busy_s[d][1 - r], problem.slowdown(r)
                )
                first.append(count)
                count += part.shape[1]
                parts.append(part)
        start, end, rate = np.concatenate(parts, axis=1)
        forward = problem.forward, problem.forward_lag_s
        backward = problem.backward, problem.backward_lag_s
        return cls(
            np.ascontiguousarray(start),
            np.ascontiguousarray(end),
            np.ascontiguousarray(rate),
            np.array(first).reshape(problem.n_pipelines, -1),
            _direction(*forward, problem.n_stages, falling=False),
            _direction(*backward, problem.n_stages, falling=True),
            problem.backbone_s,
            problem.deadline_s,
            problem.release_s,
            0.1 * problem.tolerance_s,
            problem.live_cap or 0,
            problem.n_slots,
        )

    def of_pipeline(self, j: int) -> tuple[FloatArray, FloatArray, FloatArray, IntArray]:
        """Pieces of one pipeline, packed by themselves."""
        a = int(self.first_piece[j, 0])
        b = int(self.first_piece[j + 1, 0]) if j + 1 < len(self.first_piece) else len(self.start)
        return self.start[a:b], self.end[a:b], self.rate[a:b], self.first_piece[j] - a


def free_pieces(busy: FloatArray, other: FloatArray, slowdown: float) -> FloatArray:
    """``[3, n]`` start, end and rate of what ``busy`` leaves free, slowed beside ``other``."""
    start = np.concatenate([[-np.inf], busy[:, 1]])
    end = np.concatenate([busy[:, 0], [np.inf]])
    if slowdown > 1.0 and len(other):
        # Cut at every edge of the other resource, then ask in which of its intervals a cut lies.
        edges = np.unique(np.concatenate([start, end, other.ravel()]))
        middle = _middles(edges)
        gap = np.searchsorted(start, middle, side="right") - 1
        free = middle < end[gap]
        at = np.searchsorted(other[:, 0], middle, side="right") - 1
        slow = (at >= 0) & (middle < other[at, 1])
        rate = np.where(slow, 1.0 / slowdown, 1.0)
        return np.stack([edges[:-1], edges[1:], rate])[:, free]
    kept = end > start
    return np.stack([start, end, np.ones(len(start))])[:, kept]


def _middles(edges: FloatArray) -> FloatArray:
    inner = 0.5 * (edges[1:-2] + edges[2:-1])
    return np.concatenate([[edges[1] - 1.0], inner, [edges[-2] + 1.0]])


def _direction(chain: UnitChain, lag_s: FloatArray, stages: int, *, falling: bool) -> Direction:
    units = len(chain)
    row = chain.stage * len(Resource) + chain.resource
    lag = np.zeros((len(lag_s), units))
    # Stages between two units pass the lag on, hence sums over the stages that are left.
    total = np.concatenate([np.zeros((len(lag_s), 1)), np.cumsum(lag_s, axis=1)], axis=1)
    if units > 1:
        low, high = sorted_pair(chain.stage[:-1], chain.stage[1:])
        lag[:, 1:] = total[:, high] - total[:, low]
    facing = (chain.stage[0] if falling else chain.stage[-1]) if units else stages
    edge = total[:, stages] - total[:, facing]
    return Direction(
        row,
        np.ascontiguousarray(chain.duration_s),
        lag,
        edge,
        np.argsort(row, kind="stable"),
        np.concatenate([[0], np.cumsum(np.bincount(row, minlength=2 * stages))]),
    )


def sorted_pair(a: IntArray, b: IntArray) -> tuple[IntArray, IntArray]:
    """Elementwise smaller and larger."""
    return np.minimum(a, b), np.maximum(a, b)


def refuse_interference(problem: GapFillProblem) -> None:
    """Exact methods take a unit's time as given.

    Raises:
        SpecError: a slowdown above 1.
    """
    factors = problem.compute_slowdown, problem.link_slowdown
    if max(factors) > 1.0:
        raise SpecError(
            "slowdown", got=factors, expected="1.0 for both",
            fix="exact methods know no interference; use gap_fill.solve",
        )  # fmt: skip


def reversed_problem(problem: GapFillProblem) -> GapFillProblem:
    """The problem with time running backwards: backwards become forwards, releases deadlines.

    Every rule is symmetric but the cap, whose jobs live from an end to an end: it is dropped.
    """
    length = problem.backbone_s

    def turned(chain: UnitChain) -> UnitChain:
        return UnitChain(
            stage=chain.stage[::-1],
            resource=chain.resource[::-1],
            duration_s=chain.duration_s[:, ::-1],
        )

    return replace(
        problem,
        busy_s=tuple(
            (np.abs(length - c[::-1, ::-1]), np.abs(length - k[::-1, ::-1]))
            for c, k in problem.busy_s
        ),
        forward=turned(problem.backward),
        backward=turned(problem.forward),
        deadline_s=length - problem.release_s[::-1],
        release_s=length - problem.deadline_s[::-1],
        forward_lag_s=problem.backward_lag_s,
        backward_lag_s=problem.forward_lag_s,
        max_live_jobs=None,
    )


def reversed_answer(problem: GapFillProblem, answer: GapFillAnswer) -> GapFillAnswer:
    """An answer of ``problem`` as one of ``reversed_problem(problem)``."""
    score = evaluate(problem, answer)
    return GapFillAnswer(
        pipeline=answer.pipeline[::-1],
        forward_start_s=problem.backbone_s - score.backward_end_s[::-1, ::-1],
        backward_start_s=problem.backbone_s - score.forward_end_s[::-1, ::-1],
    )
