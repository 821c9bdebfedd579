"""What work costs: `Work` to be priced, `Estimate` of its time, and the `CostBook` that prices it.

The book asks its sources in order (measured, interpolated, predicted, roofline) and takes the first
answer; each source can be left out (``--costs``). A program that failed on a device is an answer as
well: no later source prices it. A price carries an interval and says where it
comes from, and both survive addition, so that a plan can tell which of its seconds were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foreplan.datasets.program import Program
from foreplan.errors import MissingDataError


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication among ranks; ``p2p`` is a send from ``group[0]`` to ``group[1]``.

    Attributes:
        kind: ``p2p``, ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or
            ``broadcast``.
        bytes: payload of one rank (``p2p``: of the message).
        group: ranks that take part.
        wire_dtype: dtype on the wire; a reduction's speed depends on it.
        waited: its ranks compute nothing beside it; see `foreplan.datasets.tier.Tier.waited`.
    """

    kind: str
    bytes: int
    group: tuple[int, ...]
    wire_dtype: str = "bf16"
    waited: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy inside a device or between host and device.

    Attributes:
        bytes: payload.
        kind: ``device``, ``host_to_device`` or ``device_to_host``.
    """

    bytes: int
    kind: str = "device"


@dataclass(frozen=True, slots=True)
class StorageAccess:
    """A read or write of ``bytes`` on disk; ``kind`` is ``read`` or ``write``."""

    bytes: int
    kind: str = "read"


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """Host time to issue ``calls`` operators that no other price includes; 0 calls are free."""

    calls: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """Works that run back to back on one device and cost the sum of their prices.

    A stage's pass over its layers is a segment of programs. A segment without parts is priced only
    by ``CostBook.given`` (simulations with times from the command line).

    Attributes:
        name: what a reader calls it (``prefill``, ``F``).
        parts: works and how often each runs.
    """

    name: str
    parts: tuple[tuple[Work, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Lag:
    """Waiting for the slowest of several ranks that do the same work before they meet.

    Attributes:
        work: what each of them does between two meetings.
        share: of its time, see `foreplan.datasets.ranks.lag`.
    """

    work: Work
    share: float


@dataclass(frozen=True, slots=True)
class HostWait:
    """What a GPU waits for the host that issues works one by one, beyond what the works take it.

    It stands behind the works that it is of, in the same segment, and costs nothing where the host
    is done before the device or where nobody timed it.

    Attributes:
        part: of a training step: ``forward``, ``backward`` or ``optimizer``.
        works: and how often each runs.
        share: of what runs around the calls of the whole part.
    """

    part: str
    works: tuple[tuple[Work, int], ...]
    share: float = 1.0


Work = Program | Collective | Copy | StorageAccess | HostLaunch | Segment | Lag | HostWait

#: Where a price comes from, from the most to the least trustworthy.
SOURCES = (
    "given",
    "measured",
    "interpolated",
    "extrapolated",
    "predicted",
    "theory",
    "roofline",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time with its interval and its origin.

    Attributes:
        mean_s: expected time in seconds.
        low_s: lower end of the nominal 90 % interval.
        high_s: upper end.
        source: one of `SOURCES`; of a sum, the least trustworthy that contributes at least 1 %.
    """

    mean_s: float
    low_s: float
    high_s: float
    source: str

    def times(self, count: float) -> Estimate:
        """The same work ``count`` times; errors are taken as fully correlated."""
        return Estimate(self.mean_s * count, self.low_s * count, self.high_s * count, self.source)

    @staticmethod
    def total(parts: Iterable[Estimate]) -> Estimate:
        """Sum, with intervals added end to end (fully correlated errors, so never too narrow)."""
        items = list(parts)
        mean = sum(item.mean_s for item in items)
        counted = [item.source for item in items if item.mean_s >= 0.01 * mean]
        worst = max(counted, key=SOURCES.index, default="given")
        low, high = sum(item.low_s for item in items), sum(item.high_s for item in items)
        return Estimate(mean, low, high, worst)

    @staticmethod
    def exact(seconds: float, source: str = "given") -> Estimate:
        """A time without uncertainty."""
        return Estimate(seconds, seconds, seconds, source)


class CostSource(Protocol):
    """One way to price work. Called once per distinct (work, device); must not mutate anything."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds, or ``None`` where this source cannot.

        Raises:
            MissingDataError: no later source may price it either; a `FailedProgramError` where it
                was tried on the device and failed.
        """
        ...


@runtime_checkable
class BatchSource(CostSource, Protocol):
    """A source that prices many programs at once faster than one by one."""

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Price what `estimate` will be asked for; what has no price is passed over in silence."""
        ...


@runtime_checkable
class FigureSource(CostSource, Protocol):
    """A source that prices from a device's figures."""

    def lacks(self, work: Work, device: str) -> str | None:
        """The figure whose lack leaves ``work`` without a price; ``None`` if it is no figure's."""
        ...


@runtime_checkable
class HostSource(CostSource, Protocol):
    """A source that knows hosts of GPUs."""

    def issuing(self, work: HostWait, device: str) -> Estimate | None:
        """What the host takes to issue the works, in seconds, or ``None`` if it is not known."""
        ...


def first_answers(
    sources: Sequence[CostSource], programs: Sequence[Program], device: str
) -> dict[Program, Estimate]:
    """What sources that are asked in order say of programs; later ones only of what is left.

    Returns:
        Prices by program, without those that no source prices or that one refuses.
    """
    found: dict[Program, Estimate] = {}
    left = list(dict.fromkeys(programs))
    for source in sources:
        if isinstance(source, BatchSource) and len(left) > 1:
            source.prepare(left, device)
        still: list[Program] = []
        for item in left:
            try:
                estimate = source.estimate(item, device)
            except MissingDataError:  # said to whoever asks for this one
                continue
            if estimate is None:
                still.append(item)
            else:
                found[item] = estimate
        left = still
    return found


class CostBook:
    """Prices every `Work` of every planner; the only way to a cost.

    Args:
        sources: asked in order; the first answer counts.
        given: prices that override every source (source ``given``), by work.
        profiling: the command that measures what has no price, for the message.

    Prices are kept, so that a plan search pays for each distinct work once.
    """

    def __init__(
        self,
        sources: Sequence[CostSource],
        *,
        given: Mapping[Work, float] | None = None,
        profiling: str = "foreplan profile",
    ) -> None:
        self.sources = tuple(sources)
        self._profiling = profiling
        self.given = dict(given or {})
        self._known: dict[tuple[Work, str], Estimate] = {}

    def cost(self, work: Work, device: str) -> Estimate:
        """Price ``work`` on the device named ``device``.

        For a `Collective` the device is that of the first rank of its group.

        Raises:
            FailedProgramError: it was tried there and failed.
            MissingDataError: no source can price it.
        """
        key = (work, device)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._price(work, device)
        return known

    def issuing(self, work: HostWait, device: str) -> Estimate | None:
        """What the host takes to issue the works that a device waits for; ``None`` if unknown."""
        for source in self.sources:
            found = source.issuing(work, device) if isinstance(source, HostSource) else None
            if found is not None:
                return found
        return None

    def prepare(self, works: Iterable[Work], device: str) -> None:
        """Price programs at once that `cost` will be asked for; sources may be faster so."""
        new = [
            work for work in dict.fromkeys(works)
            if isinstance(work, Program) and (work, device) not in self._known
            and work not in self.given
        ]  # fmt: skip
        if len(new) > 1:
            for item, estimate in first_answers(self.sources, new, device).items():
                self._known[item, device] = estimate

    def can_price(self, work: Work, device: str) -> bool:
        """Whether `cost` would answer."""
        try:
            self.cost(work, device)
        except MissingDataError:
            return False
        return True

    def _price(self, work: Work, device: str) -> Estimate:
        if work in self.given:
            return Estimate.exact(self.given[work])
        if work == HostLaunch(0):
            return Estimate.exact(0.0)
        if isinstance(work, Segment) and work.parts:
            self.prepare((part for part, _ in work.parts), device)
            parts = (self.cost(part, device).times(count) for part, count in work.parts)
            return Estimate.total(parts)
        if isinstance(work, Lag):
            return self.cost(work.work, device).times(work.share)
        if isinstance(work, HostWait):
            return self._beyond(work, device)
        for source in self.sources:
            found = source.estimate(work, device)
            if found is not None:
                return found
        known = (s.lacks(work, device) for s in self.sources if isinstance(s, FigureSource))
        lacking = next((figure for figure in known if figure is not None), None)
        why = "" if lacking is None else f", whose figures have no {lacking}"
        fix = f"measure it with '{self._profiling}', or use a device whose " + (
            "peak figures are known" if lacking is None else "figures have it"
        )
        if isinstance(work, Collective):
            fix = (
                "measure it with 'foreplan profile', write the link under tiers of the cluster, or "
                "name the hosts of devices (t4@a)"
            )
        raise MissingDataError(f"no cost for {work} on {device}{why}", fix=fix)

    def _beyond(self, work: HostWait, device: str) -> Estimate:
        host = self.issuing(work, device)
        if host is None:
            return Estimate.exact(0.0)
        taken = sum(self.cost(part, device).mean_s * count for part, count in work.works)
        low, mean, high = (max(0.0, t - taken) for t in (host.low_s, host.mean_s, host.high_s))
        return Estimate(mean, low, high, host.source)
