"""Lower bounds on stages without listing them.

For a stage in mode m (``_stage_modes``) over layers ``[a, b)`` and a linear cost ``s``, any
``mu >= 0`` gives::

    min cost >= sum_i min_v (s_iv + mu . c_iv) - mu . cap      c = (prefill, decode, memory)

where the cap on memory is the stage's room. Prefix sums make that O(1) a stage and multiplier. A
pool of multipliers per mode is tuned on the
stages that turn up in cheapest chains (-> ``_stage_tuning``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled


@compiled
def layer_minima(scalar: Any, costs: Any, pool: Any, sizes: Any) -> Any:
    """Least priced cost of every layer, as prefix sums.

    Args:
        scalar: ``[M, L, V]`` cost of a layer, ``inf`` if unavailable.
        costs: ``[M, 3, L, V]`` prefill, decode, memory.
        pool: ``[M, G, 3]`` multipliers.
        sizes: ``[M]`` how many of them are set.

    Returns:
        ``[M, G, L+1]``; layers without any variant count 0 (callers rule them out).
    """
    n_modes, n_layers, n_variants = scalar.shape
    out = np.zeros((n_modes, pool.shape[1], n_layers + 1))
    for k in range(n_modes):
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
    room: Any,
) -> Any:
    """Lower bound of every stage, ``inf`` where caps rule it out.

    Args:
        minima: from :func:`layer_minima`.
        least: ``[M, 3, L+1]`` prefix sums of the least prefill, decode and memory of a layer.
        blocked: ``[M, L+1]`` prefix counts of layers without a variant.
        edges: ``[M, 3, 3]`` extras (every stage, first, last) by quantity in the last axis; no
            memory, which is taken off the room.
        edge_scalar: ``[M, 3]`` their scalar cost.
        pool: ``[M, G, 3]`` multipliers.
        sizes: ``[M]`` how many of them are set.
        caps: ``[2]`` on prefill and decode.
        room: ``[M, L, L+1]`` on memory.

    Returns:
        ``bound[M, L, L+1]``.
    """
    n_modes, n_layers = least.shape[0], least.shape[2] - 1
    bound = np.full((n_modes, n_layers, n_layers + 1), np.inf)
    for k in range(n_modes):
        for a in range(n_layers):
            stop = a + 1
            while stop <= n_layers and _fits(k, a, stop, least, blocked, edges, caps):
                stop += 1
            inner = min(stop, n_layers)
            row = bound[k, a]
            for b in range(a + 1, stop):
                # Prefix sums round; what is within rounding of the room stays in.
                need = least[k, 2, b] - least[k, 2, a]
                if need <= room[k, a, b] + 1e-12 * least[k, 2, b]:
                    row[b] = -np.inf
            for g in range(sizes[k]):
                base, mu = -minima[k, g, a], pool[k, g, 2]
                for q in range(2):
                    if pool[k, g, q] > 0:
                        extra = edges[k, 0, q] + (edges[k, 1, q] if a == 0 else 0.0)
                        base += pool[k, g, q] * (extra - caps[q])
                # By element, so that the processor takes several boundaries at a time.
                if mu > 0:
                    for b in range(a + 1, inner):
                        value = minima[k, g, b] + base - mu * room[k, a, b]
                        row[b] = value if value > row[b] else row[b]
                else:
                    for b in range(a + 1, inner):
                        value = minima[k, g, b] + base
                        row[b] = value if value > row[b] else row[b]
                if stop > n_layers:
                    value = minima[k, g, n_layers] + base
                    if mu > 0:
                        value -= mu * room[k, a, n_layers]
                    for q in range(2):
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
    for q in range(2):
        extra = edges[k, 0, q]
        if a == 0:
            extra += edges[k, 1, q]
        if b == least.shape[2] - 1:
            extra += edges[k, 2, q]
        need = least[k, q, b] - least[k, q, a] + extra
        # Prefix sums round; what is within rounding of the cap stays in.
        if not need <= caps[q] + 1e-12 * (least[k, q, b] + extra):
            return False
    return True
