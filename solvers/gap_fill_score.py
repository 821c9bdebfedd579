"""`GapFillAnswer` and what it amounts to: `evaluate` scores start times, whatever made them.

A unit takes its duration alone; while the other resource of its device is busy it progresses at a
rate of one over the problem's slowdown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.gap_fill_problem import (
    FloatArray,
    GapFillProblem,
    IntArray,
    Resource,
    checked_integers,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapFillAnswer:
    """When every unit starts, and where.

    Attributes:
        pipeline: ``[N]`` pipeline of the job in each slot, for both directions.
        forward_start_s: ``[N, U]`` start of each unit of the forward in slot i, in the order of
            ``problem.forward``; below 0 in the head.
        backward_start_s: ``[N, U']`` likewise for ``problem.backward``; beyond ``T`` in the tail.

    Raises:
        SpecError: shapes that do not agree with each other. Whether the answer obeys the rules of
            its problem is for ``gap_fill_check`` to say.
    """

    pipeline: IntArray
    forward_start_s: FloatArray
    backward_start_s: FloatArray

    def __post_init__(self) -> None:
        pipeline = checked_integers(self.pipeline, "GapFillAnswer.pipeline", 1, 1 << 31)
        object.__setattr__(self, "pipeline", pipeline)
        for name in ("forward_start_s", "backward_start_s"):
            starts = np.array(getattr(self, name), dtype=np.float64)
            if starts.ndim != 2 or len(starts) != len(pipeline) or np.isnan(starts).any():
                raise SpecError(
                    f"GapFillAnswer.{name}", got=starts.shape,
                    expected=f"{len(pipeline)} rows of start times",
                )  # fmt: skip
            starts.setflags(write=False)
            object.__setattr__(self, name, starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapFillScore:
    """What an answer amounts to, rules aside.

    Attributes:
        head_s: stretch before the backbone (D_pre).
        tail_s: stretch after it (D_post).
        total_s: ``head_s + T + tail_s``, the objective.
        forward_end_s: ``[N, U]`` end of every forward unit, slowed where it has company.
        backward_end_s: ``[N, U']`` likewise.
        inside_fraction: share of the filler's busy time that lies within ``[0, T]``; 1.0 for no
            work (the paper's "Eff", there of encoder compute).
        overlap_s: ``[D, 2]`` seconds that filler units of each resource run while the backbone
            occupies the other resource of the device.
    """

    head_s: float
    tail_s: float
    total_s: float
    forward_end_s: FloatArray
    backward_end_s: FloatArray
    inside_fraction: float
    overlap_s: FloatArray


def evaluate(problem: GapFillProblem, answer: GapFillAnswer) -> GapFillScore:
    """Score an answer from its start times alone; it need not obey the rules.

    Raises:
        SpecError: an answer of another shape than the problem's, or an unknown pipeline.
    """
    shapes = (
        len(answer.pipeline),
        answer.forward_start_s.shape[1],
        answer.backward_start_s.shape[1],
    )
    expected = (problem.n_slots, len(problem.forward), len(problem.backward))
    if shapes != expected or (answer.pipeline >= problem.n_pipelines).any():
        raise SpecError(
            "answer", got=shapes,
            expected=f"(slots, forward units, backward units) = {expected} "
            f"on pipelines 0..{problem.n_pipelines - 1}",
        )  # fmt: skip
    overlap = np.zeros((problem.n_devices, len(Resource)))
    ends, busy, inside = [], 0.0, 0.0
    for chain, starts in (
        (problem.forward, answer.forward_start_s),
        (problem.backward, answer.backward_start_s),
    ):
        end = np.empty(starts.shape)
        device = problem.stage_device[answer.pipeline][:, chain.stage]
        duration = chain.duration_s[answer.pipeline]
        for d, r in np.ndindex(overlap.shape):
            mine = (device == d) & (chain.resource == r)
            if mine.any():
                beside = _OverlapClock(problem.busy_s[d][1 - r], problem.slowdown(r))
                end[mine] = beside.end(starts[mine], duration[mine])
                overlap[d, r] += beside.company(starts[mine], end[mine]).sum()
        ends.append(end)
        busy += float((end - starts).sum())
        within = np.minimum(end, problem.backbone_s) - np.maximum(starts, 0.0)
        inside += float(np.maximum(within, 0.0).sum())
    first = min(
        float(x.min(initial=0.0)) for x in (answer.forward_start_s, answer.backward_start_s)
    )
    last = max(float(x.max(initial=problem.backbone_s)) for x in ends)
    head, tail = max(0.0, -first), max(0.0, last - problem.backbone_s)
    return GapFillScore(
        head_s=head,
        tail_s=tail,
        total_s=head + problem.backbone_s + tail,
        forward_end_s=ends[0],
        backward_end_s=ends[1],
        inside_fraction=inside / busy if busy else 1.0,
        overlap_s=overlap,
    )


class _OverlapClock:
    """Work done by a time, at rate 1 alone and 1/slowdown while the other resource is busy."""

    def __init__(self, other_busy_s: FloatArray, slowdown: float) -> None:
        self._slowdown = slowdown
        edges = other_busy_s.ravel()
        self._edges = edges
        steps = np.diff(edges, prepend=edges[:1])
        # Steps into odd edges lie inside a busy interval, steps into even ones between two.
        self._company = np.cumsum(np.where(np.arange(len(edges)) % 2 == 1, steps, 0.0))

    def _busy_until(self, t: FloatArray) -> FloatArray:
        if not len(self._edges):
            return np.zeros_like(t)
        return np.asarray(np.interp(t, self._edges, self._company))

    def company(self, start: FloatArray, end: FloatArray) -> FloatArray:
        return self._busy_until(end) - self._busy_until(start)

    def _work(self, t: FloatArray) -> FloatArray:
        return t - (1.0 - 1.0 / self._slowdown) * self._busy_until(t)

    def end(self, start: FloatArray, duration: FloatArray) -> FloatArray:
        """End of units of the given durations alone."""
        if self._slowdown == 1.0 or not len(self._edges):
            return start + duration
        target = self._work(start) + duration
        known = self._work(self._edges)
        inside = np.interp(target, known, self._edges)
        before, after = target < known[0], target > known[-1]
        inside = np.where(before, self._edges[0] + target - known[0], inside)
        return np.where(after, self._edges[-1] + target - known[-1], inside)
