"""Prices from measured profiles: `MeasuredSource` and, around it, `InterpolatedSource`.

A device is asked for by its rank label (``host/device#k``) or by its name; profiles are given by
the same words, or one by one under the name that each bears.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from foreplan.cost_models.costs import Copy, Estimate, HostLaunch, Work
from foreplan.cost_models.rates.profiled_alike import timed_alike
from foreplan.cost_models.sources._device_words import find
from foreplan.cost_models.sources._interpolation import Interpolation
from foreplan.cost_models.sources.failed import FailedSource, regime
from foreplan.datasets.kernels.registry import computed_rows
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program

#: Launches' worth of time that a processor's host takes between two programs of a pass, for Python
#: and views: fitted to six stages of four models (3-16 us, in the median 7; a launch 1.2-1.9 us;
#: docs/results/serving_cpu_history.md). A GPU's host does it while the GPU computes.
_HOST_LAUNCHES = 5.0
#: Inside this factor of the measured range a price is interpolated, beyond it extrapolated ...
NEAR = 2.0
#: ... and beyond this one there is no price.
FAR = 16.0

Profiles = Profile | Iterable[Profile] | Mapping[str, Profile]


def _by_device(profiles: Profiles) -> dict[str, Profile]:
    if isinstance(profiles, Mapping):
        return dict(profiles)
    several = [profiles] if isinstance(profiles, Profile) else list(profiles)
    return {profile.device.name: profile for profile in several}


class MeasuredSource:
    """Prices exactly what a profile measured (source ``measured``).

    Programs cost their median, with the 10th and 90th percentile as interval. A host launch costs
    the time of an operator on one element; a copy its payload over the measured bandwidth, read
    and written, plus one launch. What the profile says that a program takes longer behind another
    one is added to every program of inference, and on a processor what its host does in between.

    Args:
        profiles: one, several, or by device word.
    """

    def __init__(self, profiles: Profiles) -> None:
        self.profiles = _by_device(profiles)
        self._failed = _failed(self.profiles)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device``; ``None`` if that was not measured there.

        Raises:
            FailedProgramError: see `FailedSource`.
        """
        profile = find(self.profiles, device)
        if profile is None:
            return None
        self._failed.estimate(work, device)
        if isinstance(work, Program):
            work = timed_alike(work)
            row = profile.by_program.get(work)
            return None if row is None else _behind_another(measured(row), profile, work)
        launch = profile.device.launch_overhead_s
        if isinstance(work, HostLaunch) and launch is not None:
            return Estimate.exact(work.calls * launch, "measured")
        if isinstance(work, Copy) and launch is not None:
            per_byte = _copy_seconds_per_byte(profile, work.kind)
            if per_byte is not None:
                return Estimate.exact(launch + work.bytes * per_byte, "measured")
        return None


class InterpolatedSource:
    """Prices programs near measured ones of the same operator and variant.

    The source is ``interpolated`` within a factor of `NEAR` of the measured range in every
    dimension, ``extrapolated`` up to `FAR` (with an interval that widens with the distance), and
    there is no price beyond. Where a measured program is asked for, its median comes back. Programs
    that were tried and failed, and variants that never ran, are refused.

    Decode and prefill attention are told apart: one query a sequence takes another kernel path.

    Args:
        profiles: one, several, or by device word.
    """

    def __init__(self, profiles: Profiles) -> None:
        self.profiles = _by_device(profiles)
        self._failed = _failed(self.profiles)
        self._fits: dict[tuple[str, ...], Interpolation | None] = {}

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device``; ``None`` if nothing like it was measured there.

        Raises:
            FailedProgramError: see `FailedSource`.
        """
        profile = find(self.profiles, device)
        if profile is None or not isinstance(work, Program):
            return None
        work = timed_alike(work)
        self._failed.estimate(work, device)
        row = profile.by_program.get(work)
        if row is not None:
            return _behind_another(measured(row), profile, work)
        fit = self._fit(profile, work)
        if fit is None:
            return None
        found = fit.predict(_computed(work, profile))
        if found.beyond > FAR:
            return None
        # Each doubling beyond the range adds the whole interval once more.
        half = found.half_width * (1.0 + math.log2(found.beyond))
        near = found.beyond <= NEAR
        estimate = Estimate(
            found.seconds,
            found.seconds * math.exp(-half),
            found.seconds * math.exp(half),
            "interpolated" if near else "extrapolated",
        )
        return _behind_another(estimate, profile, work)

    def _fit(self, profile: Profile, work: Program) -> Interpolation | None:
        key = (profile.device.name, str(id(profile)), *regime(work))
        if key not in self._fits:
            rows = [
                row
                for measured, row in profile.by_program.items()
                if row.status == "ok" and regime(measured) == regime(work)
            ]
            self._fits[key] = _interpolation(work.op, rows, profile) if rows else None
        return self._fits[key]


def _failed(profiles: Mapping[str, Profile]) -> FailedSource:
    return FailedSource({name: profile.rows for name, profile in profiles.items()})


def _interpolation(op: str, rows: list[Row], profile: Profile) -> Interpolation:
    """Through the medians of rows; of those that compute the same, through their geometric mean."""
    alike: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault(tuple(_computed(row.program(), profile).values()), []).append(row)
    dims = [_computed(group[0].program(), profile) for group in alike.values()]
    medians = [math.exp(fmean(math.log(_median(r)) for r in g)) for g in alike.values()]
    spread = [fmean(0.5 * math.log(_high(r) / _low(r)) for r in g) for g in alike.values()]
    return Interpolation(op, dims, medians, spread)


def _computed(item: Program, profile: Profile) -> dict[str, int]:
    """Dimensions of what a program's kernel computes."""
    dims = dict(item.dims)
    if item.op == "linear":
        capability = profile.device.compute_capability
        dims["rows"] = computed_rows(item.variant, dims["rows"], capability)
    return dims


def _behind_another(found: Estimate, profile: Profile, item: Program) -> Estimate:
    """A time in a pass of many programs, from the time of a program that repeats itself."""
    if is_training(item):
        return found
    if profile.device.kind == "cpu":
        between = _HOST_LAUNCHES * (profile.device.launch_overhead_s or 0.0)
    else:
        between = profile.switch_s or 0.0
    low, mean, high = (t + between for t in (found.low_s, found.mean_s, found.high_s))
    return Estimate(mean, low, high, found.source)


def measured(row: Row) -> Estimate:
    """The time of a row that is ok."""
    return Estimate(_median(row), _low(row), _high(row), "measured")


def _median(row: Row) -> float:
    assert row.median_s is not None  # a row that is ok has its times
    return row.median_s


def _low(row: Row) -> float:
    assert row.low_s is not None
    return row.low_s


def _high(row: Row) -> float:
    assert row.high_s is not None
    return row.high_s


def _copy_seconds_per_byte(profile: Profile, kind: str) -> float | None:
    if kind == "device":
        bandwidth = profile.device.memory_bandwidth
        return None if bandwidth is None else 2.0 / bandwidth
    rates = {"host_to_device": profile.host_to_device, "device_to_host": profile.device_to_host}
    rate = rates.get(kind)
    return None if rate is None else 1.0 / rate
