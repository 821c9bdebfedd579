"""How sure a choice is, and which two measurements would make it surer.

Fixed decisions are timed again in many worlds: in each, every group of prices that goes wrong
together (a program on a kind of device) is off by one factor, drawn from its interval. The
confidence is the share of worlds in which the choice is the best decision by the planner's
objective, among its alternatives and the close ones that the search met; where the planner has a
time limit, a decision that misses it in a world cannot be the best there.

What a measurement is worth is the expected value of partial perfect information (Raiffa and
Schlaifer 1961; Strong, Oakley, Brennan 2014) with the chance to be right as utility: were the price
of group g known to be z, the decision with the largest share of the worlds in which it is z would
be taken; averaged over z, its share is the chance after the measurement. Worlds "in which it is z"
are the drawn ones moved there along each decision's elasticity to the group, which two simulations
give; the second measurement is valued with the first one known. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from foreplan.cost_models.schedule import FloatArray
from foreplan.planner.base import Planner, Problem
from foreplan.planner.predict import Forecast, Group
from foreplan.planner.sureness import Confidence, Measurement

#: Draws, fewer for long schedules, so that confidence costs less than the plan.
DRAWS, FEWEST, ACTIONS = 256, 64, 2_000_000
#: Groups whose measurement is valued, by the seconds that they may be off.
GROUPS = 16
#: Gains below this are not told: draws cannot tell them from nothing.
LEAST = 0.005
#: Nodes and weights of a standard normal variable (Gauss-Hermite).
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)


@dataclass(frozen=True)
class Contender:
    """A decision that may be the best.

    Attributes:
        name: as in the plan.
        decision: the planner's.
        forecast: its priced schedule.
    """

    name: str
    decision: Any
    forecast: Forecast


def confidence(
    planner: Planner[Any, Any],
    problem: Problem[Any],
    chosen: Contender,
    others: Sequence[Contender],
    *,
    seed: int,
    draws: int | None = None,
) -> Confidence:
    """Resample every price and see how often the choice stays the best.

    Args:
        planner: whose objective and limit count.
        problem: what was decided.
        chosen: the plan's decision.
        others: what it is compared with; they meet every limit except, maybe, the time limit.
        seed: of the draws.
        draws: number of worlds; from the schedule's length if left out.
    """
    if not others:
        return Confidence(probability_best=1.0, draws=0)
    count = draws or int(np.clip(ACTIONS // max(len(chosen.forecast.schedule), 1), FEWEST, DRAWS))
    contest = _Contest(planner, problem, [chosen, *others])
    worlds = _Worlds.drawn(contest, count, seed)
    shares = contest.shares(worlds.totals)
    names = [contender.name for contender in contest.contenders]
    beaten = int(np.argmax(shares[1:])) + 1
    return Confidence(
        probability_best=float(shares[0]),
        draws=count,
        in_time=contest.in_time(worlds.totals),
        runner_up=names[beaten] if shares[beaten] > 0 else None,
        share=dict(zip(names[1:], map(float, shares[1:]), strict=True)),
        measure_next=_measure_next(contest, worlds, shares),
    )


class _Contest:
    """The decisions of one comparison, and who wins it at given totals."""

    def __init__(
        self, planner: Planner[Any, Any], problem: Problem[Any], contenders: list[Contender]
    ) -> None:
        self._planner, self._problem = planner, problem
        self.contenders = contenders
        self.forecasts = [contender.forecast for contender in contenders]
        self._many = True
        self._by_time = type(planner).objective is Planner.objective
        limit = planner.time_limit(problem)
        self._limit_s: float | None = None
        self._limit_of: int | None = None
        self._factor = 1.0
        if limit is None:
            return
        self._factor = limit.factor
        if isinstance(limit.basis, int | float):
            self._limit_s = mean_s = float(limit.basis)
        else:
            known = [c.decision for c in contenders]
            if limit.basis in known:
                self._limit_of = known.index(limit.basis)
            else:
                self._limit_of = len(self.forecasts)
                self.forecasts.append(Forecast.of(planner, problem, limit.basis))
            mean_s = self.forecasts[self._limit_of].total_s
        # What a replay of several steps adds at the expected prices is no miss.
        self._factor *= max(1.0, self.forecasts[0].total_s / (mean_s * self._factor)) * (1 + 1e-9)

    def _worth(self, contender: Contender, totals: FloatArray) -> FloatArray:
        """The planner's objective at each total."""
        objective: Any = self._planner.objective
        if self._many:
            try:
                found = objective(self._problem, contender.decision, totals)
                return np.broadcast_to(np.asarray(found, dtype=np.float64), totals.shape)
            except (TypeError, ValueError):  # written for one number, as it may be
                self._many = False
        one_by_one = (objective(self._problem, contender.decision, float(t)) for t in totals)
        return np.fromiter(one_by_one, np.float64, len(totals))

    def shares(self, totals: FloatArray) -> FloatArray:
        """Share of worlds that each contender wins; less than 1 in all where nobody is in time.

        Args:
            totals: seconds, ``[forecast, world]``.
        """
        count = len(self.contenders)
        values = totals[:count]
        if not self._by_time:
            values = np.array(
                [self._worth(c, s) for c, s in zip(self.contenders, values, strict=True)]
            )
        limit = self._limit(totals)
        if limit is not None:
            values = np.where(totals[:count] <= limit, values, np.inf)
        best = values.min(axis=0)
        # Of equals the first wins, the choice before all.
        winner = np.argmax(values <= best + 1e-12 * np.abs(best), axis=0)
        wins = np.bincount(winner[np.isfinite(best)], minlength=count)
        share: FloatArray = wins.astype(np.float64) / totals.shape[1]
        return share

    def in_time(self, totals: FloatArray) -> float | None:
        """Share of worlds in which the choice meets the time limit; ``None`` without one."""
        limit = self._limit(totals)
        return None if limit is None else float(np.mean(totals[0] <= limit))

    def _limit(self, totals: FloatArray) -> float | FloatArray | None:
        """Seconds that a decision may take, in every world where another's time is the limit."""
        limit: float | FloatArray | None = self._limit_s
        if self._limit_of is not None:
            limit = totals[self._limit_of]
        return None if limit is None else limit * self._factor


@dataclass(frozen=True)
class _Worlds:
    """Drawn worlds.

    Attributes:
        totals: seconds, ``[forecast, world]``.
        off: standard normal deviation of each group in each world.
    """

    totals: FloatArray
    off: Mapping[Group, FloatArray] = field(default_factory=dict)

    @classmethod
    def drawn(cls, contest: _Contest, count: int, seed: int) -> _Worlds:
        groups = dict.fromkeys(
            group
            for forecast in contest.forecasts
            for group, spread in zip(forecast.groups, forecast.spread, strict=True)
            if spread > 0
        )
        off = {group: group.deviations(count, seed) for group in groups}
        return cls(np.array([f.resampled(off, count) for f in contest.forecasts]), off)

    def moved(self, groups: Mapping[Group, FloatArray], at: Sequence[float]) -> FloatArray:
        """The totals if each group's deviation were ``at``; ``groups`` gives elasticities."""
        shift = np.zeros_like(self.totals)
        for (group, elasticity), node in zip(groups.items(), at, strict=True):
            shift += elasticity[:, None] * (node - self.off[group])[None, :]
        moved: FloatArray = self.totals * np.exp(shift)
        return moved


def _measure_next(
    contest: _Contest, worlds: _Worlds, shares: FloatArray
) -> tuple[Measurement, ...]:
    """The two measurements of which the second is valued with the first one known."""
    if shares[0] >= 1.0:
        return ()
    elasticity = _elasticities(contest, worlds)
    known: dict[Group, FloatArray] = {}
    found: list[Measurement] = []
    chance = float(shares.max())
    for _ in range(2):
        after = {
            group: _chance(contest, worlds, {**known, group: slope})
            for group, slope in elasticity.items()
            if group not in known
        }
        if not after:
            break
        best = max(after, key=lambda group: (round(after[group], 9), str(group)))
        if after[best] < chance + LEAST:
            break
        chance = after[best]
        known[best] = elasticity[best]
        low, high, source = next(f.priced(best) for f in contest.forecasts if best in f.groups)
        found.append(
            Measurement(
                program=best.name, device=best.device, source=source, low=low, high=high,
                probability_best=chance,
            )
        )  # fmt: skip
    return tuple(found)


def _elasticities(contest: _Contest, worlds: _Worlds) -> dict[Group, FloatArray]:
    """Change of each forecast's log seconds with a group's deviation, for the heaviest groups."""
    weight: dict[Group, float] = dict.fromkeys(worlds.off, 0.0)
    for forecast in contest.forecasts:
        seconds = forecast.group_seconds() * forecast.spread / max(forecast.total_s, 1e-300)
        for group, value in zip(forecast.groups, seconds, strict=True):
            if group in weight:
                weight[group] = max(weight[group], float(value))
    heavy = sorted(weight, key=lambda group: (-weight[group], str(group)))[:GROUPS]
    found = {g: np.array([f.elasticity(g) for f in contest.forecasts]) for g in heavy}
    return {group: slope for group, slope in found.items() if np.ptp(slope) > 1e-9}


def _chance(contest: _Contest, worlds: _Worlds, groups: Mapping[Group, FloatArray]) -> float:
    """Expected share of the best decision once the prices of these groups are known."""
    return sum(
        weight * float(contest.shares(worlds.moved(groups, at)).max())
        for at, weight in _grid(len(groups))
    )


def _grid(size: int) -> Iterator[tuple[tuple[float, ...], float]]:
    """Nodes of independent standard normal variables, with weights that sum to 1."""
    weights = _WEIGHTS / _WEIGHTS.sum()
    for places in product(range(len(_NODES)), repeat=size):
        yield tuple(float(_NODES[p]) for p in places), float(np.prod([weights[p] for p in places]))
