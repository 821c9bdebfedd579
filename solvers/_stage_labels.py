"""Undominated ways to run a stage: label extension layer by layer.

A label is one variant choice for the layers ``[a, e)`` of a stage, summed up as the row
``(prefill_s, decode_s, memory_bytes, omega, cost2)``, of memory the layers' own. Layers with
identical costs are interchangeable up to omega: labels with the same counts of (layer class,
variant) then have the same key, and only the one with the least omega is kept, which is exact for
any omega. Other labels are compared component by component.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled

PREFILL, DECODE, MEMORY, OMEGA, COST2 = range(5)
"""Columns of a label."""

_NEAR = 64
"""Comparisons a label has to survive; more only removes more, never changes the optimum."""


@compiled
def copy_row(target: Any, i: int, source: Any, j: int) -> None:
    """``target[i] = source[j]``, by element: numba takes seconds to compile array assignments."""
    for q in range(source.shape[1]):
        target[i, q] = source[j, q]


@compiled
def doubled(array: Any) -> Any:
    """A copy of a vector with twice the room."""
    out = np.empty(2 * len(array), array.dtype)
    for i in range(len(array)):
        out[i] = array[i]
    return out


@compiled
def doubled_rows(array: Any) -> Any:
    """A copy of a matrix with room for twice the rows."""
    out = np.empty((2 * len(array), array.shape[1]), array.dtype)
    for i in range(len(array)):
        copy_row(out, i, array, i)
    return out


@compiled
def undominated(points: Any) -> Any:
    """Indices of rows that no earlier-sorted row beats in every component.

    Args:
        points: ``[N, Q]``; less is better.

    Returns:
        Indices in ascending order of the first component; a superset of the Pareto set.
    """
    order = np.argsort(points[:, 0])
    kept = np.empty(len(order), dtype=np.int64)
    front = np.empty(len(order), dtype=np.int64)
    size = 0
    width = points.shape[1]
    for position in range(len(order)):
        i = order[position]
        beaten = False
        for j in range(min(size, _NEAR)):
            other = front[j]
            beaten = True
            for q in range(width):
                if points[other, q] > points[i, q]:
                    beaten = False
                    break
            if beaten:
                # Rows that beat much move to the front, where they are met early.
                front[j] = front[j // 2]
                front[j // 2] = other
                break
        if not beaten:
            kept[size] = i
            if size < _NEAR:
                front[size] = i
            else:
                front[_NEAR // 2 + size % (_NEAR // 2)] = i
            size += 1
    return kept[:size]


@compiled
def _slot(table: Any, keys: Any, rows: Any, key: Any, row: Any) -> Any:
    """Find the label with this key in an open-addressing table, or the free slot for it."""
    mask = len(table) - 1
    place = np.int64(key & np.uint64(mask))
    while True:
        found = table[place]
        if found == -1:
            return place, -1
        if keys[found] == key:
            # Equal keys mean equal counts; the comparison guards against a hash collision.
            same = True
            for q in (PREFILL, DECODE, MEMORY, COST2):
                if abs(rows[found, q] - row[q]) > 1e-9 * (abs(row[q]) + 1e-300):
                    same = False
            if same:
                return place, found
        place = (place + 1) & mask


@compiled
def extend_stages(
    start: int,
    stop: int,
    first: Any,
    last: Any,
    prefill: Any,
    decode: Any,
    memory: Any,
    omega: Any,
    cost2: Any,
    codes: Any,
    caps: Any,
    room: Any,
    floors: Any,
    headroom: Any,
    separate: Any,
    theta: float,
    weights: Any,
    ceilings: Any,
    slack: Any,
    max_labels: int,
) -> Any:
    """All undominated stages of one mode (``_stage_modes``) that start at one layer.

    Args:
        start: first layer a.
        stop: largest end to consider.
        first: ``[2]`` prefill and decode that every stage from here starts with.
        last: ``[2]`` extras of the stage that ends at L.
        prefill: ``[L, V]`` of the mode; ``inf`` if not available. Likewise ``decode``, ``memory``.
        decode: see ``prefill``.
        memory: see ``prefill``.
        omega: ``[L, V]``.
        cost2: ``[L, V]``.
        codes: ``[L, V]`` uint64 random words, equal for layers of the same class.
        caps: ``[2]`` largest stage prefill and decode of interest.
        room: ``[5, L+1]`` on memory, by boundary e: most of a stage that ends at e; most of an open
            stage; the least of any end from e on; what a stage that ends at e must exceed, because
            a wider mode has the others; the least of that from e on.
        floors: ``[2]`` prefill and decode below which a stage is never the bottleneck.
        headroom: ``[3, L+1]`` the most that layers ``e..stop`` can still add (prefill, decode,
            memory), by boundary e.
        separate: ``[3]`` bool: does omega / decode / cost2 count on its own in comparisons.
        theta: weight of omega where it does not.
        weights: ``[G, 5]`` linear forms over label columns that bound the whole chain.
        ceilings: ``[G, L+1]`` largest value of each form worth keeping, by boundary.
        slack: ``[L+1]`` largest value of the first form over a whole stage, by end.
        max_labels: labels, open stages included, beyond which to give up.

    Returns:
        Ends ``[N]``, rows ``[N, 5]`` and history index ``[N]`` of the stages, in order of end; the
        history as ``parent`` and ``variant``; whether it gave up.
    """
    n_layers, n_variants = prefill.shape
    out_end = np.empty(256, dtype=np.int64)
    out_row = np.empty((256, 5))
    out_history = np.empty(256, dtype=np.int64)
    n_out = 0
    parent = np.empty(1024, dtype=np.int64)
    variant = np.empty(1024, dtype=np.int8)
    n_history = 0
    rows = np.zeros((1, 5))
    for q in range(2):
        rows[0, q] = first[q]
    keys = np.zeros(1, dtype=np.uint64)
    history = np.full(1, -1, dtype=np.int64)
    for e in range(start, stop):
        size = len(rows) * n_variants
        next_rows = np.empty((size, 5))
        next_keys = np.empty(size, dtype=np.uint64)
        next_parent = np.empty(size, dtype=np.int64)
        next_variant = np.empty(size, dtype=np.int8)
        n_slots = 4
        while n_slots < 2 * size:
            n_slots *= 2
        table = np.full(n_slots, -1, dtype=np.int64)
        row = np.empty(5)
        n_next = 0
        for i in range(len(rows)):
            for v in range(n_variants):
                row[PREFILL] = rows[i, PREFILL] + prefill[e, v]
                row[DECODE] = rows[i, DECODE] + decode[e, v]
                row[MEMORY] = rows[i, MEMORY] + memory[e, v]
                if not (
                    row[PREFILL] <= caps[0]
                    and row[DECODE] <= caps[1]
                    and row[MEMORY] <= room[1, e + 1]
                ):
                    continue
                if row[MEMORY] + headroom[2, e + 1] <= room[4, e + 1]:
                    continue
                row[OMEGA] = rows[i, OMEGA] + omega[e, v]
                row[COST2] = rows[i, COST2] + cost2[e, v]
                hopeless = False
                for g in range(len(weights)):
                    value = 0.0
                    for q in range(5):
                        value += weights[g, q] * row[q]
                    if value > ceilings[g, e + 1]:
                        hopeless = True
                        break
                if hopeless:
                    continue
                key = keys[i] + codes[e, v]
                place, found = _slot(table, next_keys, next_rows, key, row)
                if found == -1:
                    table[place] = n_next
                    found = n_next
                    n_next += 1
                elif next_rows[found, OMEGA] <= row[OMEGA]:
                    continue
                for q in range(5):
                    next_rows[found, q] = row[q]
                next_keys[found] = key
                next_parent[found] = history[i]
                next_variant[found] = v
        if n_next == 0:
            break
        points = np.empty((n_next, 5))
        for i in range(n_next):
            _point(points, next_rows, i, separate, theta, room, floors, headroom, e + 1)
        chosen = undominated(points)
        if n_history + len(chosen) > max_labels:
            return out_end[:0], out_row[:0], out_history[:0], parent[:0], variant[:0], True
        while n_history + len(chosen) > len(parent):
            parent = doubled(parent)
            variant = doubled(variant)
        rows = np.empty((len(chosen), 5))
        keys = np.empty(len(chosen), dtype=np.uint64)
        history = np.empty(len(chosen), dtype=np.int64)
        for j in range(len(chosen)):
            i = chosen[j]
            copy_row(rows, j, next_rows, i)
            keys[j] = next_keys[i]
            history[j] = n_history
            parent[n_history] = next_parent[i]
            variant[n_history] = next_variant[i]
            n_history += 1
        # Close the stage here: memory no longer matters, and nothing can be added any more.
        closing = np.empty((len(rows), 5))
        closed = np.empty((len(rows), 5))
        inside = np.empty(len(rows), dtype=np.int64)
        n_inside = 0
        for j in range(len(rows)):
            copy_row(closed, n_inside, rows, j)
            fits = room[3, e + 1] < rows[j, MEMORY] <= room[0, e + 1]
            if e + 1 == n_layers:
                for q in range(2):
                    closed[n_inside, q] += last[q]
                    if not closed[n_inside, q] <= caps[q]:
                        fits = False
            if len(weights) > 0:
                value = 0.0
                for q in range(5):
                    value += weights[0, q] * closed[n_inside, q]
                if value > slack[e + 1]:
                    fits = False
            if fits:
                _point(closing, closed, n_inside, separate, theta, room, floors, headroom, -1)
                inside[n_inside] = j
                n_inside += 1
        if n_inside == 0:
            continue
        best = undominated(closing[:n_inside])
        while n_out + len(best) > len(out_end):
            out_end = doubled(out_end)
            out_history = doubled(out_history)
            out_row = doubled_rows(out_row)
        for j in range(len(best)):
            out_end[n_out] = e + 1
            copy_row(out_row, n_out, closed, best[j])
            out_history[n_out] = history[inside[best[j]]]
            n_out += 1
    return (
        out_end[:n_out],
        out_row[:n_out],
        out_history[:n_out],
        parent[:n_history],
        variant[:n_history],
        False,
    )


@compiled
def _point(
    points: Any,
    rows: Any,
    i: int,
    separate: Any,
    theta: float,
    room: Any,
    floors: Any,
    headroom: Any,
    boundary: int,
) -> None:
    """Write what label i is compared by, levelling what can no longer matter.

    ``boundary`` is where the open stage stands, -1 if it is closed.
    """
    more_p = headroom[0, boundary] if boundary >= 0 else 0.0
    more_d = headroom[1, boundary] if boundary >= 0 else 0.0
    if separate[0]:
        points[i, 0] = rows[i, PREFILL]
        points[i, 1] = rows[i, OMEGA]
    else:
        points[i, 0] = rows[i, PREFILL] + theta * rows[i, OMEGA]
        # Prefill on its own only matters once the stage may be the bottleneck.
        points[i, 1] = max(rows[i, PREFILL], floors[0] - more_p)
    points[i, 2] = rows[i, DECODE] if separate[1] else max(rows[i, DECODE], floors[1] - more_d)
    points[i, 3] = rows[i, COST2] if separate[2] else 0.0
    points[i, 4] = 0.0
    if boundary >= 0:
        points[i, 4] = max(rows[i, MEMORY], room[2, boundary] - headroom[2, boundary])
