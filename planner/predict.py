"""What the simulator says about a decision: `Forecast`, the priced schedule of one decision.

Prices are grouped by (operator and variant, kind of device). Errors of one group are taken as fully
correlated and of different groups as independent, which is how a table or a predictor goes wrong;
equal devices share theirs. A decision's low and high end move every group together, and
`Forecast.resampled` moves them one by one.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from foreplan.cost_models.costs import Collective, CostBook, Segment, Work
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import FloatArray, IntArray, Schedule
from foreplan.cost_models.simulator import Simulator
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.program import Program
from foreplan.errors import ForeplanError
from foreplan.planner.base import Planner, Problem
from foreplan.planner.contention import contention
from foreplan.planner.leaves import Leaves, leaves_of
from foreplan.planner.prediction import Prediction, RankPrediction

_Z90 = 1.6448536  # half width of a 90 % interval in standard deviations (theory)


@dataclass(frozen=True, slots=True)
class Group:
    """Prices that go wrong together.

    Attributes:
        name: operator and variant, or what else the work is.
        op: operator alone.
        device: device, or the link of a transfer.
    """

    name: str
    op: str
    device: str

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"

    def deviations(self, count: int, seed: int) -> FloatArray:
        """Standard normal draws of this group, stratified; alike in every forecast.

        One draw falls into each of ``count`` equally likely intervals (Latin hypercube sampling,
        McKay, Beckman, Conover 1979), so that few draws cover the tails.
        """
        rng = np.random.default_rng([seed, zlib.crc32(str(self).encode())])
        normal = NormalDist()
        return np.array([normal.inv_cdf((int(k) + 0.5) / count) for k in rng.permutation(count)])


def _by_first(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct codes in order of their first place, and the index there of each code."""
    distinct, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[inverse]


class _Places:
    """What prices of a rank, or between ranks, are known by: equal devices go wrong together."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        ranks = cluster.ranks()
        profiles: dict[str, set[str | None]] = {}
        for rank in ranks:
            profiles.setdefault(str(rank.name), set()).add(rank.profile)
        self._device = {
            rank.label: str(rank.name)
            if len(profiles[str(rank.name)]) == 1
            else f"{rank.host}/{rank.name}"
            for rank in ranks
        }

    def group(self, work: Work, label: str) -> Group:
        """The group of a work on the rank with this label."""
        device = self._device.get(label, label)
        if isinstance(work, Program):
            return Group(f"{work.op}@{work.variant}", work.op, device)
        if isinstance(work, Collective):
            return Group(work.kind, "collective", self._link(work) or device)
        name = work.name if isinstance(work, Segment) else type(work).__name__.lower()
        return Group(name, name, device)

    def _link(self, work: Collective) -> str | None:
        if len(set(work.group)) < 2:
            return None
        try:
            return " and ".join(dict.fromkeys(t.label for t in self._cluster.links(work.group)))
        except ForeplanError:  # priced by the workload alone
            return None


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
        self._price(problem.costs, _Places(problem.cluster))
        self._simulator = Simulator(
            self.schedule,
            contention=contention(
                problem.cluster, ranks, planner.occupied(problem, decision),
                planner.contends(problem),
            ),
        )  # fmt: skip
        self.timeline: Timeline = self._simulator.run(self._durations(self._mean))
        self.ledgers: tuple[MemoryLedger, ...] = tuple(
            ledger.with_peak(peak)
            for ledger, peak in zip(
                planner.memory(problem, decision), self.timeline.peak_memory(), strict=True
            )
        )
        self.metrics = planner.metrics(problem, decision, self.timeline)

    @classmethod
    def of(cls, planner: Planner[Any, Any], problem: Problem[Any], decision: Any) -> Forecast:
        """The forecast of a decision, made once and kept by its problem.

        Arguments and errors are those of the class.
        """
        found: Forecast = problem.kept.get(
            (planner, decision.model_dump_json()),
            lambda: cls(planner, problem, decision),
            lambda made: len(made.schedule),
        )
        return found

    def _price(self, costs: CostBook, places: _Places) -> None:
        """Fill ``[distinct (work, device), group]`` tables of mean, low and high seconds."""
        s = self.schedule
        names = sorted(set(s.devices))
        device = np.asarray([names.index(d) for d in s.devices], dtype=np.int64)
        codes, self._code = np.unique(s.work * len(names) + device[s.rank], return_inverse=True)
        works, on = np.divmod(codes, len(names))
        leaves = Leaves(s.works)
        row, leaf, count = leaves.cells(works)
        pairs, cell = _by_first(leaf * len(names) + on[row])
        asked: dict[str, list[Work]] = {}
        for at, device_of in zip(*(p.tolist() for p in np.divmod(pairs, len(names))), strict=True):
            asked.setdefault(names[device_of], []).append(leaves.works[at])
        for name, wanted in asked.items():
            costs.prepare(wanted, name)
        given = np.array([work in costs.given for work in s.works], dtype=bool)
        if given.any():
            leaves = Leaves(s.works, costs.given)
            row, leaf, count = leaves.cells(works)
            pairs, cell = _by_first(leaf * len(names) + on[row])
        groups: dict[Group, int] = {}
        sources: dict[str, int] = {}
        known: list[tuple[int, int, float, float, float]] = []
        for at, device_of in zip(*(p.tolist() for p in np.divmod(pairs, len(names))), strict=True):
            work, name = leaves.works[at], names[device_of]
            estimate = costs.cost(work, name)
            place = groups.setdefault(places.group(work, name), len(groups))
            source = sources.setdefault(estimate.source, len(sources))
            known.append((place, source, estimate.mean_s, estimate.low_s, estimate.high_s))
        self.groups: list[Group] = list(groups)
        table = np.array(known, dtype=np.float64).reshape(-1, 5)
        place, source = (table[cell, c].astype(np.int64) for c in range(2))
        mean, low, high = (table[cell, c] * count for c in (2, 3, 4))
        shape = (len(codes), len(groups))
        self._mean, self._low, self._high = (
            np.bincount(row * shape[1] + place, seconds, shape[0] * shape[1])
            .astype(np.float64, copy=False)
            .reshape(shape)
            for seconds in (mean, low, high)
        )
        uses = np.bincount(self._code, minlength=len(codes))
        told, words = mean * uses[row], list(sources)
        # Nobody asks how the seconds of works that are given as a whole were known.
        apart = ~given[works[row]]
        self._source_s: dict[str, float] = {
            words[index]: float(told[apart][source[apart] == index].cumsum()[-1])
            for index in _by_first(source[apart])[0]
        }
        self._group_source_s: dict[Group, dict[str, float]] = {group: {} for group in groups}
        both, which = _by_first(place * len(words) + source)
        for code, seconds in zip(both, np.bincount(which, told, len(both)), strict=True):
            of_group = self._group_source_s[self.groups[code // len(words)]]
            of_group[words[code % len(words)]] = float(seconds)

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

    def program_seconds(self, costs: CostBook) -> dict[tuple[Program, str], float]:
        """Busy seconds of each program on each rank's device, by (program, device).

        Args:
            costs: the prices that the forecast was made from.
        """
        s, found = self.schedule, dict[tuple[Program, str], float]()
        pairs, uses = np.unique(np.stack([s.work, s.rank]), axis=1, return_counts=True)
        for work, rank, count in zip(*pairs.tolist(), uses.tolist(), strict=True):
            if s.works[work] in costs.given:
                continue
            for leaf, times in leaves_of(s.works[work], count):
                if isinstance(leaf, Program):
                    key = (leaf, s.devices[rank])
                    seconds = costs.cost(leaf, s.devices[rank]).mean_s * times
                    found[key] = found.get(key, 0.0) + seconds
        return found

    def program_calls(self) -> dict[tuple[Program, str], int]:
        """Most calls of each program in one action, by (program, device)."""
        s, found = self.schedule, dict[tuple[Program, str], int]()
        for work, rank in np.unique(np.stack([s.work, s.rank]), axis=1).T.tolist():
            mine: dict[Program, int] = {}
            for leaf, count in leaves_of(s.works[work], 1):
                if isinstance(leaf, Program):
                    mine[leaf] = mine.get(leaf, 0) + count
            for leaf, count in mine.items():
                key = (leaf, s.devices[rank])
                found[key] = max(found.get(key, 0), count)
        return found

    def group_seconds(self) -> FloatArray:
        """Busy seconds of each group over the whole schedule."""
        uses = np.bincount(self._code, minlength=len(self._mean))
        seconds: FloatArray = uses @ self._mean
        return seconds

    @functools.cached_property
    def spread(self) -> FloatArray:
        """Standard deviation of the logarithm of each group's prices, from their 90 % interval."""
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.log(self._high.sum(axis=0) / self._low.sum(axis=0)) / (2 * _Z90)
        known = np.isfinite(spread) & (self._mean.sum(axis=0) > 0)
        found: FloatArray = np.where(known, np.maximum(spread, 0.0), 0.0)
        return found

    def resampled(self, deviations: Mapping[Group, FloatArray], count: int) -> FloatArray:
        """Makespans in ``count`` worlds.

        Args:
            deviations: standard normal draws of groups; the others keep their mean.
            count: number of worlds.
        """
        off = np.zeros((count, len(self.groups)))
        for g, group in enumerate(self.groups):
            if group in deviations:
                off[:, g] = deviations[group]
        factors = np.exp(off * self.spread)
        seconds = (self._simulator.makespan_s((self._mean @ row)[self._code]) for row in factors)
        return np.fromiter(seconds, float, count)

    def elasticity(self, group: Group) -> float:
        """Change of the logarithm of the makespan with one standard deviation of a group."""
        if group not in self.groups:
            return 0.0
        down, up = self.resampled({group: np.array([-1.0, 1.0])}, 2)
        return float(np.log(up / down) / 2) if down > 0 else 0.0

    def priced(self, group: Group) -> tuple[float, float, str]:
        """Ends of a group's 90 % interval as shares of its mean, and the source of most of it."""
        g = self.groups.index(group)
        mean = float(self._mean[:, g].sum())
        sources = self._group_source_s[group]
        low, high = float(self._low[:, g].sum()) / mean, float(self._high[:, g].sum()) / mean
        return low, high, max(sorted(sources), key=lambda name: sources[name])

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
