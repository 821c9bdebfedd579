"""Cheapest chain of stages for given stage costs: one scalar dynamic programme over nodes.

A node is ``(f, u, k, i)``: type ``f`` of the first stage (one pass without return hops), index
``u`` of the vector of used devices per type (mixed radix, ``used[u, k]``), type ``k`` of the last
stage and layer boundary ``i``. Costs are scalars in seconds; ``inf`` forbids. Of types that are not
counted (`CountedDevices`) any number may be used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.solvers._chain_devices import CountedDevices, counted_devices
from foreplan.solvers.chain_problem import FloatArray, IntArray

MOST_NODES = 10_000_000
"""Nodes of one pass (8 bytes each): 13 devices of each of four types over 80 layers, 0.05 s."""
_PRICES = 60
"""Rounds of prices where more nodes would be needed."""


@compiled
def _ends(arc: Any) -> Any:
    """First and last end ``[K, L]`` of the stages from each start that are not forbidden."""
    n_types, n_layers = arc.shape[0], arc.shape[1]
    low = np.full((n_types, n_layers), n_layers + 1)
    high = np.zeros((n_types, n_layers), dtype=np.int64)
    for k in range(n_types):
        for a in range(n_layers):
            for b in range(a + 1, n_layers + 1):
                if arc[k, a, b] < np.inf:
                    low[k, a] = min(low[k, a], b)
                    high[k, a] = b
    return low, high


@compiled
def _complete(
    arc: Any, hop: Any, back: Any, low: Any, high: Any, used: Any, stride: Any, node: Any,
    opening: Any,
) -> None:  # fmt: skip
    """One pass over all nodes, used vectors innermost: a processor takes several at once.

    Args:
        arc: as in `completion_costs`.
        hop: likewise.
        back: ``[K]`` cost of the return hop from the last type.
        low: from `_ends`.
        high: likewise.
        used: as in `completion_costs`.
        stride: likewise.
        node: ``[K, L+1, U]``, filled with the cost to complete after a last stage on k that ends at
            i, of several stages; unlike that of `completion_costs` also of nodes with more stages
            than layers.
        opening: ``[K, U + max stride]``, filled with the same before a stage on k that starts at 0.
            A vector that lacks a type, and one beyond the last, is forbidden by ``inf``: that is
            what adding a device leads to where none is left.
    """
    n_types, n_layers, n_used = arc.shape[0], arc.shape[1], used.shape[0]
    opening[:] = np.inf
    for k in range(n_types):
        for u in range(n_used):
            there = stride[k] == 0 or used[u, k] > 0
            node[k, n_layers, u] = back[k] if there else np.inf
    for a in range(n_layers - 1, -1, -1):
        for k in range(n_types):
            best = opening[k, :n_used]
            best[:] = np.inf
            b, last = low[k, a], high[k, a]
            if a == 0 and last == n_layers:  # a single stage, which has no return hop
                last -= 1
                for u in range(n_used):
                    if stride[k] == 0 or used[u, k] > 0:
                        best[u] = arc[k, 0, n_layers]
            while b + 1 <= last:
                here, there = arc[k, a, b], arc[k, a, b + 1]
                first, second = node[k, b], node[k, b + 1]
                for u in range(n_used):
                    best[u] = min(best[u], min(here + first[u], there + second[u]))
                b += 2
            if b == last:
                here, first = arc[k, a, b], node[k, b]
                for u in range(n_used):
                    best[u] = min(best[u], here + first[u])
        if a == 0:
            break
        for k in range(n_types):
            best = node[k, a]
            best[:] = np.inf
            for j in range(n_types):
                if hop[k, j] == np.inf:
                    continue
                here, first = hop[k, j], opening[j, stride[j] :]
                for u in range(n_used):
                    best[u] = min(best[u], here + first[u])
            for u in range(n_used):
                if stride[k] > 0 and used[u, k] == 0:
                    best[u] = np.inf


@compiled
def completion_costs(
    arc: Any, hop: Any, back: Any, by_first: bool, used: Any, stride: Any, counts: Any
) -> Any:
    """Cheapest completion from every node.

    Args:
        arc: ``[K, L, L+1]`` cost of a stage on type k over layers ``[a, b)``.
        hop: ``[K, K]`` cost of a hop between stages.
        back: ``[K, K]`` cost of the return hop from last to first type.
        by_first: whether ``back`` depends on the first type; if not, one pass serves them all.
        used: ``[U, K]`` of `CountedDevices`.
        stride: ``[K]`` likewise.
        counts: ``[K]`` devices a type.

    Returns:
        ``node[F, U, K, L+1]`` cost to complete after a last stage on k ending at i; ``inf`` where
        nothing does, or the used devices cannot have got there. At the end that is the return hop,
        which a single stage has not.
    """
    n_types, n_layers, n_used = arc.shape[0], arc.shape[1], used.shape[0]
    low, high = _ends(arc)
    passes = n_types if by_first else 1
    node = np.full((passes, n_used, n_types, n_layers + 1), np.inf)
    one = np.empty((n_types, n_layers + 1, n_used))
    opening = np.empty((n_types, n_used + stride.max()))
    for f in range(passes):
        if counts[f] == 0 and by_first:
            continue
        _complete(arc, hop, back[:, f], low, high, used, stride, one, opening)
        for u in range(n_used):
            total = used[u].sum()
            if by_first and stride[f] > 0 and used[u, f] == 0:
                continue
            for k in range(n_types):
                if stride[k] > 0 and used[u, k] == 0:
                    continue
                for i in range(max(total, 1), n_layers + 1):
                    node[f, u, k, i] = one[k, i, u]
    return node


def cheapest_path(
    arc: FloatArray, hop: FloatArray, back: FloatArray, by_first: bool, counts: IntArray
) -> tuple[float, IntArray, CountedDevices]:
    """One cheapest chain; of equals that of the first first type, then of the earliest ends.

    Devices are counted of no more types than it takes for the cheapest chain to keep to the counts:
    chains that use too many are only more chains, so that what is first among all of them is first
    among those that there are devices for.

    Args:
        arc: as in :func:`completion_costs`, like the other arguments.
        hop: costs between stages.
        back: costs of the return hop; a single stage has none.
        by_first: whether it differs by first type.
        counts: devices a type.

    Returns:
        Its cost (``inf`` if there is none), rows ``[S, 3]`` of (type, start, end), and the devices
        that had to be counted. Where even that takes more than `MOST_NODES`: a bound on its cost,
        and a cheap chain, which may use too many devices of a type.
    """
    devices = counted_devices(counts, every=False)
    most = MOST_NODES / (arc.shape[0] * (arc.shape[1] + 1))
    while True:
        cost, path = _cheapest(arc, hop, back, by_first, devices.used, devices.stride, counts)
        lacking = devices.lacking(path[:, 0])
        if lacking is None:
            return float(cost), path, devices
        more = devices.counting(lacking, most)
        if more is None:
            known = (float(cost), path)
            return (*_priced(arc, hop, back, by_first, counts, known), devices)
        devices = more


def _priced(
    arc: FloatArray, hop: FloatArray, back: FloatArray, by_first: bool, counts: IntArray,
    known: tuple[float, IntArray],
) -> tuple[float, IntArray]:  # fmt: skip
    """Bound and chain where devices cannot be counted: those used too often are given a price.

    Whatever the prices, no chain costs less than the cheapest with them, less those of all devices
    that there are (Lagrange); they move by the devices that the cheapest chain uses too many of.

    Args:
        arc: as in `cheapest_path`, like the other arguments.
        hop: costs between stages.
        back: costs of the return hop.
        by_first: whether it differs by first type.
        counts: devices a type.
        known: a bound, and a chain that uses too many devices.
    """
    (bound, path), within = known, math.inf
    none = counted_devices(counts, every=False)
    prices = np.zeros(len(counts))
    scale = max(bound, 1e-300) / max(len(path), 1)
    for step in range(_PRICES):
        paid = arc + prices[:, None, None]
        cost, found = _cheapest(paid, hop, back, by_first, none.used, none.stride, counts)
        bound = max(bound, float(cost - prices @ counts))
        excess = np.bincount(found[:, 0], minlength=len(counts)) - counts
        worth = float(cost - prices @ (excess + counts))
        if (excess <= 0).all() and worth < within:
            path, within = found, worth
        prices = np.maximum(prices + scale * excess / (1 + step), 0.0)
    return min(bound, within), path


@compiled
def _cheapest(
    arc: Any, hop: Any, back: Any, by_first: bool, used: Any, stride: Any, counts: Any
) -> Any:
    """As `cheapest_path`, with more devices than there are of types that are not counted.

    Where the return hop depends on the first type, a pass with every type's cheapest return bounds
    what a chain costs that starts on any type: passes of types that cannot win are left out.
    """
    n_types, n_layers, n_used = arc.shape[0], arc.shape[1], used.shape[0]
    low, high = _ends(arc)
    node = np.empty((n_types, n_layers + 1, n_used))
    opening = np.empty((n_types, n_used + stride.max()))
    least = back[:, 0].copy()
    if by_first:
        for k in range(n_types):
            least[k] = back[k].min()
    _complete(arc, hop, least, low, high, used, stride, node, opening)
    cost, first = np.inf, -1
    floor = np.full(n_types, np.inf)
    for j in range(n_types):
        if counts[j] > 0:
            floor[j] = opening[j, stride[j]]
            if floor[j] < cost:
                cost, first = floor[j], j
    path = np.empty((n_layers, 3), dtype=np.int64)
    if first == -1:
        return cost, path[:0]
    size = 0
    if not by_first:
        size = _walk(arc, hop, first, low, high, used, stride, counts, node, path)
        return cost, path[:size]
    cost, first = np.inf, -1
    while True:
        j = int(np.argmin(floor))
        if floor[j] == np.inf or floor[j] > cost:
            return cost, path[:size]
        _complete(arc, hop, back[:, j], low, high, used, stride, node, opening)
        own = opening[j, stride[j]]
        floor[j] = np.inf
        if own < cost or (own == cost and own < np.inf and j < first):
            cost, first = own, j
            size = _walk(arc, hop, first, low, high, used, stride, counts, node, path)


@compiled
def _walk(
    arc: Any, hop: Any, first: int, low: Any, high: Any, used: Any, stride: Any, counts: Any,
    node: Any, path: Any,
) -> int:  # fmt: skip
    """Write the cheapest chain that starts on a type into ``path``; returns its length."""
    n_types, n_layers = arc.shape[0], arc.shape[1]
    k, a, u, size = first, 0, stride[first], 0
    while True:
        end, found = -1, np.inf
        for b in range(a + 1, n_layers + 1):
            single = a == 0 and b == n_layers
            value = arc[k, a, b] + (0.0 if single else node[k, b, u])
            if value < found:
                found, end = value, b
        path[size, 0], path[size, 1], path[size, 2] = k, a, end
        size += 1
        if end == n_layers:
            return size
        a = end
        found, following = np.inf, -1
        for j in range(n_types):
            if (stride[j] == 0 or used[u, j] < counts[j]) and hop[k, j] < np.inf:
                opening = np.inf
                for b in range(low[j, a], high[j, a] + 1):
                    opening = min(opening, arc[j, a, b] + node[j, b, u + stride[j]])
                value = hop[k, j] + opening
                if value < found:
                    found, following = value, j
        k = following
        u += stride[k]


@compiled
def through_costs(arc: Any, hop: Any, by_first: bool, used: Any, stride: Any, node: Any) -> Any:
    """Cheapest whole chain through every stage, without the stage's own cost.

    Args:
        arc: as in :func:`completion_costs`, like the other arguments.
        hop: costs between stages.
        by_first: whether passes differ by first type.
        used: as there.
        stride: as there.
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
                    if stride[k] > 0 and used[u, k] == 0:
                        continue
                    # Cost of everything before a stage on k that starts at a.
                    before = np.inf
                    if a == 0:
                        if u == stride[k] and (not by_first or k == f):
                            before = 0.0
                    else:
                        v = u - stride[k]
                        for j in range(n_types):
                            if stride[j] == 0 or used[v, j] > 0:
                                before = min(before, reach[v, j, a] + hop[j, k])
                    if before == np.inf:
                        continue
                    for b in range(a + 1, n_layers + 1):
                        single = a == 0 and b == n_layers
                        rest = before + (0.0 if single else node[f, u, k, b])
                        through[k, a, b] = min(through[k, a, b], rest)
                        value = before + arc[k, a, b]
                        reach[u, k, b] = min(reach[u, k, b], value)
    return through
