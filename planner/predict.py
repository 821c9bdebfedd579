"""What the simulator says about a decision: `Forecast`, the priced schedule of one decision.

Prices are grouped by (operator and variant, device). Errors of one group are taken as fully
correlated and of different groups as independent, which is how an interpolation table goes wrong; a
decision's low and high end therefore move every group together, and `Forecast.draws` resamples
group by group.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreplan.cost_models.costs import Copy, CostBook, Estimate, Segment, Work
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import FloatArray, Schedule
from foreplan.cost_models.simulator import Contention, Simulator
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.program import Program
from foreplan.planner.base import Planner, Problem
from foreplan.planner.plan import Prediction, RankPrediction

_Z90 = 1.6448536  # half width of a 90 % interval in standard deviations (theory)


@dataclass(frozen=True, slots=True)
class Group:
    """Prices that go wrong together.

    Attributes:
        name: operator and variant, or what else the work is.
        op: operator alone.
        device: rank label.
    """

    name: str
    op: str
    device: str

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"


def _leaves(work: Work, count: int) -> Iterator[tuple[Work, int]]:
    if isinstance(work, Segment) and work.parts:
        for part, times in work.parts:
            yield from _leaves(part, times * count)
    else:
        yield work, count


def _group(work: Work, device: str) -> Group:
    if isinstance(work, Program):
        return Group(f"{work.op}@{work.variant}", work.op, device)
    name = work.name if isinstance(work, Segment) else type(work).__name__.lower()
    return Group(name, name, device)


class Forecast:
    """A decision's schedule with its prices, timed by the simulator.

    Args:
        planner: whose decision it is.
        problem: what it was decided for.
        decision: the planner's decision.

    Raises:
        MissingDataError: a work has no price.
    """

    def __init__(self, planner: Planner[Any, Any], problem: Problem[Any], decision: Any) -> None:
        self.schedule: Schedule = planner.schedule(problem, decision)
        ranks = planner.ranks(problem, decision)
        self._price(problem.costs)
        self._simulator = Simulator(self.schedule, contention=contention(problem.cluster, ranks))
        self.timeline: Timeline = self._simulator.run(self._durations(self._mean))
        self.ledgers: tuple[MemoryLedger, ...] = tuple(
            ledger.with_peak(peak)
            for ledger, peak in zip(
                planner.memory(problem, decision), self.timeline.peak_memory(), strict=True
            )
        )
        self.metrics = planner.metrics(problem, decision, self.timeline)

    def _price(self, costs: CostBook) -> None:
        """Fill ``[distinct (work, device), group]`` tables of mean, low and high seconds."""
        s = self.schedule
        names = sorted(set(s.devices))
        device = np.asarray([names.index(d) for d in s.devices], dtype=np.int64)
        key = s.work * len(names) + device[s.rank]
        codes, self._code = np.unique(key, return_inverse=True)
        groups: dict[Group, int] = {}
        cells: list[tuple[int, int, Estimate]] = []
        self._source_s: dict[str, float] = {}
        uses = np.bincount(self._code, minlength=len(codes))
        for row, code in enumerate(codes):
            work, name = s.works[int(code) // len(names)], names[int(code) % len(names)]
            if work in costs.given:
                estimate = costs.cost(work, name)
                cells.append((row, groups.setdefault(_group(work, name), len(groups)), estimate))
                continue
            for leaf, count in _leaves(work, 1):
                estimate = costs.cost(leaf, name).times(count)
                place = groups.setdefault(_group(leaf, name), len(groups))
                cells.append((row, place, estimate))
                share = estimate.mean_s * float(uses[row])
                self._source_s[estimate.source] = self._source_s.get(estimate.source, 0.0) + share
        self.groups: list[Group] = list(groups)
        shape = (len(codes), len(groups))
        self._mean, self._low, self._high = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for row, place, estimate in cells:
            self._mean[row, place] += estimate.mean_s
            self._low[row, place] += estimate.low_s
            self._high[row, place] += estimate.high_s

    def _durations(self, table: FloatArray) -> FloatArray:
        seconds: FloatArray = table.sum(axis=1)[self._code]
        return seconds

    @property
    def total_s(self) -> float:
        """Predicted makespan."""
        return self.timeline.makespan_s

    def source_share(self) -> dict[str, float]:
        """Share of the priced seconds by where the price comes from."""
        total = sum(self._source_s.values()) or 1.0
        return {k: round(v / total, 6) for k, v in sorted(self._source_s.items())}

    def group_seconds(self) -> FloatArray:
        """Busy seconds of each group over the whole schedule."""
        uses = np.bincount(self._code, minlength=len(self._mean))
        seconds: FloatArray = uses @ self._mean
        return seconds

    def draws(self, count: int, seed: int, only: int | None = None) -> FloatArray:
        """Makespans with resampled prices, shape ``(count,)``.

        Args:
            count: number of draws.
            seed: draws of one seed resample a group alike in every forecast, so that alternatives
                are compared on the same luck.
            only: index of the one group to resample; all if left out.
        """
        mean = self._mean.sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.log(self._high.sum(axis=0) / self._low.sum(axis=0)) / (2 * _Z90)
        spread = np.where(np.isfinite(spread) & (mean > 0), spread, 0.0)
        factors = np.ones((count, len(self.groups)))
        for g, group in enumerate(self.groups):
            if spread[g] > 0 and only in (None, g):
                rng = np.random.default_rng([seed, zlib.crc32(str(group).encode())])
                factors[:, g] = np.exp(spread[g] * rng.standard_normal(count))
        result = np.empty(count)
        for i in range(count):
            result[i] = self._simulator.run((self._mean @ factors[i])[self._code]).makespan_s
        return result

    def prediction(self) -> Prediction:
        """The plan document's account of this forecast."""
        exposure = self.timeline.exposure()
        causes = self._cause_s()
        ranks = []
        for r, device in enumerate(self.schedule.devices):
            ledger = self.ledgers[r]
            phases = {
                op: float(self.timeline.total_s(op)[r])
                for op in self.schedule.ops
                if op not in ("send", "recv") and self.timeline.total_s(op)[r] > 0
            }
            ranks.append(
                RankPrediction(
                    device=device,
                    compute_s=exposure[r].compute_s,
                    communication_s=exposure[r].communication_s,
                    bubble_s=exposure[r].bubble_s,
                    cause_s=causes[r],
                    phase_s=phases,
                    memory_bytes=ledger.lines,
                    capacity_bytes=ledger.capacity_bytes,
                )
            )
        return Prediction(
            total_s=self.total_s,
            low_s=self._simulator.run(self._durations(self._low)).makespan_s,
            high_s=self._simulator.run(self._durations(self._high)).makespan_s,
            metrics=self.metrics,
            ranks=tuple(ranks),
        )

    def _cause_s(self) -> list[dict[str, float]]:
        result: list[dict[str, float]] = []
        busy = self.timeline.is_compute
        for r in range(self.schedule.ranks):
            mine = busy & (self.schedule.rank == r)
            uses = np.bincount(self._code[mine], minlength=len(self._mean))
            seconds = uses @ self._mean
            causes: dict[str, float] = {}
            for group, value in zip(self.groups, seconds, strict=True):
                if value > 0:
                    causes[group.op] = causes.get(group.op, 0.0) + float(value)
            result.append(dict(sorted(causes.items(), key=lambda item: -item[1])))
        return result


def contention(cluster: Cluster, ranks: tuple[int, ...]) -> Contention | None:
    """Measured slowdown between the ranks of a schedule; ``None`` where nothing was measured.

    Args:
        cluster: knows hosts and measured factors.
        ranks: cluster rank of each rank of the schedule.
    """
    every = cluster.ranks()
    hosts = [every[r].host for r in ranks]
    names = sorted(set(hosts))
    factors = [1.0]
    # One table serves all hosts: the worst of them, so that a prediction is not too rosy.
    for together in range(2, len(ranks) + 1):
        measured = [cluster.slowdown(host, "memory", together) for host in names]
        known = [factor for factor in measured if factor is not None]
        if not known:
            break
        factors.append(max(1.0, *known))
    if len(factors) < 2 or max(factors) == 1.0:
        return None
    return Contention(tuple(names.index(h) for h in hosts), tuple(factors))


def memory_share(costs: CostBook, device: str, work: Work) -> float:
    """Share of a segment's time that its memory traffic alone would take, 0..1.

    The bandwidth is what the cost book says of a large copy on the device; without a price for one
    the share is 0, and ranks of a host are taken not to slow each other down.
    """
    probe = Copy(1 << 28)
    if not isinstance(work, Segment) or not costs.can_price(probe, device):
        return 0.0
    # A copy reads and writes: it moves its payload twice.
    seconds_per_byte = costs.cost(probe, device).mean_s / (2 * probe.bytes)
    total = bound = 0.0
    for part, count in work.parts:
        if isinstance(part, Program):
            mean = costs.cost(part, device).mean_s
            total += mean * count
            bound += min(part.bytes * seconds_per_byte, mean) * count
    return bound / total if total else 0.0
