"""The multipliers of a box: those of budgets and of ``max(sum D, m max D)`` that bound it best.

The bound is concave in them (Lagrange): one multiplier is found by intersecting tangents, several
by cutting planes (``_chain_multipliers``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foreplan.solvers._chain_box import Box, Price, Pricing
from foreplan.solvers._chain_multipliers import next_multipliers

if TYPE_CHECKING:
    from foreplan.solvers._chain_search import Search

_FURTHEST = 10.0
"""Factor on multipliers up to which it is asked whether anything better lies so far away."""


def ascend(search: Search, pricing: Pricing, box: Box) -> Price:
    """Improve the multipliers of a box, by line search or cutting planes."""
    problem = search.model.problem
    m = problem.decode_microbatches
    lam, u, w = box.multipliers
    if m == 1:
        lam = 1.0
    elif not search.model.sums_decode:
        lam = 0.0
    best = search.price(pricing, box, (lam, u, w))
    active = []
    if problem.max_omega is not None:
        active.append(1)
    if problem.max_cost2 is not None:
        active.append(2)
    if search.model.sums_decode and m > 1:
        active.append(0)
    if len(active) <= 1 or box.multipliers == (0.0, 0.0, 0.0):
        for c in active:
            if best.bound < min(search.stop, pricing.target):
                best = _line(search, pricing, box, best, c)
    if len(active) > 1:
        best = _cut(search, pricing, box, best, active)
    return best


def _cut(search: Search, pricing: Pricing, box: Box, start: Price, active: list[int]) -> Price:
    """Maximise the concave bound over several multipliers by cutting planes."""
    best, prices, spread = start, [start], 2.0
    # Without a table the stages' own bounds are coarser than that.
    worth = 1e-3 if box.view is None else 1e-4
    left = 15
    while left > 0 and best.bound < min(search.stop, pricing.target):
        found = next_multipliers(prices, best, active, spread)
        if found is None:
            break
        if found[1] - best.bound <= worth * abs(best.bound):
            # Nothing nearby; tangents are above the bound, so that far away is quickly known.
            if spread > _FURTHEST:
                break
            spread *= 4
            continue
        left -= 1
        price = search.price(pricing, box, found[0])
        prices.append(price)
        if price.bound > best.bound:
            best, spread = price, 2 * spread
    return best


def _line(search: Search, pricing: Pricing, box: Box, start: Price, c: int) -> Price:
    """Maximise the concave bound along one multiplier by intersecting tangents."""
    top = 1.0 if c == 0 else math.inf
    best, left, right = start, None, None
    current = start
    for _ in range(12):
        x, slope = current.multipliers[c], current.slope[c]
        if slope > 0:
            if left is None or x > left.multipliers[c]:
                left = current
        elif slope < 0 and (right is None or x < right.multipliers[c]):
            right = current
        if slope == 0 or (slope > 0 and x >= top) or (slope < 0 and x <= 0):
            break
        if left is None:
            following = 0.0
        elif right is None:
            lift = min(search.stop, abs(left.bound) * 1.05 + 1e-12) - left.bound
            following = min(top, max(2 * x, x + lift / left.slope[c]))
        else:
            a, b = left.multipliers[c], right.multipliers[c]
            rise, fall = left.slope[c], right.slope[c]
            following = (right.bound - left.bound + rise * a - fall * b) / (rise - fall)
            if not a < following < b:
                break
            crest = left.bound + rise * (following - a)
            if crest - best.bound <= (1e-4 if box.view is None else 1e-5) * abs(best.bound):
                break
        multipliers = list(current.multipliers)
        multipliers[c] = following
        current = search.price(pricing, box, (multipliers[0], multipliers[1], multipliers[2]))
        if current.bound > best.bound:
            best = current
        if best.bound >= min(search.stop, pricing.target):
            break
    return best
