"""`IssueSource`: what the host of a GPU that was timed takes to issue a part of a training step.

A step of few numbers waits for Python, dispatch and autograd. The host takes, for each work of the
part, what it took to issue one call while the device was profiled (`Row.issue_s`), and once for the
part what runs around its calls (`gpu_host.SECONDS`). A device that is busy for longer does not show
it (`HostWait`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from foreplan.cost_models.costs import Estimate, HostLaunch, HostWait, Work
from foreplan.cost_models.rates.gpu_host import SECONDS
from foreplan.cost_models.sources._device_words import find
from foreplan.datasets.profile import Row
from foreplan.datasets.program import Program

#: Shares of the mean at the ends of the interval: what nineteen of twenty parts of networks took
#: that the constants of `gpu_host` were not fitted to.
_LOW, _HIGH = 0.8, 1.4


class IssueSource:
    """A `HostSource` of rows of profiles; it prices no work itself.

    Args:
        rows: what was timed, by rank label or device name.
    """

    def __init__(self, rows: Mapping[str, Iterable[Row]]) -> None:
        found = {device: _Issued(timed) for device, timed in rows.items()}
        self._issued = {device: issued for device, issued in found.items() if issued.timed}

    def estimate(self, work: Work, device: str) -> None:
        """Nothing: what a host takes is the price of no work."""

    def issuing(self, work: HostWait, device: str) -> Estimate | None:
        """Seconds of the host; ``None`` of a device whose rows do not say what calls take.

        They are interpolated, or extrapolated where a call was not timed itself; predicted, if
        most is what runs around the calls, which other hosts have told.
        """
        issued = find(self._issued, device)
        if issued is None:
            return None
        around_s = work.share * SECONDS[work.part].once_s
        calls_s = sum(issued.call_s(part) * count for part, count in work.works)
        seconds = around_s + calls_s
        source = "predicted"
        if around_s < calls_s:
            exact = all(issued.was_timed(part) for part, _ in work.works)
            source = "interpolated" if exact else "extrapolated"
        return Estimate(seconds, _LOW * seconds, _HIGH * seconds, source)


class _Issued:
    """Seconds to issue a call of each program that was timed, or of one like it."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._exact: dict[Program, float] = {}
        alike: dict[object, list[float]] = defaultdict(list)
        for row in rows:
            if row.issue_s is not None:
                self._exact[row.program()] = row.issue_s
                for key in ((row.op, row.variant), row.op, None):
                    alike[key].append(row.issue_s)
        self._alike = {key: median(found) for key, found in alike.items()}
        self.timed = bool(self._exact)

    def was_timed(self, work: Work) -> bool:
        """Whether a program's own call was timed; what is none takes no call of torch's."""
        return not isinstance(work, Program) or work in self._exact

    def call_s(self, work: Work) -> float:
        """Of a program; sizes hardly matter, what a variant calls does."""
        if isinstance(work, HostLaunch):  # of a call that nobody timed, as the quickest
            return work.calls * min(self._exact.values())
        if not isinstance(work, Program):
            return 0.0
        keys = ((work.op, str(work.variant)), work.op, None)
        near = next(self._alike[key] for key in keys if key in self._alike)
        return self._exact.get(work, near)
