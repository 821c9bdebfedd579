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


def checked_integers(values: object, where: str, ndim: int, high: int) -> IntArray:
    """A read-only copy of integers of ``0 .. high - 1``.

    Raises:
        SpecError: other values, or another number of dimensions; ``where`` names the field.
    """
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
        stage = checked_integers(self.stage, "UnitChain.stage", 1, 1 << 31)
        resource = checked_integers(self.resource, "UnitChain.resource", 1, len(Resource))
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
        device = checked_integers(
            self.stage_device, "GapFillProblem.stage_device", 2, len(self.busy_s)
        )
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
