"""Best chain inside a box by label setting, pruned by completion bounds.

Exact where a scalar dynamic programme is not: hard budgets on omega and cost2, the decode law's
``max(sum D, m * max D)`` and the two bottlenecks themselves. A label is a chain that ends at a
node (see ``_chain_path``); it is dropped when its cost plus the node's cheapest completion
reaches the target, or when another label of its node is no worse in everything that counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.solvers._stage_labels import (
    COST2,
    DECODE,
    OMEGA,
    PREFILL,
    doubled,
    doubled_rows,
    undominated,
)

P_SUM, D_SUM, O_SUM, C_SUM, P_MAX, D_MAX = range(6)
"""Columns of a chain label."""


@compiled
def best_chain(
    arc_start: Any,
    arc_stop: Any,
    rows: Any,
    arc_cost: Any,
    hop_prefill: Any,
    hop_decode: Any,
    back_decode: Any,
    by_first: bool,
    used: Any,
    stride: Any,
    counts: Any,
    node: Any,
    further: Any,
    prices: Any,
    low: Any,
    high: Any,
    law: Any,
    multipliers: Any,
    limits: Any,
    least: Any,
    acts: Any,
    within: Any,
    target: float,
    constant: float,
    max_labels: int,
) -> Any:
    """Find the best chain whose bottlenecks lie in a box, if it is better than a target.

    Args:
        arc_start: ``[K, L, L+1]`` first label of each arc in ``rows``.
        arc_stop: ``[K, L, L+1]`` one past its last label.
        rows: ``[N, 5]`` stage labels.
        arc_cost: ``[K, L, L+1]`` least scalarised cost of each arc.
        hop_prefill: ``[K, K]`` seconds, ``inf`` if above the caps.
        hop_decode: ``[K, K]`` seconds, likewise.
        back_decode: ``[K, K]`` seconds, likewise.
        by_first: whether passes differ by first type.
        used: used vectors, as in ``_chain_path``.
        stride: of the used vectors.
        counts: devices a type.
        node: scalarised completion costs from ``completion_costs``.
        further: ``[G, ...]`` the same under other multipliers.
        prices: ``[G, 4]`` these multipliers, and their constant in the place of ``constant``.
        low: ``[2]`` least max P and max D of the box.
        high: ``[2]`` their largest values.
        law: ``(Mp - 1, n - 1, m, theta)``.
        multipliers: ``(lambda, u, w)`` behind ``arc_cost`` and ``node``.
        limits: ``[2]`` of omega and cost2.
        least: ``[2, L+1]`` least omega and cost2 of the layers from a boundary on.
        acts: ``[5]`` bool: do omega, sum D, cost2, max P, max D count on their own.
        within: ``[5]`` limits on the law's terms, ``inf`` for none; see ``_chain_within.Within``.
        target: chains at or above it are not looked for.
        constant: scalar that turns scalarised costs into bounds of the box.
        max_labels: labels beyond which to give up.

    Returns:
        ``(objective, rows [S, 4] of (type, start, end, label), labels spent, gave up)``; the
        objective is the target and there are no rows if nothing in the box is better.
    """
    n_types, n_layers = arc_cost.shape[0], arc_cost.shape[1]
    n_used = used.shape[0]
    lam, u_omega, u_cost2 = multipliers[0], multipliers[1], multipliers[2]
    p_rounds, d_rounds, m, theta = law[0], law[1], law[2], law[3]
    limited = within[2] < np.inf or within[3] < np.inf
    weight_d = d_rounds * lam
    weight_d_max = d_rounds * (1.0 - lam) * m
    weight_o = theta + u_omega
    longest_hop = 0.0
    for j in range(n_types):
        for k in range(n_types):
            if hop_decode[j, k] < np.inf:
                longest_hop = max(longest_hop, hop_decode[j, k])
            if back_decode[j, k] < np.inf:
                longest_hop = max(longest_hop, back_decode[j, k])
    capacity = 2048
    sums = np.empty((capacity, 6))
    came = np.empty((capacity, 2), dtype=np.int64)  # label before, stage label
    where = np.empty((capacity, 3), dtype=np.int64)  # type, start, end of the last stage
    follow = np.empty(capacity, dtype=np.int64)  # next label of the same node
    size = 0
    best, best_label = target, -1
    empty = np.zeros(6)
    for f in range(node.shape[0]):
        head = np.full((n_layers + 1, n_used, n_types), -1, dtype=np.int64)
        for a in range(n_layers):
            for u in range(n_used):
                for k in range(n_types):
                    # At a = 0 the one empty chain stands in for a node.
                    if a == 0:
                        if u != 0 or k != 0:
                            continue
                        alive = np.full(1, -1, dtype=np.int64)
                    else:
                        if head[a, u, k] == -1:
                            continue
                        # Sum D that can no longer exceed m max D is as good as none.
                        left = counts.sum() - used[u].sum()
                        spare = left * (high[1] + longest_hop) + longest_hop
                        alive = _alive(head[a, u, k], follow, sums, acts, theta, low, m, spare)
                    for j in range(n_types):
                        if used[u, j] >= counts[j] or (a == 0 and by_first and j != f):
                            continue
                        hop_p = 0.0 if a == 0 else hop_prefill[k, j]
                        hop_d = 0.0 if a == 0 else hop_decode[k, j]
                        if hop_p == np.inf or hop_d == np.inf:
                            continue
                        v = u + stride[j]
                        for b in range(a + 1, n_layers + 1):
                            if arc_cost[j, a, b] == np.inf:
                                continue
                            back = 0.0
                            rest = node[f, v, j, b]
                            if b == n_layers:
                                if a > 0:
                                    back = back_decode[j, f]
                                rest = weight_d * back if back < np.inf else np.inf
                            if rest == np.inf:
                                continue
                            for i in range(len(alive)):
                                label = alive[i]
                                so_far = empty if label == -1 else sums[label]
                                p = so_far[P_SUM] + hop_p
                                d = so_far[D_SUM] + hop_d
                                p_max = max(so_far[P_MAX], hop_p)
                                d_max = max(so_far[D_MAX], hop_d, back)
                                slack = best - constant - rest
                                slack -= p + weight_d * d + weight_o * so_far[O_SUM]
                                slack -= u_cost2 * so_far[C_SUM]
                                worse = p_rounds * max(p_max - low[0], 0.0)
                                worse += weight_d_max * max(d_max - low[1], 0.0)
                                if arc_cost[j, a, b] + worse >= slack:
                                    continue
                                for s in range(arc_start[j, a, b], arc_stop[j, a, b]):
                                    sp, sd = rows[s, PREFILL], rows[s, DECODE]
                                    if sp > high[0] or sd > high[1]:
                                        continue
                                    scalar = sp + weight_d * sd + weight_o * rows[s, OMEGA]
                                    scalar += u_cost2 * rows[s, COST2]
                                    new_p_max = max(p_max, sp)
                                    new_d_max = max(d_max, sd)
                                    worse = p_rounds * max(new_p_max - low[0], 0.0)
                                    worse += weight_d_max * max(new_d_max - low[1], 0.0)
                                    if scalar + worse >= slack:
                                        continue
                                    new_o = so_far[O_SUM] + rows[s, OMEGA]
                                    new_c = so_far[C_SUM] + rows[s, COST2]
                                    if new_o + least[0, b] > limits[0]:
                                        continue
                                    if new_c + least[1, b] > limits[1]:
                                        continue
                                    new_p = p + sp
                                    new_d = d + sd + back
                                    if limited:
                                        first = (new_p + p_rounds * new_p_max) * within[0]
                                        step = max(new_d, m * new_d_max) * within[1]
                                        if first > within[2] or step > within[3]:
                                            continue
                                    if b == n_layers:
                                        value = new_p + theta * new_o + p_rounds * new_p_max
                                        value += d_rounds * max(new_d, m * new_d_max)
                                        if limited:
                                            value = first + d_rounds * step
                                            value += theta * new_o + within[4]
                                        if value >= best:
                                            continue
                                        best, best_label = value, size
                                    elif _beyond(
                                        new_p, new_d, new_o, new_c,
                                        max(new_p_max - low[0], 0.0),
                                        m * max(new_d_max - low[1], 0.0),
                                        p_rounds, d_rounds, theta, prices, further, f, v, j, b,
                                        best,
                                    ):  # fmt: skip
                                        continue
                                    if size >= max_labels:
                                        return target, came[:0], size, True
                                    if size == capacity:
                                        capacity *= 2
                                        sums = doubled_rows(sums)
                                        came = doubled_rows(came)
                                        where = doubled_rows(where)
                                        follow = doubled(follow)
                                        so_far = empty if label == -1 else sums[label]
                                    sums[size, P_SUM] = new_p
                                    sums[size, D_SUM] = new_d
                                    sums[size, O_SUM] = new_o
                                    sums[size, C_SUM] = new_c
                                    sums[size, P_MAX] = new_p_max
                                    sums[size, D_MAX] = new_d_max
                                    came[size, 0] = label
                                    came[size, 1] = s
                                    where[size, 0] = j
                                    where[size, 1] = a
                                    where[size, 2] = b
                                    if b < n_layers:
                                        follow[size] = head[b, v, j]
                                        head[b, v, j] = size
                                    size += 1
    n_stages, label = 0, best_label
    while label != -1:
        n_stages += 1
        label = came[label, 0]
    chain = np.empty((n_stages, 4), dtype=np.int64)
    label = best_label
    while label != -1:
        n_stages -= 1
        for q in range(3):
            chain[n_stages, q] = where[label, q]
        chain[n_stages, 3] = came[label, 1]
        label = came[label, 0]
    return best, chain, size, False


@compiled
def _beyond(
    p: float,
    d: float,
    o: float,
    c: float,
    p_more: float,
    d_more: float,
    p_rounds: float,
    d_rounds: float,
    theta: float,
    prices: Any,
    further: Any,
    f: int,
    v: int,
    j: int,
    b: int,
    best: float,
) -> bool:
    """Whether some other multipliers show that no completion of a chain is better."""
    for g in range(len(prices)):
        lam = prices[g, 0]
        bound = p + p_rounds * p_more + d_rounds * (lam * d + (1.0 - lam) * d_more)
        bound += (theta + prices[g, 1]) * o + prices[g, 2] * c
        if bound + further[g, f, v, j, b] + prices[g, 3] >= best:
            return True
    return False


@compiled
def _alive(
    head: int,
    follow: Any,
    sums: Any,
    acts: Any,
    theta: float,
    low: Any,
    m: float,
    spare: float,
) -> Any:
    """Undominated labels of one node."""
    count, label = 0, head
    while label != -1:
        count += 1
        label = follow[label]
    ids = np.empty(count, dtype=np.int64)
    points = np.zeros((count, 6))
    count, label = 0, head
    while label != -1:
        row = sums[label]
        ids[count] = label
        points[count, 0] = row[P_SUM]
        if acts[0]:
            points[count, 1] = row[O_SUM]
        else:
            points[count, 0] += theta * row[O_SUM]
        d_max = max(row[D_MAX], low[1])
        if acts[1]:
            points[count, 2] = max(row[D_SUM], m * d_max - spare)
        if acts[2]:
            points[count, 3] = row[C_SUM]
        if acts[3]:
            points[count, 4] = max(row[P_MAX], low[0])
        if acts[4]:
            points[count, 5] = d_max
        count += 1
        label = follow[label]
    return ids[undominated(points)]
