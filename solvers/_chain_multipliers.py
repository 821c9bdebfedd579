"""Where to look next for the maximum of a concave function of few multipliers: cutting planes."""

from __future__ import annotations

import numpy as np

from foreplan.solvers._chain_box import Multipliers, Price
from foreplan.solvers._linear import least

_NONE = 1e-2
"""Share of what would lift the bound by a twentieth below which lambda is none yet: steps that are
factors of it would leave it there. Prices of budgets may be as small (measured: with them too, a
plan under both budgets stopped 0.9 % from its bound)."""
_WIDE = 30.0
"""Factor beyond which it grows anew: before that, nearby, it is left, as what has just been found
to be small is no mistake (measured: with the first step already, and prices of budgets too, a plan
of 96 devices stopped 1.4 % from its bound)."""


def next_multipliers(
    prices: list[Price], centre: Price, active: list[int], spread: float
) -> tuple[Multipliers, float] | None:
    """Maximise the least tangent of all prices so far, near the best one.

    Args:
        prices: evaluations of one box; their tangents lie above the function.
        centre: the best of them.
        active: which of lambda (0), u (1), w (2) may move.
        spread: each may grow or shrink by this factor, at least 1.

    Returns:
        Multipliers and the tangents' value there, an upper estimate of the maximum nearby; ``None``
        if the linear programme fails.
    """
    x = np.array([centre.multipliers[c] for c in active])
    slopes = np.array([[price.slope[c] for c in active] for price in prices])
    at = np.array([[price.multipliers[c] for c in active] for price in prices])
    values = np.array([price.bound for price in prices])
    top = np.array([1.0 if c == 0 else np.inf for c in active])
    # In units of its largest value, or of what would lift the bound by a twentieth, every
    # coordinate is about 1.
    lift = 0.05 * abs(centre.bound) / np.maximum(np.abs(slopes).max(axis=0), 1e-300)
    lift, most = np.minimum(lift, top), at.max(axis=0)
    none = np.array([_NONE if c == 0 and spread > _WIDE else 0.0 for c in active])
    unit = np.where(most > none * lift, most, lift)
    low, high = x / spread, np.maximum(x * spread, unit * (spread - 1))
    low[x < 1e-3 * unit] = 0.0
    high = np.minimum(high, top)
    # Columns: the coordinates in their units, then the value.
    rows = np.hstack([-slopes * unit, np.ones((len(prices), 1))])
    right = values - (slopes * at).sum(axis=1)
    scale = np.abs(rows).max(axis=1)
    result = least(
        np.array([0.0] * len(active) + [-1.0]),
        rows / scale[:, None],
        np.full(len(rows), -np.inf),
        right / scale,
        np.append(low / unit, -np.inf),
        np.append(high / unit, np.inf),
    )
    if result is None or not len(result.point):
        return None
    found = list(centre.multipliers)
    for c, value in zip(active, result.point[:-1] * unit, strict=True):
        found[c] = float(min(max(value, 0.0), 1.0 if c == 0 else value))
    return (found[0], found[1], found[2]), float(result.point[-1])
