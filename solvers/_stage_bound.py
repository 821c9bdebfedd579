"""Lower bounds on stages without listing them.

For a stage on type k over layers ``[a, b)`` and a linear cost ``s``, any ``mu >= 0`` gives::

    min cost >= sum_i min_v (s_iv + mu . c_iv) - mu . cap      c = (prefill, decode, memory)

Prefix sums make that O(1) a stage and multiplier. A pool of multipliers per type is tuned on the
stages that turn up in cheapest chains (-> :func:`tune`).
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
        ``bound[K, L, L+1]``.
    """
    n_types, n_layers = least.shape[0], least.shape[2] - 1
    bound = np.full((n_types, n_layers, n_layers + 1), np.inf)
    for k in range(n_types):
        for a in range(n_layers):
            stop = a + 1
            while stop <= n_layers and _fits(k, a, stop, least, blocked, edges, caps):
                stop += 1
            inner = min(stop, n_layers)
            row = bound[k, a]
            for b in range(a + 1, stop):
                row[b] = -np.inf
            for g in range(sizes[k]):
                base = -minima[k, g, a]
                for q in range(3):
                    if pool[k, g, q] > 0:
                        extra = edges[k, 0, q] + (edges[k, 1, q] if a == 0 else 0.0)
                        base += pool[k, g, q] * (extra - caps[k, q])
                # By element, so that the processor takes several boundaries at a time.
                for b in range(a + 1, inner):
                    value = minima[k, g, b] + base
                    row[b] = value if value > row[b] else row[b]
                if stop > n_layers:
                    value = minima[k, g, n_layers] + base
                    for q in range(3):
                        if pool[k, g, q] > 0:
                            value += pool[k, g, q] * edges[k, 2, q]
                    row[n_layers] = max(row[n_layers], value)
            scalar = edge_scalar[k, 0] + (edge_scalar[k, 1] if a == 0 else 0.0)
            for b in range(a + 1, stop):
                row[b] += scalar
            if stop > n_layers:
                row[n_layers] += edge_scalar[k, 2]
    return bound


@compiled
def _fits(k: int, a: int, b: int, least: Any, blocked: Any, edges: Any, caps: Any) -> bool:
    """Whether layers ``[a, b)`` may meet the caps; once they do not, no longer stage does."""
    if blocked[k, b] > blocked[k, a]:
        return False
    for q in range(3):
        extra = edges[k, 0, q]
        if a == 0:
            extra += edges[k, 1, q]
        if b == least.shape[2] - 1:
            extra += edges[k, 2, q]
        need = least[k, q, b] - least[k, q, a] + extra
        # Prefix sums round; what is within rounding of the cap stays in.
        if not need <= caps[k, q] + 1e-12 * (least[k, q, b] + extra):
            return False
    return True


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
                value = choose(scalar, costs, mu, choice, sums)
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
