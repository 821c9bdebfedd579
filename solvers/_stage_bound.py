"""Lower bounds on stages without listing them, and good stages without searching.

For a stage on type k over layers ``[a, b)`` and a linear cost ``s``, any ``mu >= 0`` gives::

    min cost >= sum_i min_v (s_iv + mu . c_iv) - mu . cap      c = (prefill, decode, memory)

Prefix sums make that O(1) a stage and multiplier. A pool of multipliers per type is tuned on the
stages that turn up in cheapest chains (-> :func:`tune`); :func:`repair` turns a tuned multiplier
into a stage that meets its caps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled


@compiled
def layer_minima(scalar: Any, costs: Any, pool: Any, sizes: Any) -> Any:
    """Least priced cost of every layer, as prefix sums.

    Args:
        scalar: ``[K, L, V]`` cost of a layer, ``inf`` if unavailable.
        costs: ``[K, 3, L, V]`` prefill, decode, memory.
        pool: ``[K, G, 3]`` multipliers.
        sizes: ``[K]`` how many of them are set.

    Returns:
        ``[K, G, L+1]``; layers without any variant count 0 (callers rule them out).
    """
    n_types, n_layers, n_variants = scalar.shape
    out = np.zeros((n_types, pool.shape[1], n_layers + 1))
    for k in range(n_types):
        for g in range(sizes[k]):
            for i in range(n_layers):
                best = np.inf
                for v in range(n_variants):
                    if scalar[k, i, v] < np.inf:
                        value = scalar[k, i, v]
                        for q in range(3):
                            value += pool[k, g, q] * costs[k, q, i, v]
                        best = min(best, value)
                out[k, g, i + 1] = out[k, g, i] + (best if best < np.inf else 0.0)
    return out


@compiled
def bound_stages(
    minima: Any,
    least: Any,
    blocked: Any,
    edges: Any,
    edge_scalar: Any,
    pool: Any,
    sizes: Any,
    caps: Any,
) -> Any:
    """Lower bound of every stage, ``inf`` where caps rule it out.

    Args:
        minima: from :func:`layer_minima`.
        least: ``[K, 3, L+1]`` prefix sums of the least prefill, decode and memory of a layer.
        blocked: ``[K, L+1]`` prefix counts of layers without a variant.
        edges: ``[K, 3, 3]`` extras (every stage, first, last) by quantity in the last axis.
        edge_scalar: ``[K, 3]`` their scalar cost.
        pool: ``[K, G, 3]`` multipliers.
        sizes: ``[K]`` how many of them are set.
        caps: ``[K, 3]`` on prefill, decode and memory.

    Returns:
        ``bound[K, L, L+1]`` and the index of the multiplier that gave it.
    """
    n_types, n_layers = least.shape[0], least.shape[2] - 1
    bound = np.full((n_types, n_layers, n_layers + 1), np.inf)
    winner = np.zeros((n_types, n_layers, n_layers + 1), dtype=np.int64)
    extra = np.empty(3)
    for k in range(n_types):
        shift = np.empty(sizes[k])
        for a in range(n_layers):
            for b in range(a + 1, n_layers + 1):
                if blocked[k, b] > blocked[k, a]:
                    break
                scalar = edge_scalar[k, 0]
                fits = True
                for q in range(3):
                    extra[q] = edges[k, 0, q]
                    if a == 0:
                        extra[q] += edges[k, 1, q]
                    if b == n_layers:
                        extra[q] += edges[k, 2, q]
                    need = least[k, q, b] - least[k, q, a] + extra[q]
                    # Prefix sums round; what is within rounding of the cap stays in.
                    if not need <= caps[k, q] + 1e-12 * (least[k, q, b] + extra[q]):
                        fits = False
                if not fits:
                    break
                if a == 0:
                    scalar += edge_scalar[k, 1]
                if b == n_layers:
                    scalar += edge_scalar[k, 2]
                best, at = -np.inf, 0
                for g in range(sizes[k]):
                    shift[g] = 0.0
                    for q in range(3):
                        if pool[k, g, q] > 0:
                            shift[g] += pool[k, g, q] * (extra[q] - caps[k, q])
                    value = minima[k, g, b] - minima[k, g, a] + shift[g]
                    if value > best:
                        best, at = value, g
                bound[k, a, b] = best + scalar
                winner[k, a, b] = at
    return bound, winner


@compiled
def _choose(scalar: Any, costs: Any, mu: Any, choice: Any, sums: Any) -> float:
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
    """Multipliers that bound one stage well: coordinate ascent by intersecting tangents.

    Args:
        scalar: ``[n, V]`` cost of the stage's layers on its type.
        costs: ``[3, n, V]`` prefill, decode, memory.
        extra: ``[3]`` extras of the stage.
        caps: ``[3]`` caps, ``inf`` if none.

    Returns:
        ``[3]``.
    """
    n = scalar.shape[0]
    mu = np.zeros(3)
    choice = np.zeros(n, dtype=np.int64)
    for _ in range(3):
        for q in range(3):
            if caps[q] == np.inf:
                continue
            left_x, left_value, left_slope = -1.0, 0.0, 0.0
            right_x, right_value, right_slope = np.inf, 0.0, 0.0
            best_x, best_value = mu[q], -np.inf
            for _ in range(14):
                sums = extra.copy()
                value = _choose(scalar, costs, mu, choice, sums)
                for r in range(3):
                    if mu[r] > 0:
                        value += mu[r] * (extra[r] - caps[r])
                if value > best_value:
                    best_x, best_value = mu[q], value
                slope = sums[q] - caps[q]
                x = mu[q]
                if slope > 0 and x > left_x:
                    left_x, left_value, left_slope = x, value, slope
                elif slope < 0 and x < right_x:
                    right_x, right_value, right_slope = x, value, slope
                # A slope within rounding of zero would throw the multiplier to infinity.
                if abs(slope) <= 1e-9 * caps[q] or (slope < 0 and x == 0.0):
                    break
                if left_x < 0:
                    mu[q] = 0.0
                elif right_x == np.inf:
                    lift = 0.1 * abs(left_value) + 1e-300
                    mu[q] = max(2 * left_x, left_x + lift / left_slope)
                else:
                    cross = right_value - left_value + left_slope * left_x - right_slope * right_x
                    mu[q] = cross / (left_slope - right_slope)
                    if not left_x < mu[q] < right_x:
                        break
                    if left_value + left_slope * (mu[q] - left_x) <= best_value * (1 + 1e-9):
                        break
            mu[q] = best_x
    return mu


@compiled
def repair(scalar: Any, costs: Any, extra: Any, caps: Any, start: Any) -> Any:
    """Variants of one stage that meet its caps, near the cheapest.

    Args:
        scalar: ``[n, V]`` cost of the stage's layers on its type.
        costs: ``[3, n, V]`` prefill, decode, memory.
        extra: ``[3]`` extras of the stage.
        caps: ``[3]`` caps, ``inf`` if none.
        start: ``[3]`` multipliers to start from.

    Returns:
        Variants ``[n]``, and whether they meet the caps.
    """
    n, n_variants = scalar.shape
    mu = start.copy()
    choice = np.zeros(n, dtype=np.int64)
    fits = False
    for _ in range(40):
        sums = extra.copy()
        value = _choose(scalar, costs, mu, choice, sums)
        fits = True
        for q in range(3):
            if sums[q] > caps[q]:
                fits = False
                push = 0.02 * abs(value) / max(sums[q], 1e-300)
                mu[q] = max(1.3 * mu[q], push)
        if fits:
            break
    if not fits:
        return choice, False
    for _ in range(4 * n):
        best, at, to = 0.0, -1, 0
        for i in range(n):
            for v in range(n_variants):
                change = scalar[i, v] - scalar[i, choice[i]]
                if change < best:
                    inside = True
                    for q in range(3):
                        if sums[q] + costs[q, i, v] - costs[q, i, choice[i]] > caps[q]:
                            inside = False
                    if inside:
                        best, at, to = change, i, v
        if at == -1:
            break
        for q in range(3):
            sums[q] += costs[q, at, to] - costs[q, at, choice[at]]
        choice[at] = to
    return choice, True


@compiled
def meet_budgets(
    choice: Any,
    stage: Any,
    scalar: Any,
    costs: Any,
    sums: Any,
    caps: Any,
    budgeted: Any,
    limits: Any,
) -> bool:
    """Change variants of a whole chain until its budgets hold, then lower its cost again.

    Args:
        choice: ``[L]`` variants, changed in place.
        stage: ``[L]`` stage of each layer.
        scalar: ``[L, V]`` cost of a layer on its device without the budgets' prices, ``inf`` if
            unavailable.
        costs: ``[3, L, V]`` prefill, decode, memory there.
        sums: ``[S, 3]`` these of each stage, extras included; changed in place.
        caps: ``[S, 3]`` their caps.
        budgeted: ``[2, L, V]`` omega and cost2.
        limits: ``[2]`` their limits, ``inf`` if none.

    Returns:
        Whether the budgets hold at the end.
    """
    n_layers, n_variants = scalar.shape
    spent = np.zeros(2)
    unit = np.ones(2)
    for r in range(2):
        for i in range(n_layers):
            spent[r] += budgeted[r, i, choice[i]]
        unit[r] = max(abs(spent[r] - limits[r]), 1e-300) if limits[r] < np.inf else 1.0
    for _ in range(8 * n_layers):
        over = 0.0
        for r in range(2):
            over += max(spent[r] - limits[r], 0.0) / unit[r]
        best, at, to = np.inf, -1, 0
        for i in range(n_layers):
            j = stage[i]
            for v in range(n_variants):
                if v == choice[i] or scalar[i, v] == np.inf:
                    continue
                after = 0.0
                for r in range(2):
                    new = spent[r] + budgeted[r, i, v] - budgeted[r, i, choice[i]]
                    after += max(new - limits[r], 0.0) / unit[r]
                change = scalar[i, v] - scalar[i, choice[i]]
                # While over budget: least cost per relief. Within: any saving that stays within.
                if over > 0:
                    if after >= over * (1 - 1e-9):
                        continue
                    value = change / (over - after)
                else:
                    if after > 0 or change >= 0:
                        continue
                    value = change
                if value >= best:
                    continue
                fits = True
                for q in range(3):
                    if sums[j, q] + costs[q, i, v] - costs[q, i, choice[i]] > caps[j, q]:
                        fits = False
                if fits:
                    best, at, to = value, i, v
        if at == -1:
            return over == 0.0
        for q in range(3):
            sums[stage[at], q] += costs[q, at, to] - costs[q, at, choice[at]]
        for r in range(2):
            spent[r] += budgeted[r, at, to] - budgeted[r, at, choice[at]]
        choice[at] = to
    held: bool = spent[0] <= limits[0] and spent[1] <= limits[1]
    return held


@compiled
def ceilings(slack: Any, minima: Any, blocked: Any, last: Any) -> Any:
    """Largest value of a linear form over an open stage that can still close within its slack.

    Args:
        slack: ``[L, L+1]`` largest value at which stage (a, b) is worth keeping, ``-inf`` if never.
        minima: ``[L+1]`` prefix sums of the least value of the form a layer.
        blocked: ``[L+1]`` prefix counts of layers without a variant.
        last: value of the extras of a stage that ends at L.

    Returns:
        ``[L, L+1]`` by start and boundary.
    """
    n_layers = slack.shape[0]
    out = np.full((n_layers, n_layers + 1), -np.inf)
    for a in range(n_layers):
        best = -np.inf
        for b in range(n_layers, a, -1):
            if b < n_layers:
                best -= minima[b + 1] - minima[b]
                if blocked[b + 1] > blocked[b]:
                    best = -np.inf
            best = max(best, slack[a, b] - (last if b == n_layers else 0.0))
            out[a, b] = best
    return out
