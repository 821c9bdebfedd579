"""How sure a choice is: the share of resampled worlds in which nothing beats it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreplan.planner.plan import Confidence
from foreplan.planner.predict import Forecast

DRAWS = 64


def confidence(
    chosen: Forecast, others: Mapping[str, Forecast], *, seed: int, draws: int = DRAWS
) -> Confidence:
    """Resample every price from its interval and count how often the choice stays the fastest.

    Args:
        chosen: the decision.
        others: alternatives that meet the same limits, by name.
        seed: of the draws.
        draws: number of draws.

    Returns:
        The probability, who wins most of the rest, and the two groups of prices whose uncertainty
        moves the comparison most (measure these next).
    """
    if not others:
        return Confidence(probability_best=1.0, draws=0)
    base = chosen.draws(draws, seed)
    rivals = {name: forecast.draws(draws, seed) for name, forecast in others.items()}
    stacked = np.stack(list(rivals.values()))
    best = base <= stacked.min(axis=0) * (1 + 1e-12)
    probability = float(best.mean())
    runner_up = None
    if probability < 1.0:
        wins = np.bincount(stacked.argmin(axis=0)[~best], minlength=len(rivals))
        runner_up = list(rivals)[int(wins.argmax())]
    closest = min(others, key=lambda name: others[name].total_s)
    doubtful = _doubtful(chosen, others[closest], seed)
    return Confidence(
        probability_best=probability, draws=draws, runner_up=runner_up, measure_next=doubtful
    )


def _doubtful(chosen: Forecast, rival: Forecast, seed: int) -> tuple[str, ...]:
    """The two groups whose resampling alone changes the difference to the rival most."""
    draws = 8
    moved: dict[str, float] = {}
    by_name = {str(group): g for g, group in enumerate(rival.groups)}
    heavy = np.argsort(-chosen.group_seconds())[:12]
    for g in heavy:
        name = str(chosen.groups[int(g)])
        difference = chosen.draws(draws, seed, only=int(g))
        if name in by_name:
            difference = difference - rival.draws(draws, seed, only=by_name[name])
        moved[name] = float(difference.std())
    ranked = sorted((n for n, s in moved.items() if s > 0), key=lambda n: (-moved[n], n))
    return tuple(ranked[:2])
