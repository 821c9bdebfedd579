"""Cheapest chain of stages for given stage costs: one scalar dynamic programme over nodes.

A node is ``(f, u, k, i)``: type ``f`` of the first stage (one pass without return hops), index
``u`` of the vector of used devices per type (mixed radix, ``used[u, k]``), type ``k`` of the last
stage and layer boundary ``i``. Costs are scalars in seconds; ``inf`` forbids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.solvers.chain_problem import IntArray


def used_vectors(counts: IntArray) -> tuple[IntArray, IntArray]:
    """All vectors of used devices.

    Args:
        counts: ``[K]`` devices a type.

    Returns:
        ``used[U, K]`` and ``stride[K]``: adding a device of type k adds ``stride[k]`` to the index.
    """
    grids = np.meshgrid(*[np.arange(c + 1) for c in counts], indexing="ij")
    used = np.stack([g.ravel() for g in grids], axis=1).astype(np.int64)
    stride = np.array(
        [int(np.prod(counts[k + 1 :] + 1)) for k in range(len(counts))], dtype=np.int64
    )
    return used, stride


@compiled
def completion_costs(
    arc: Any, hop: Any, back: Any, by_first: bool, used: Any, stride: Any, counts: Any
) -> Any:
    """Cheapest completion from every node.

    Args:
        arc: ``[K, L, L+1]`` cost of a stage on type k over layers ``[a, b)``.
        hop: ``[K, K]`` cost of a hop between stages.
        back: ``[K, K]`` cost of the return hop from last to first type; a single stage has none.
        by_first: whether ``back`` depends on the first type; if not, one pass serves them all.
        used: ``[U, K]`` from :func:`used_vectors`.
        stride: ``[K]`` from :func:`used_vectors`.
        counts: ``[K]`` devices a type.

    Returns:
        ``node[F, U, K, L+1]`` cost to complete after a last stage on k ending at i, and
        ``opening[F, U, K, L]`` the same before a stage on k (already in u) that starts at i.
    """
    n_types, n_layers = arc.shape[0], arc.shape[1]
    n_used = used.shape[0]
    passes = n_types if by_first else 1
    node = np.full((passes, n_used, n_types, n_layers + 1), np.inf)
    opening = np.full((passes, n_used, n_types, n_layers), np.inf)
    low = np.full((n_types, n_layers), n_layers + 1)
    high = np.zeros((n_types, n_layers), dtype=np.int64)
    for k in range(n_types):
        for a in range(n_layers):
            for b in range(a + 1, n_layers + 1):
                if arc[k, a, b] < np.inf:
                    low[k, a] = min(low[k, a], b)
                    high[k, a] = b
    total = np.empty(n_used, dtype=np.int64)
    for u in range(n_used):
        total[u] = used[u].sum()
    for f in range(passes):
        for u in range(n_used):
            if by_first and used[u, f] == 0:
                continue
            for k in range(n_types):
                if used[u, k] > 0:
                    node[f, u, k, n_layers] = back[k, f] if total[u] > 1 else 0.0
        for a in range(n_layers - 1, -1, -1):
            for u in range(n_used):
                if total[u] > a + 1 or (by_first and used[u, f] == 0):
                    continue
                for k in range(n_types):
                    if used[u, k] == 0:
                        continue
                    best = np.inf
                    for b in range(low[k, a], high[k, a] + 1):
                        value = arc[k, a, b] + node[f, u, k, b]
                        best = min(best, value)
                    opening[f, u, k, a] = best
            if a == 0:
                break
            for u in range(n_used):
                if total[u] > a or (by_first and used[u, f] == 0):
                    continue
                for k in range(n_types):
                    if used[u, k] == 0:
                        continue
                    best = np.inf
                    for j in range(n_types):
                        if used[u, j] < counts[j]:
                            value = hop[k, j] + opening[f, u + stride[j], j, a]
                            best = min(best, value)
                    node[f, u, k, a] = best
    return node, opening


@compiled
def cheapest_path(
    arc: Any,
    hop: Any,
    by_first: bool,
    stride: Any,
    counts: Any,
    used: Any,
    node: Any,
    opening: Any,
) -> Any:
    """Walk one cheapest chain.

    Args:
        arc: as in :func:`completion_costs`, like the other arguments.
        hop: costs between stages.
        by_first: whether passes differ by first type.
        stride: of the used vectors.
        counts: devices a type.
        used: the used vectors.
        node: result of :func:`completion_costs`.
        opening: result of :func:`completion_costs`.

    Returns:
        Its cost (``inf`` if there is none) and rows ``[S, 3]`` of (type, start, end).
    """
    n_types, n_layers = arc.shape[0], arc.shape[1]
    best = np.inf
    k, f = -1, 0
    for j in range(n_types):
        if counts[j] > 0:
            g = j if by_first else 0
            if opening[g, stride[j], j, 0] < best:
                best, k, f = opening[g, stride[j], j, 0], j, g
    path = np.empty((n_layers, 3), dtype=np.int64)
    if k == -1:
        return best, path[:0]
    a, u, size = 0, stride[k], 0
    while True:
        end, found = -1, np.inf
        for b in range(a + 1, n_layers + 1):
            value = arc[k, a, b] + node[f, u, k, b]
            if value < found:
                found, end = value, b
        path[size, 0], path[size, 1], path[size, 2] = k, a, end
        size += 1
        if end == n_layers:
            return best, path[:size]
        a = end
        found, following = np.inf, -1
        for j in range(n_types):
            if used[u, j] < counts[j]:
                value = hop[k, j] + opening[f, u + stride[j], j, a]
                if value < found:
                    found, following = value, j
        k = following
        u += stride[k]


@compiled
def through_costs(
    arc: Any, hop: Any, by_first: bool, used: Any, stride: Any, counts: Any, node: Any
) -> Any:
    """Cheapest whole chain through every stage, without the stage's own cost.

    Args:
        arc: as in :func:`completion_costs`, like the other arguments.
        hop: costs between stages.
        by_first: whether passes differ by first type.
        used: the used vectors.
        stride: of the used vectors.
        counts: devices a type.
        node: result of :func:`completion_costs`.

    Returns:
        ``[K, L, L+1]``: cost of the best chain that contains stage (k, a, b), minus that stage.
    """
    n_types, n_layers = arc.shape[0], arc.shape[1]
    n_used = used.shape[0]
    through = np.full((n_types, n_layers, n_layers + 1), np.inf)
    for f in range(node.shape[0]):
        reach = np.full((n_used, n_types, n_layers + 1), np.inf)
        for a in range(n_layers):
            for u in range(n_used):
                for k in range(n_types):
                    if used[u, k] == 0:
                        continue
                    # Cost of everything before a stage on k that starts at a.
                    before = np.inf
                    if a == 0:
                        if u == stride[k] and (not by_first or k == f):
                            before = 0.0
                    else:
                        v = u - stride[k]
                        for j in range(n_types):
                            if used[v, j] > 0:
                                before = min(before, reach[v, j, a] + hop[j, k])
                    if before == np.inf:
                        continue
                    for b in range(a + 1, n_layers + 1):
                        rest = before + node[f, u, k, b]
                        through[k, a, b] = min(through[k, a, b], rest)
                        value = before + arc[k, a, b]
                        reach[u, k, b] = min(reach[u, k, b], value)
    return through
