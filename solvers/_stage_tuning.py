"""The multipliers that bound one stage best: see ``_stage_bound`` for what they are.

The bound ``g(mu)`` is concave and piecewise linear; its gradient is what the chosen variants exceed
the caps by. Along one multiplier the maximum lies where two tangents cut (:func:`_along`), and the
mixture of both sides' choices that meets that cap exactly is a gradient of the maximum as a
function of the other multipliers. If the mixture meets the other caps too, it solves the stage's
linear relaxation and nothing is left to gain. Else pairs of multipliers are searched, one inside
the other (:func:`_across`): one at a time stops at the first ridge, far below where two caps act.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled

_ENOUGH = 1e-9
"""Relative gain and excess that count as none."""
_CUTS = 14
"""Points tried along one multiplier; the bound holds wherever the search ends."""


@compiled
def with_ends(by_place: Any, first: bool, last: bool) -> Any:
    """What a stage costs beside its layers, of what every, the first and the last one has."""
    found = by_place[0] + 0.0
    if first:
        found = found + by_place[1]
    if last:
        found = found + by_place[2]
    return found


@compiled
def with_room(caps: Any, room: float) -> Any:
    """``[3]`` caps of a stage, of those on prefill and decode and of its room."""
    found = np.empty(3)
    found[0], found[1], found[2] = caps[0], caps[1], room
    return found


@compiled
def choose(scalar: Any, costs: Any, mu: Any, choice: Any, sums: Any) -> float:
    """Cheapest variants under multipliers; fills choice and adds to sums; the priced total."""
    total = 0.0
    for i in range(scalar.shape[0]):
        best = np.inf
        for v in range(scalar.shape[1]):
            if scalar[i, v] < np.inf:
                value = scalar[i, v]
                for q in range(3):
                    value += mu[q] * costs[q, i, v]
                if value < best:
                    best = value
                    choice[i] = v
        total += best
        for q in range(3):
            sums[q] += costs[q, i, choice[i]]
    return total


@compiled
def tune(scalar: Any, costs: Any, extra: Any, caps: Any) -> Any:
    """Multipliers that bound one stage well.

    Args:
        scalar: ``[n, V]`` cost of the stage's layers on its type.
        costs: ``[3, n, V]`` prefill, decode, memory.
        extra: ``[3]`` extras of the stage.
        caps: ``[3]`` caps, ``inf`` if none.

    Returns:
        ``[3]``.
    """
    mu, mixture = np.zeros(3), np.zeros(3)
    choice = np.zeros(scalar.shape[0], dtype=np.int64)
    value = -np.inf
    for _ in range(3):
        before = value
        for q in range(3):
            if caps[q] < np.inf:
                value = _along(q, scalar, costs, extra, caps, mu, choice, mixture)
                if _settled(mu, mixture, caps):
                    return mu
        if value - before <= _ENOUGH * abs(value):
            break
    for _ in range(2):
        before = value
        for p in range(3):
            for q in range(p):
                if caps[p] < np.inf and caps[q] < np.inf:
                    value = _across(p, q, scalar, costs, extra, caps, mu, choice, mixture)
                    if _settled(mu, mixture, caps):
                        return mu
        if value - before <= _ENOUGH * abs(value):
            break
    return mu


@compiled
def _settled(mu: Any, mixture: Any, caps: Any) -> bool:
    """Whether a mixture of choices meets all caps, exactly where a multiplier acts."""
    for q in range(3):
        if caps[q] < np.inf:
            excess = mixture[q] if mu[q] == 0.0 else abs(mixture[q])
            if excess > 1e-7 * caps[q]:
                return False
    return True


@compiled
def _along(
    q: int, scalar: Any, costs: Any, extra: Any, caps: Any, mu: Any, choice: Any, mixture: Any
) -> float:
    """Maximise over ``mu[q]``, in place; the maximum. ``mixture`` gets a gradient there."""
    ends = _no_ends()
    best_x, best_value = mu[q], -np.inf
    sums = np.empty(3)
    for _ in range(_CUTS):
        for r in range(3):
            sums[r] = extra[r]
        value = choose(scalar, costs, mu, choice, sums)
        for r in range(3):
            if mu[r] > 0:
                value += mu[r] * (extra[r] - caps[r])
            sums[r] -= caps[r]
        if value > best_value:
            best_x, best_value = mu[q], value
            for r in range(3):
                mixture[r] = sums[r]
        x = _next(ends, q, mu[q], value, sums, caps[q], best_value)
        if x < 0:
            break
        mu[q] = x
    mu[q] = best_x
    _mix(ends, q, caps, mixture)
    return best_value


@compiled
def _across(
    p: int, q: int, scalar: Any, costs: Any, extra: Any, caps: Any, mu: Any, choice: Any,
    mixture: Any,
) -> float:  # fmt: skip
    """Maximise over ``mu[p]`` and ``mu[q]`` together, in place; like :func:`_along`."""
    ends = _no_ends()
    best_p, best_q, best_value = mu[p], mu[q], -np.inf
    inner = np.zeros(3)
    for _ in range(_CUTS):
        value = _along(q, scalar, costs, extra, caps, mu, choice, inner)
        if value > best_value:
            best_p, best_q, best_value = mu[p], mu[q], value
            for r in range(3):
                mixture[r] = inner[r]
        x = _next(ends, p, mu[p], value, inner, caps[p], best_value)
        if x < 0:
            break
        mu[p] = x
    mu[p], mu[q] = best_p, best_q
    _mix(ends, p, caps, mixture)
    return best_value


@compiled
def _no_ends() -> Any:
    """``[2, 5]`` nearest points left and right of a maximum: x, value, gradient; none yet."""
    ends = np.zeros((2, 5))
    ends[0, 0], ends[1, 0] = -1.0, np.inf
    return ends


@compiled
def _next(
    ends: Any, q: int, x: float, value: float, gradient: Any, cap: float, best_value: float
) -> float:
    """Take in a point; where to look next along ``q``, or -1 where nothing is left to gain."""
    slope = gradient[q]
    side = -1
    if slope > 0 and x > ends[0, 0]:
        side = 0
    elif slope < 0 and x < ends[1, 0]:
        side = 1
    if side >= 0:
        ends[side, 0], ends[side, 1] = x, value
        for r in range(3):
            ends[side, 2 + r] = gradient[r]
    # A slope within rounding of zero would throw the multiplier to infinity.
    if abs(slope) <= _ENOUGH * cap or (slope < 0 and x == 0.0):
        return -1.0
    left_x, left_value, left_slope = ends[0, 0], ends[0, 1], ends[0, 2 + q]
    right_x = ends[1, 0]
    cut: float = _crossing(left_x, left_value, left_slope, right_x, ends[1, 1], ends[1, 2 + q])
    if cut != 0.0 and not left_x < cut < right_x:
        return -1.0
    if left_x >= 0 and right_x < np.inf:
        peak = left_value + left_slope * (cut - left_x)
        if peak <= best_value + _ENOUGH * abs(best_value):
            return -1.0
    return cut


@compiled
def _mix(ends: Any, q: int, caps: Any, mixture: Any) -> None:
    """The mixture of both ends' gradients that is flat along ``q``, where both are known."""
    if ends[0, 0] >= 0 and ends[1, 0] < np.inf:
        share = ends[0, 2 + q] / (ends[0, 2 + q] - ends[1, 2 + q])
        for r in range(3):
            mixed = (1 - share) * ends[0, 2 + r] + share * ends[1, 2 + r]
            mixture[r] = mixed if caps[r] < np.inf else 0.0


@compiled
def _crossing(
    left_x: float,
    left_value: float,
    left_slope: float,
    right_x: float,
    right_value: float,
    right_slope: float,
) -> float:
    """Where two tangents cut; further out, or 0, while one of them is not known."""
    if left_x < 0:
        return 0.0
    if right_x == np.inf:
        return max(2 * left_x, left_x + (0.1 * abs(left_value) + 1e-300) / left_slope)
    cut = right_value - left_value + left_slope * left_x - right_slope * right_x
    return cut / (left_slope - right_slope)
