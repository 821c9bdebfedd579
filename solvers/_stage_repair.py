"""Good stages without searching: what multipliers choose on a chain, repaired to meet its caps."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.solvers._stage_tuning import choose, tune, with_ends, with_room


@compiled
def tune_path(
    path: Any,
    scalar: Any,
    costs: Any,
    omega: Any,
    cost2: Any,
    edges: Any,
    edge_scalar: Any,
    caps: Any,
    room: Any,
    minima: Any,
    bound: Any,
    pool: Any,
    sizes: Any,
    wins: Any,
) -> Any:
    """Tune multipliers for every stage of a chain, and lift what bounds these stages.

    Args:
        path: ``[S, 3]`` mode, start and end of each stage.
        scalar: ``[M, L, V]`` cost of a layer, ``inf`` if unavailable.
        costs: ``[M, 3, L, V]`` prefill, decode, memory.
        omega: ``[L, V]``; likewise ``cost2``.
        cost2: see ``omega``.
        edges: ``[M, 3, 3]`` extras (every stage, first, last) by quantity in the last axis.
        edge_scalar: ``[M, 3]`` their scalar cost.
        caps: ``[2]`` on prefill and decode.
        room: ``[M, L, L+1]`` on memory.
        minima: from ``layer_minima``.
        bound: ``[M, L, L+1]`` bounds of stages, lifted in place.
        pool: ``[M, G, 3]`` multipliers; better ones join it, in place of the least used.
        sizes: ``[M]`` how many of them are set; changed in place.
        wins: ``[M, G]`` how often each gave the best bound of a stage; changed in place.

    Returns:
        Rows ``[S, 5]`` of what the multipliers choose, which need not meet the caps; the
        multipliers ``[S, 3]``.
    """
    size, places = len(path), pool.shape[1]
    chosen, tuned = np.empty((size, 5)), np.empty((size, 3))
    for s in range(size):
        k, a, b = path[s, 0], path[s, 1], path[s, 2]
        first, last = a == 0, b == omega.shape[0]
        extra, flat = with_ends(edges[k], first, last), with_ends(edge_scalar[k], first, last)
        own = with_room(caps, room[k, a, b])
        mu = tune(scalar[k, a:b], costs[k, :, a:b], extra, own)
        choice, sums = np.zeros(b - a, dtype=np.int64), extra.copy()
        value = choose(scalar[k, a:b], costs[k, :, a:b], mu, choice, sums)
        for q in range(3):
            tuned[s, q] = mu[q]
            if mu[q] > 0:
                value += mu[q] * (extra[q] - own[q])
        _fill(chosen, s, sums, choice, omega[a:b], cost2[a:b])
        best, g = -np.inf, 0
        for j in range(sizes[k]):
            known = minima[k, j, b] - minima[k, j, a]
            for q in range(3):
                if pool[k, j, q] > 0:
                    known += pool[k, j, q] * (extra[q] - own[q])
            if known > best:
                best, g = known, j
        wins[k, g] += 1
        if value > best + 1e-6 * abs(bound[k, a, b]):
            if sizes[k] < places:
                g = sizes[k]
                sizes[k] += 1
            else:
                g = 1 + int(np.argmin(wins[k, 1:]))
            for q in range(3):
                pool[k, g, q] = mu[q]
            wins[k, g] = 1
        more = value + flat - bound[k, a, b]
        if more > 0:
            bound[k, a, b] += more
    return chosen, tuned


@compiled
def repair_path(
    path: Any, scalar: Any, costs: Any, omega: Any, cost2: Any, edges: Any, caps: Any, room: Any,
    tuned: Any,
) -> Any:  # fmt: skip
    """Choose variants that meet the caps for every stage of a chain.

    Args:
        path: as in :func:`tune_path`, like the others.
        scalar: see there.
        costs: see there.
        omega: see there.
        cost2: see there.
        edges: see there.
        caps: see there.
        room: see there.
        tuned: ``[S, 3]`` multipliers of each stage.

    Returns:
        Variants ``[L]``, rows ``[S, 5]``, and how many stages meet their caps.
    """
    rows, variants = np.empty((len(path), 5)), np.zeros(omega.shape[0], dtype=np.int64)
    fitting = 0
    for s in range(len(path)):
        k, a, b = path[s, 0], path[s, 1], path[s, 2]
        extra = with_ends(edges[k], a == 0, b == omega.shape[0])
        own = with_room(caps, room[k, a, b])
        choice, fits = repair(scalar[k, a:b], costs[k, :, a:b], extra, own, tuned[s])
        fitting += fits
        for i in range(b - a):
            variants[a + i] = choice[i]
            for q in range(3):
                extra[q] += costs[k, q, a + i, choice[i]]
        _fill(rows, s, extra, choice, omega[a:b], cost2[a:b])
    return variants, rows, fitting


@compiled
def _fill(rows: Any, s: int, sums: Any, choice: Any, omega: Any, cost2: Any) -> None:
    """Write one stage's row."""
    for q in range(3):
        rows[s, q] = sums[q]
    rows[s, 3], rows[s, 4] = 0.0, 0.0
    for i in range(len(choice)):
        rows[s, 3] += omega[i, choice[i]]
        rows[s, 4] += cost2[i, choice[i]]


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
        value = choose(scalar, costs, mu, choice, sums)
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
