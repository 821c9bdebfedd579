"""Linear forms that say early that an open stage ends too dear: what keeps tables small.

By ``_stage_bound``, ``(s + mu . c)`` over the layers so far plus the least of it over the rest is a
bound on the whole stage for every ``mu``; one tuned on the stage bounds the beginning best, its
multiples bound the ends of stages that have used more or less of a cap than usual.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.solvers._stage_tuning import choose, tune, with_ends, with_room

_FACTORS = np.array(
    [
        [0.3, 1.0, 1.0],
        [1.0, 0.3, 1.0],
        [1.0, 1.0, 0.3],
        [3.0, 1.0, 1.0],
        [1.0, 3.0, 1.0],
        [1.0, 1.0, 3.0],
        [0.3, 0.3, 1.0],
        [3.0, 3.0, 1.0],
    ]
)
"""Multiples of tuned multipliers that are tried besides."""


@compiled
def tune_arcs(
    arcs: Any, scalar: Any, costs: Any, edges: Any, edge_scalar: Any, caps: Any, room: Any
) -> Any:  # fmt: skip
    """Lower bounds ``[N]`` on the costs of single stages, by multipliers of their own.

    Args:
        arcs: ``[N, 3]`` mode, start and end.
        scalar: ``[M, L, V]`` cost of a layer, ``inf`` if unavailable.
        costs: ``[M, 3, L, V]`` prefill, decode, memory.
        edges: ``[M, 3, 3]`` extras (every stage, first, last) by quantity in the last axis.
        edge_scalar: ``[M, 3]`` their scalar cost.
        caps: ``[2]`` on prefill and decode.
        room: ``[M, L, L+1]`` on memory.
    """
    values = np.empty(len(arcs))
    for i in range(len(arcs)):
        k, a, b = arcs[i, 0], arcs[i, 1], arcs[i, 2]
        first, last = a == 0, b == scalar.shape[1]
        extra, value = with_ends(edges[k], first, last), with_ends(edge_scalar[k], first, last)
        own = with_room(caps, room[k, a, b])
        mu = tune(scalar[k, a:b], costs[k, :, a:b], extra, own)
        choice, sums = np.zeros(b - a, dtype=np.int64), np.zeros(3)
        value += choose(scalar[k, a:b], costs[k, :, a:b], mu, choice, sums)
        for q in range(3):
            if mu[q] > 0:
                value += mu[q] * (extra[q] - own[q])
        values[i] = value
    return values


@compiled
def stage_forms(
    slack: Any,
    margin: Any,
    weights: Any,
    scalar: Any,
    costs: Any,
    edges: Any,
    edge_scalar: Any,
    caps: Any,
    room: Any,
    blocked: Any,
) -> Any:
    """Forms for every mode and start, tuned on the stages with the widest margins.

    Args:
        slack: ``[M, L, L+1]`` largest value at which stage (a, b) is worth keeping, ``-inf`` if
            never.
        margin: ``[M, L, L+1]`` how far its bound is below that.
        weights: ``[5]`` linear form over label columns behind ``scalar``.
        scalar: as in :func:`tune_arcs`, like the others.
        costs: see there.
        edges: see there.
        edge_scalar: see there.
        caps: see there.
        room: see there.
        blocked: ``[M, L+1]`` prefix counts of layers without a variant.

    Returns:
        ``[M, L, G, 5]`` forms, the first of them ``weights``, and ``[M, L, G, L+1]`` the largest
        value of each over an open stage that can still close within its slack.
    """
    n_modes, n_layers = slack.shape[0], slack.shape[1]
    n_forms = 3 + len(_FACTORS)
    forms = np.zeros((n_modes, n_layers, n_forms, 5))
    tops = np.full((n_modes, n_layers, n_forms, n_layers + 1), -np.inf)
    minima = np.zeros(n_layers + 1)
    for k in range(n_modes):
        for a in range(n_layers):
            ends = np.full(2, -1)
            for b in range(a + 1, n_layers + 1):
                if slack[k, a, b] > -np.inf:
                    if ends[0] == -1 or margin[k, a, b] > margin[k, a, ends[0]]:
                        ends[1] = ends[0]
                        ends[0] = b
                    elif ends[1] == -1 or margin[k, a, b] > margin[k, a, ends[1]]:
                        ends[1] = b
            if ends[0] == -1:
                continue
            mus = np.zeros((n_forms, 3))
            for j in range(2):
                b = ends[j] if ends[j] != -1 else ends[0]
                extra = with_ends(edges[k], a == 0, b == n_layers)
                own = with_room(caps, room[k, a, b])
                mus[1 + j] = tune(scalar[k, a:b], costs[k, :, a:b], extra, own)
            for j in range(len(_FACTORS)):
                mus[3 + j] = mus[1] * _FACTORS[j]
            for g in range(n_forms):
                last, shift = edge_scalar[k, 2], 0.0
                for r in range(5):
                    forms[k, a, g, r] = weights[r]
                for q in range(3):
                    if mus[g, q] > 0:
                        forms[k, a, g, q] += mus[g, q]
                        last += mus[g, q] * edges[k, 2, q]
                        if q < 2:
                            shift += mus[g, q] * caps[q]
                for e in range(a, n_layers):
                    least = np.inf
                    for v in range(scalar.shape[2]):
                        if scalar[k, e, v] < np.inf:
                            value = scalar[k, e, v]
                            for q in range(3):
                                value += mus[g, q] * costs[k, q, e, v]
                            least = min(least, value)
                    minima[e + 1] = least
                best = -np.inf
                for b in range(n_layers, a, -1):
                    if b < n_layers:
                        best = (
                            -np.inf if blocked[k, b + 1] > blocked[k, b] else best - minima[b + 1]
                        )
                    if slack[k, a, b] > -np.inf:
                        closed = slack[k, a, b] + shift - (last if b == n_layers else 0.0)
                        if mus[g, 2] > 0:
                            closed += mus[g, 2] * room[k, a, b]
                        best = max(best, closed)
                    tops[k, a, g, b] = best + 1e-12 * abs(best) + 1e-300 if best > -np.inf else best
    return forms, tops
