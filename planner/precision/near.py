"""Precision plans one module away from the plan: which of them would win at other prices?

Those with less omega miss the target, most of them by little; those with more omega leave time over
and win where the plan itself comes late. Both are what a plan's confidence has to look at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.cost_models.schedule import IntArray
from foreplan.planner.precision.search import PrecisionSearch
from foreplan.planner.precision.spec import PrecisionDecision

#: Plans replayed, and kept of each sort.
REPLAYS, KEPT = 32, 3


def precision_near(
    search: PrecisionSearch, choices: Sequence[IntArray]
) -> dict[str, PrecisionDecision]:
    """Plans that differ in one module on one kind of device, by name.

    Args:
        search: that found the plan.
        choices: of the plan, one array a kind.

    Returns:
        Of those that fit: the quickest with less omega, and the least in omega with more.
    """
    s = search.situation
    base = _omega(search, choices)
    trials: dict[str, tuple[float, list[IntArray]]] = {}
    for k, choice in enumerate(choices):
        tables = s.devices[k].tables
        names = tables.names(choice)
        for i in tables.graph.adjustable:
            module = tables.graph.operators[i].module
            for option in tables.options[i]:
                if option.name == names[module]:
                    continue
                trial = [*choices[:k], tables.choice({**names, module: option.name})]
                trial += choices[k + 1 :]
                label = s.ranks[s.kinds[k][0]].label
                name = f"{module} at {option.name} on {label}"
                trials[name] = _omega(search, trial), trial
    # Evenly over the range of omega, so that both sides are seen on large networks too.
    ordered = sorted(trials, key=lambda name: trials[name][0])
    picked = np.linspace(0, len(ordered) - 1, min(REPLAYS, len(ordered))).round().astype(int)
    met: dict[str, bool] = {}
    better: list[tuple[float, str]] = []
    worse: list[tuple[float, str]] = []
    for name in (ordered[i] for i in dict.fromkeys(int(p) for p in picked)):
        omega, trial = trials[name]
        replayed = s.replay.run(s.each(trial))
        if not s.fits(replayed):
            continue
        met[name] = search.meets(replayed)
        if omega < base:
            better.append((replayed.iteration_s, name))
        elif omega > base and met[name]:
            worse.append((omega, name))
    kept = [*sorted(better)[:KEPT], *sorted(worse)[:KEPT]]
    return {
        name: s.decision(trials[name][1], search.omega, search.target_s, limits_met=met[name])
        for _, name in kept
    }


def _omega(search: PrecisionSearch, choices: Sequence[IntArray]) -> float:
    s = search.situation
    return sum(
        len(s.kinds[k]) * search.allocations[k].omega(choice) for k, choice in enumerate(choices)
    )
