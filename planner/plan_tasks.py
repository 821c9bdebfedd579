"""Which operators to time next: those that a plan and its rivals rest on and that are least known.

The planner decides twice, from the prices as the fits expect them and with everything that was not
timed at the low end of its interval, so that a kernel that may be faster than it is thought to be
is met too. What it decides, its close decisions and its baselines are *contenders*. At stake are
the logarithm of the plan's time, and of its ratio to each contender's time as far as the prices
leave open which of both is faster. The programs are timed whose times lower the variance of these
most (`choose_telling`).

Nothing here knows one planner from another: it asks for decisions and their schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.costs import CostBook, Estimate, Work
from foreplan.cost_models.rates.task_choice import choose_telling, widened
from foreplan.cost_models.sources.device_fit import DeviceFit, FittedSource
from foreplan.datasets.program import Program
from foreplan.errors import InfeasibleError, MissingDataError
from foreplan.planner.base import Planner, Problem
from foreplan.planner.predict import Forecast

Floats = NDArray[np.float64]

#: A time is worth knowing that lowers what is at stake by a standard deviation of 0.3 %: repeated
#: runs of one decision differ by 2 % (docs/results/onboarding.md).
LEAST = 0.003**2


class PlanTasks(NamedTuple):
    """What to time next, and what the plan is like now.

    Attributes:
        programs: by the path of a device's profile, as in the cluster; the most telling first.
        asked: all that contenders run, timed or not, by the same.
        total_s: predicted time of the plan from the prices as they are.
        spread: standard deviation of its logarithm, by what the fits do not know.
        timed: share of its compute time whose programs were timed.
    """

    programs: dict[str, list[Program]]
    asked: dict[str, set[Program]]
    total_s: float
    spread: float
    timed: float


def plan_tasks(
    planner: Planner[Any, Any],
    problem: Problem[Any],
    fits: Mapping[str, DeviceFit],
    count: int,
) -> PlanTasks:
    """Choose what to time for a plan.

    Args:
        planner: of the plan.
        problem: priced from ``fits``.
        fits: by rank label.
        count: how many programs of a device to choose at most.

    Raises:
        InfeasibleError: there is no plan.
        MissingDataError: a price is not known.
    """
    forecasts = _contenders(planner, problem)
    devices = {r.label: r.profile for r in problem.cluster.ranks() if r.label in fits and r.profile}
    seconds = [_by_device(forecast, problem.costs, devices) for forecast in forecasts]
    totals = np.array([forecast.total_s for forecast in forecasts])
    asked: dict[str, set[Program]] = {}
    unknown: dict[str, _Unknown] = {}
    for label, profile in devices.items():
        run = dict.fromkeys(p for each in seconds for p, where in each if where == profile)
        asked[profile] = set(run)
        unknown[profile] = _Unknown.of(fits[label], [p for p in run if p not in fits[label].tried])
    shares = {
        profile: np.array([[each.get((p, profile), 0.0) for p in u.programs] for each in seconds])
        / totals[:, None]
        for profile, u in unknown.items()
    }
    stakes = _stakes(np.log(totals), shares, unknown)
    chosen = {
        profile: [
            u.programs[k]
            for k in choose_telling(u.law, u.noise, stakes[profile], count, least=LEAST)
        ]
        for profile, u in unknown.items()
    }
    busy = sum(seconds[0].values()) or 1.0
    guessed = sum(float(share[0].sum()) for share in shares.values()) * totals[0]
    spread = sum(unknown[k].variance(share[:1])[0] for k, share in shares.items())
    timed = max(0.0, 1.0 - guessed / busy)
    return PlanTasks(chosen, asked, float(totals[0]), float(np.sqrt(spread)), timed)


class _Unknown(NamedTuple):
    """Programs of one device that were not timed, and what is known of their logarithms."""

    programs: list[Program]
    law: Floats  # covariance (M, M)
    noise: Floats  # variance around the law (M,)

    @classmethod
    def of(cls, fit: DeviceFit, programs: list[Program]) -> _Unknown:
        if not programs:
            return cls([], np.zeros((0, 0)), np.zeros(0))
        return cls(programs, *fit.model.covariance(programs))

    def variance(self, sums: Floats) -> Floats:
        """Variance of sums (Q, M) of the times (Q,), both over what they are compared with."""
        wide = sums * widened(np.diag(self.law) + self.noise)
        return np.asarray(((wide @ self.law) * wide).sum(axis=1) + wide**2 @ self.noise)


def _contenders(planner: Planner[Any, Any], problem: Problem[Any]) -> list[Forecast]:
    """The plan, what is decided from low prices, the decisions close to both, and the baselines."""
    choice = planner.decide(problem)
    decisions = [choice.decision, *choice.near.values()]
    decisions += [d for d in planner.baselines(problem).values() if not isinstance(d, str)]
    sources = [_Low(s) if isinstance(s, FittedSource) else s for s in problem.costs.sources]
    book = problem.costs
    cheap = CostBook(sources, given=book.given)
    low = dataclasses.replace(problem, costs=cheap)
    try:
        bold = planner.decide(low)
        decisions += [bold.decision, *bold.near.values()]
    except (InfeasibleError, MissingDataError):  # a limit on time that follows from the prices
        pass
    found: list[Forecast] = []
    for k, decision in enumerate(decisions):
        if decision in decisions[:k]:
            continue
        try:
            found.append(Forecast.of(planner, problem, decision))
        except (InfeasibleError, MissingDataError):
            if k == 0:
                raise
    return found


class _Low:
    """What a fit gives: timed tasks as they are, the rest at the low end of the interval."""

    def __init__(self, source: FittedSource) -> None:
        self._source = source

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device``."""
        found = self._source.estimate(work, device)
        if found is None or found.source == "measured":
            return found
        return Estimate.exact(found.low_s, found.source)

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Price programs at once."""
        self._source.prepare(programs, device)


def _by_device(
    forecast: Forecast, costs: CostBook, devices: Mapping[str, str]
) -> dict[tuple[Program, str], float]:
    """Busy seconds of programs on devices, known by their profiles."""
    found: dict[tuple[Program, str], float] = {}
    for (program, label), seconds in forecast.program_seconds(costs).items():
        profile = devices.get(label)
        if profile is not None:
            found[program, profile] = found.get((program, profile), 0.0) + seconds
    return found


def _stakes(
    log_s: Floats, shares: Mapping[str, Floats], unknown: Mapping[str, _Unknown]
) -> dict[str, Floats]:
    """Rows: the plan's time, then its ratio to each contender's, scaled by how open it is."""
    ratios = {profile: share - share[:1] for profile, share in shares.items()}
    variance = sum((unknown[k].variance(r) for k, r in ratios.items()), np.zeros(len(log_s)))
    away = np.abs(log_s - log_s[0]) / np.sqrt(np.maximum(variance, 1e-12))
    normal = NormalDist()
    open_ = np.sqrt([2.0 * normal.cdf(-float(z)) for z in away])
    return {
        profile: np.concatenate([shares[profile][:1], ratios[profile][1:] * open_[1:, None]])
        for profile in shares
    }
