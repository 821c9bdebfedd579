"""`IssueSource`: what the host of a profiled GPU takes to issue a part of a training step.

A step of few numbers waits for Python, dispatch and autograd. The host takes, for each work of the
part, what it took to issue one call while the device was profiled (`Row.issue_s`), and once for the
part what runs around its calls (`gpu_host.SECONDS`). A device that is busy for longer does not show
it (`HostWait`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from foreplan.cost_models.costs import Estimate, HostLaunch, HostWait, Work
from foreplan.cost_models.rates.gpu_host import SECONDS
from foreplan.cost_models.sources._device_words import find
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program

#: Shares of the mean at the ends of the interval: what nineteen of twenty parts of networks took
#: that the constants of `gpu_host` were not fitted to.
_LOW, _HIGH = 0.8, 1.4


class IssueSource:
    """A `HostSource` of profiles; it prices no work itself.

    Args:
        profiles: by rank label or device name.
    """

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self._profiles = dict(profiles)
        self._known: dict[int, _Issued] = {}

    def estimate(self, work: Work, device: str) -> None:
        """Nothing: what a host takes is the price of no work."""

    def issuing(self, work: HostWait, device: str) -> Estimate | None:
        """Seconds of the host; ``None`` of a device whose profile does not say what calls take."""
        profile = find(self._profiles, device)
        if profile is None:
            return None
        if id(profile) not in self._known:
            self._known[id(profile)] = _Issued(profile)
        issued = self._known[id(profile)]
        if not issued.timed:
            return None
        seconds = work.share * SECONDS[work.part].once_s
        seconds += sum(issued.call_s(part) * count for part, count in work.works)
        return Estimate(seconds, _LOW * seconds, _HIGH * seconds, "predicted")


class _Issued:
    """Seconds to issue a call of each program of a profile, or of one like it."""

    def __init__(self, profile: Profile) -> None:
        self._launch_s = profile.device.launch_overhead_s or 0.0
        self._exact: dict[Program, float] = {}
        alike: dict[object, list[float]] = defaultdict(list)
        for row in profile.rows:
            if row.issue_s is not None:
                self._exact[row.program()] = row.issue_s
                for key in ((row.op, row.variant), row.op, None):
                    alike[key].append(row.issue_s)
        self._alike = {key: median(found) for key, found in alike.items()}
        self.timed = bool(self._exact)

    def call_s(self, work: Work) -> float:
        """Of a program; sizes hardly matter, what a variant calls does."""
        if isinstance(work, HostLaunch):
            return work.calls * self._launch_s
        if not isinstance(work, Program):
            return 0.0
        keys = ((work.op, str(work.variant)), work.op, None)
        near = next(self._alike[key] for key in keys if key in self._alike)
        return self._exact.get(work, near)
