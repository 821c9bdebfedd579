"""Entries of the buffers of a leaf: what they allocate, and how the leaf moves through each.

Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder import _leaf_names as names
from foreplan.cost_models.programs.encoder._leaf_lanes import MAX_DIMS, place, spans
from foreplan.cost_models.programs.encoder._leaf_loops import (
    BLOCK,
    THREAD_X,
    THREAD_YZ,
    VIRTUAL,
    buffer,
    common_loops,
    log,
    set_highest,
)
from foreplan.cost_models.programs.encoder._leaf_names import LINE_BYTES
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import INDIRECT, evaluate, touched
from foreplan.cost_models.programs.encoder._tir_walk import (
    BUFFER,
    INDICES,
    LOOPS,
    constant,
    member,
    size,
)

_LOADS = names.LOADS


@part
def allocation_entries(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, params: Any, buffers: Any, sizes: Any, touches: Any, found: int, leaves: Any,
    loops: Any, number: int, extents: Any, running: Any, everything: int, whole: Any, order: Any,
    length: int, state: Any, widths: Any, around: Any, out: Any,
) -> Any:  # fmt: skip
    """Fill the three entries of allocation, note the greatest size of each buffer in ``sizes``.

    ``widths`` (distinct, MAX_DIMS) gets the extents that each buffer is laid out with: those of its
    region for a buffer that the function allocates, which TVM makes as small as that, ``around``
    (distinct) the number of loops around such a buffer.

    Returns:
        Bytes of shared memory and of one thread's own memory that the leaf's buffers take.
    """
    count = leaves[number, LOOPS]
    zeros, highest = np.zeros(extents.size, dtype=np.int64), np.zeros(extents.size, dtype=np.int64)
    bound = False
    for loop in range(count):
        bound = bound or running[loop] in (BLOCK, THREAD_X, THREAD_YZ)
    # Allocation: what lives at once below the loops that are common to all users of the buffer.
    stored = shared = local = 0.0
    for slot in range(distinct):
        shape, width, _, scope = buffer(nodes, own[slot])
        entry = buffers[own[slot]]
        if entry < 0:
            continue
        if not params[own[slot]]:
            common = common_loops(loops, leaves, touches, found, entry, number)
            around[slot] = common
            mask = everything & ~((1 << common) - 1)
            for loop in range(count):
                kind = running[loop]
                if (scope == 0 and bound) or (
                    (scope == 1 and (kind in (THREAD_X, THREAD_YZ, VIRTUAL)))
                    or (scope == 2 and kind == VIRTUAL)
                ):
                    mask |= (1 << loop) & everything
                elif scope == 2 and (kind in (THREAD_X, THREAD_YZ)):
                    mask &= ~(1 << loop)
            set_highest(extents, count, mask, highest)
            evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
            bytes_now = (
                width
                * touched(
                    nodes, pool, accesses, many, own[slot], shape, mask, extents, count, state
                )[0]
            )
            spans(nodes, pool, accesses, many, own[slot], shape, state, widths[slot])
        else:
            bytes_now = width * whole[slot]
            for dim in range(min(MAX_DIMS, size(nodes, shape))):
                widths[slot, dim] = constant(nodes, member(nodes, pool, shape, dim), 1)
        sizes[entry] = max(sizes[entry], bytes_now)
        if not params[own[slot]]:
            if slot == 0:
                stored = bytes_now
            shared += bytes_now if scope == 1 else 0.0
            local += bytes_now if scope == 2 else 0.0
    out[0], out[1], out[2] = log(stored), log(shared), log(local)
    return shared, local


@part
def buffer_entries(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, count: int, extents: Any, everything: int, jobs: int, threads: int,
    total: float, whole: Any, per_level: Any, whole_run: Any, inner: int, lane: int, order: Any,
    length: int, state: Any, units: Any, requests: Any, widths: Any,
    out: Any,
) -> None:  # fmt: skip
    """Fill the entries of the stored buffer and of the loads with most distinct bytes."""
    at = 0
    zeros, highest = np.zeros(extents.size, dtype=np.int64), np.zeros(extents.size, dtype=np.int64)
    job_elements = np.zeros(distinct)
    thread_elements = np.zeros(distinct)
    for turn in range(2):
        mask = everything & ~jobs if turn == 0 else everything & ~jobs & ~threads
        set_highest(extents, count, mask, highest)
        evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
        for slot in range(distinct):
            shape = buffer(nodes, own[slot])[0]
            elements = touched(
                nodes, pool, accesses, many, own[slot], shape, mask, extents, count, state
            )[0]
            if turn == 0:
                job_elements[slot] = elements
            else:
                thread_elements[slot] = elements
    # Buffers: the stored one, then loads by distinct bytes.
    ranked = np.zeros(distinct, dtype=np.int64)  # an np.argsort takes seconds to compile
    for slot in range(distinct):
        turn = slot
        while turn > 0 and whole[ranked[turn - 1]] < whole[slot]:
            ranked[turn] = ranked[turn - 1]
            turn -= 1
        ranked[turn] = slot
    lane = inner if lane < 0 else lane
    filled = 0
    for turn in range(distinct + 1):
        slot = 0 if turn == 0 else ranked[turn - 1]
        if turn > 0 and slot == 0:
            continue
        if filled > _LOADS:
            break
        shape, width, _, scope = buffer(nodes, own[slot])
        together, indices, table = 0.0, 0, 0
        for item in range(many - 1, -1, -1):
            if accesses[item, BUFFER] == own[slot]:
                together += 1.0
                indices = accesses[item, INDICES]
                for dim in range(size(nodes, indices)):
                    table |= state[member(nodes, pool, indices, dim), 2]
        if filled > 0:
            out[at] = 1.0
            at += 1
        out[at] = 1.0 if scope == 1 else 0.0
        out[at + 1] = 1.0 if scope == 2 else 0.0
        out[at + 2] = 1.0 if table & INDIRECT else 0.0
        out[at + 3] = log(width)
        at += 4
        if filled > 0:
            out[at] = log(together)
            at += 1
        unique_bytes = whole[slot] * width
        out[at] = log(together * total * width)
        out[at + 1] = log(unique_bytes)
        out[at + 2] = log(job_elements[slot] * width)
        out[at + 3] = log(thread_elements[slot] * width)
        set_highest(extents, count, 0, highest)
        evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
        start = place(nodes, pool, indices, widths[slot], state)
        for item in range(2):
            loop = inner if item == 0 else lane
            if loop >= 0:
                highest[loop] = 1
                evaluate(
                    nodes, pool, alias, loop_of, highest, highest, order, length, state
                )  # fmt: skip
                met = place(nodes, pool, indices, widths[slot], state)
                out[at + 4 + item] = log(abs(met - start))
                highest[loop] = 0
        reuse, distance = 1.0, 0.0
        for loop in range(count - 1, -1, -1):
            if everything >> loop & 1 and extents[loop] > 1 and not table >> loop & 1:
                reuse, distance = extents[loop], per_level[loop + 1]
                break
        out[at + 6], out[at + 7] = log(reuse), log(distance)
        run = max(1.0, whole_run[slot])
        out[at + 8] = log(whole[slot] / run * math.ceil(run * width / LINE_BYTES))
        out[at + 9], out[at + 10] = log(units[slot]), log(requests[slot])
        at += 11
        filled += 1
