"""The gap-filling problem: chains of units in the idle time of fixed device timelines.

A rigid backbone occupies two resources of every device, compute and link, during fixed intervals
of ``[0, T]``. Filler jobs (one per slot of the backbone, such as one micro-batch of an encoder)
run in what is left, and before 0 or after T where that does not suffice::

    total = head + T + tail,  head = max(0, -earliest start),  tail = max(0, latest end - T)

Shape legend: ``D`` devices, ``M`` filler pipelines, ``S`` stages of each, ``N`` slots, ``U`` units
of one job's forward or backward.

Rules of an answer (``gap_fill_check`` tests each of them on its own):

- *map*: each slot's job runs on one pipeline, its forward and its backward on the same one;
- *gap*: a unit runs without a break, on the device of its stage, beside nothing else of its
  resource: neither the backbone nor another unit;
- *chain*: a unit starts when its predecessor in the job has ended, plus the lag between stages;
- *FIFO*: on every resource of a device, forwards run in order of slots, unit after unit, and so do
  backwards; how forwards and backwards mix is free;
- *deadline*: the forward of slot i ends, with its lag, by ``deadline_s[i]``;
- *release*: the backward of slot i starts no sooner than ``release_s[i]`` plus its lag;
- *cap*: of the jobs of one pipeline at most ``max_live_jobs`` are live, which a job is from the end
  of its forward to the end of its backward.

A filler unit that runs while the backbone uses the *other* resource of the device progresses more
slowly, by a factor for each pairing; the backbone itself never moves (``GapFillScore.overlap_s``
says how long it has company, for whoever wants to price that).

Source: Optimus (ATC'25, arXiv 2408.03505), sections 3-4: bubbles, dependency points F_i and B_i,
kernels as units. The map that forwards and backwards share, lags, the cap and interference are
ours; the paper sorts both directions apart, which ignores where the activations lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foreplan.errors import SpecError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

RELATIVE_TOLERANCE = 1e-9
"""Slack on every comparison of times, as a share of ``T`` and the work of a job."""


class Resource(IntEnum):
    """What a unit occupies on its device."""

    COMPUTE = 0
    LINK = 1


def _unset() -> FloatArray:
    return np.empty(0)


def _frozen(
    values: npt.ArrayLike,
    where: str,
    shape: tuple[int, ...],
    *,
    low: float = 0.0,
    strict: bool = False,
) -> FloatArray:
    """A read-only copy, broadcast to a shape, finite and at least (or above) ``low``."""
    try:
        array = np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), shape))
    except (TypeError, ValueError):
        raise SpecError(where, got=np.shape(values), expected=f"shape {shape}") from None
    bad = ~np.isfinite(array) | ((array <= low) if strict else (array < low))
    if bad.any():
        expected = f"finite, {'above' if strict else 'at least'} {low:g}"
        raise SpecError(where, got=float(array[bad][0]), expected=expected)
    array.setflags(write=False)
    return array


def _integers(values: object, where: str, ndim: int, high: int) -> IntArray:
    """A read-only copy of integers of ``0 .. high - 1``."""
    array = np.array(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != ndim or not np.issubdtype(array.dtype, np.integer):
        raise SpecError(where, got=values, expected=f"integers in {ndim} dimensions")
    if array.size and (array.min() < 0 or array.max() >= high):
        raise SpecError(where, got=values, expected=f"integers of 0..{high - 1}")
    array = array.astype(np.int64)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitChain:
    """The units of one job in one direction, in the order in which they run.

    Attributes:
        stage: ``[U]`` stage of each unit; rising in a forward, falling in a backward, every unit
            of a stage in a row. A stage may have no unit, a chain too (a frozen encoder has no
            backward).
        resource: ``[U]`` what it occupies (`Resource`).
        duration_s: ``[U]``, or ``[M, U]`` where pipelines differ: seconds of the unit alone,
            above 0. Every job takes the same time on the same pipeline.

    Raises:
        SpecError: a wrong shape, an unknown resource, a duration that is not positive.
    """

    stage: IntArray
    resource: IntArray
    duration_s: FloatArray

    def __post_init__(self) -> None:
        stage = _integers(self.stage, "UnitChain.stage", 1, 1 << 31)
        resource = _integers(self.resource, "UnitChain.resource", 1, len(Resource))
        shape = np.shape(self.duration_s)
        if len(stage) != len(resource) or len(shape) not in (1, 2) or shape[-1] != len(stage):
            raise SpecError(
                "UnitChain",
                got=(len(stage), len(resource), shape),
                expected="stage [U], resource [U] and duration_s [U] or [M, U]",
            )
        duration = _frozen(self.duration_s, "UnitChain.duration_s", shape, strict=True)
        for name, value in (("stage", stage), ("resource", resource), ("duration_s", duration)):
            object.__setattr__(self, name, value)

    @classmethod
    def empty(cls) -> UnitChain:
        """A direction without work."""
        none = np.empty(0, dtype=np.int64)
        return cls(stage=none, resource=none, duration_s=np.empty(0))

    def __len__(self) -> int:
        return len(self.stage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapFillProblem:
    """One instance; arrays are copied, checked and made read-only. Times are seconds.

    Attributes:
        backbone_s: ``T``, length of the backbone timeline.
        busy_s: ``[D][2]`` arrays of shape ``[n, 2]``: start and end of the intervals of ``[0, T]``
            in which the backbone occupies each device's compute and link (in the order of
            `Resource`), by rising start, not overlapping; ``n`` may be 0.
        stage_device: ``[M, S]`` device of each stage of each pipeline; no device twice.
        forward: units of a job's forward.
        backward: units of a job's backward.
        deadline_s: ``[N]`` when the backbone needs the output of the forward in slot i; not
            falling.
        release_s: ``[N]`` when the backbone has the input of the backward in slot i; not falling
            and no sooner than ``deadline_s``.
        forward_lag_s: ``[M, S]`` (or anything that broadcasts to it) transfer after stage s of a
            forward: to stage s + 1, from the last stage to the backbone. A lag occupies nothing.
        backward_lag_s: ``[M, S]`` transfer before stage s of a backward: from stage s + 1, to the
            last stage from the backbone.
        compute_slowdown: factor (at least 1) on the time of a filler compute unit while the
            backbone occupies the link of the same device.
        link_slowdown: factor on the time of a filler link unit while the backbone computes.
        max_live_jobs: cap on the live jobs of each pipeline, or ``None``; without units in both
            directions nothing is kept and no cap holds.

    Raises:
        SpecError: a wrong shape, an interval outside ``[0, T]`` or overlapping, a device that hosts
            two stages, deadlines or releases that fall, a release before its deadline, a stage
            order that is no chain.
    """

    backbone_s: float
    busy_s: tuple[tuple[FloatArray, FloatArray], ...]
    stage_device: IntArray
    forward: UnitChain
    backward: UnitChain
    deadline_s: FloatArray
    release_s: FloatArray
    forward_lag_s: FloatArray = field(default_factory=_unset)
    backward_lag_s: FloatArray = field(default_factory=_unset)
    compute_slowdown: float = 1.0
    link_slowdown: float = 1.0
    max_live_jobs: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not (math.isfinite(self.backbone_s) and self.backbone_s > 0):
            raise SpecError("GapFillProblem.backbone_s", got=self.backbone_s, expected="above 0")
        put("busy_s", self._checked_busy(self.busy_s))
        device = _integers(self.stage_device, "GapFillProblem.stage_device", 2, len(self.busy_s))
        if device.size == 0 or len(np.unique(device)) < device.size:
            raise SpecError(
                "GapFillProblem.stage_device", got=device.tolist(),
                expected="at least one stage, and no device that hosts two",
            )  # fmt: skip
        put("stage_device", device)
        for name, sign in (("forward", 1), ("backward", -1)):
            put(name, self._checked_chain(name, getattr(self, name), sign))
        for name in ("deadline_s", "release_s"):
            values = np.ravel(getattr(self, name))
            points = _frozen(values, f"GapFillProblem.{name}", values.shape, low=-math.inf)
            if not len(points) or (np.diff(points) < 0).any():
                raise SpecError(f"GapFillProblem.{name}", got=points, expected="times, not falling")
            put(name, points)
        if len(self.deadline_s) != len(self.release_s):
            raise SpecError(
                "GapFillProblem.release_s", got=len(self.release_s),
                expected=f"{len(self.deadline_s)} times, one per deadline",
            )  # fmt: skip
        early = np.flatnonzero(self.release_s < self.deadline_s)
        if len(early):
            raise SpecError(
                f"GapFillProblem.release_s[{early[0]}]", got=float(self.release_s[early[0]]),
                expected=f"no sooner than deadline_s, {self.deadline_s[early[0]]:g}",
            )  # fmt: skip
        for name in ("forward_lag_s", "backward_lag_s"):
            lag = getattr(self, name)
            lag = np.zeros(device.shape) if np.size(lag) == 0 else lag
            put(name, _frozen(lag, f"GapFillProblem.{name}", device.shape))
        for name in ("compute_slowdown", "link_slowdown"):
            factor = float(_frozen(getattr(self, name), f"GapFillProblem.{name}", (), low=1.0))
            put(name, factor)
        cap = self.max_live_jobs
        if cap is not None and (not isinstance(cap, (int, np.integer)) or cap < 1):
            raise SpecError("GapFillProblem.max_live_jobs", got=cap, expected="an integer >= 1")

    def _checked_busy(
        self, busy_s: Sequence[Sequence[FloatArray]]
    ) -> tuple[tuple[FloatArray, FloatArray], ...]:
        checked = []
        for d, rows in enumerate(busy_s):
            if len(rows) != len(Resource):
                raise SpecError(f"GapFillProblem.busy_s[{d}]", got=len(rows), expected="two arrays")
            pair = []
            for r, values in enumerate(rows):
                where = f"GapFillProblem.busy_s[{d}][{r}]"
                size = np.size(values)
                shape = (size // 2, 2) if size == 0 else np.shape(values)
                if len(shape) != 2 or shape[1] != 2:
                    raise SpecError(where, got=shape, expected="shape [n, 2]")
                spans = _frozen(np.reshape(values, shape), where, shape)
                ends = spans.ravel()
                if size and ((np.diff(ends) < 0).any() or ends[-1] > self.backbone_s):
                    raise SpecError(
                        where, got="intervals that overlap, fall or leave the backbone",
                        expected=f"rising intervals of [0, {self.backbone_s:g}]",
                    )  # fmt: skip
                pair.append(spans)
            checked.append((pair[0], pair[1]))
        return tuple(checked)

    def _checked_chain(self, name: str, chain: UnitChain, sign: int) -> UnitChain:
        pipelines, stages = self.stage_device.shape
        where = f"GapFillProblem.{name}"
        if len(chain) and (chain.stage.max() >= stages or (sign * np.diff(chain.stage) < 0).any()):
            raise SpecError(
                f"{where}.stage", got=chain.stage,
                expected=f"stages of 0..{stages - 1}, {'rising' if sign > 0 else 'falling'}",
            )  # fmt: skip
        if chain.duration_s.ndim == 2 and len(chain.duration_s) == pipelines:
            return chain
        if chain.duration_s.ndim == 2:
            raise SpecError(
                f"{where}.duration_s", got=chain.duration_s.shape,
                expected=f"[U] or [{pipelines}, U]",
            )  # fmt: skip
        rows = np.broadcast_to(chain.duration_s, (pipelines, len(chain)))
        return UnitChain(stage=chain.stage, resource=chain.resource, duration_s=rows)

    @property
    def n_devices(self) -> int:
        """``D``."""
        return len(self.busy_s)

    @property
    def n_pipelines(self) -> int:
        """``M``."""
        return int(self.stage_device.shape[0])

    @property
    def n_stages(self) -> int:
        """``S``."""
        return int(self.stage_device.shape[1])

    @property
    def n_slots(self) -> int:
        """``N``."""
        return len(self.deadline_s)

    @property
    def live_cap(self) -> int | None:
        """``max_live_jobs`` where it can matter."""
        cap = self.max_live_jobs
        if cap is None or cap >= self.n_slots or not (len(self.forward) and len(self.backward)):
            return None
        return int(cap)

    @property
    def tolerance_s(self) -> float:
        """Slack of comparisons: `RELATIVE_TOLERANCE` of the backbone plus one job's work."""
        work = sum(
            float(chain.duration_s.sum(axis=1).max()) for chain in (self.forward, self.backward)
        )
        return RELATIVE_TOLERANCE * (self.backbone_s + work)

    def slowdown(self, resource: int) -> float:
        """Factor on a filler unit of this resource beside the backbone's other resource."""
        return self.compute_slowdown if resource == Resource.COMPUTE else self.link_slowdown


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
        pipeline = _integers(self.pipeline, "GapFillAnswer.pipeline", 1, 1 << 31)
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
