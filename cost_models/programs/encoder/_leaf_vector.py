"""leaf_vector: the computation vector of one leaf of a TIR module; called by `_tir_encoding`.

The order of the entries is that of `_leaf_names`; a test holds both together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._leaf_block import block_entries
from foreplan.cost_models.programs.encoder._leaf_buffers import allocation_entries, buffer_entries
from foreplan.cost_models.programs.encoder._leaf_code import code_entries
from foreplan.cost_models.programs.encoder._leaf_lanes import (
    MAX_DIMS,
    lane_entries,
    lane_merged,
    lane_segments,
    lane_units,
)
from foreplan.cost_models.programs.encoder._leaf_loops import (
    BLOCK,
    PARALLEL,
    THREAD_X,
    THREAD_YZ,
    VIRTUAL,
    buffer,
    log,
    loop_entries,
    product,
    read_loops,
)
from foreplan.cost_models.programs.encoder._leaf_memory import (
    MEMORY_ENTRIES,
    memory_entries,
    region_levels,
)
from foreplan.cost_models.programs.encoder._leaf_requests import (
    UNASKED,
    UNASKED_CPU,
    lane_requests,
    lane_straight,
    lane_turns,
)
from foreplan.cost_models.programs.encoder._leaf_sets import CROWDED_ENTRIES, crowded_entries
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import arrange, iterations
from foreplan.cost_models.programs.encoder._tir_walk import (
    ACCESSES,
    ADDRESS,
    ADDS,
    BUFFER,
    CALLED,
    CHEAP,
    CHOICES,
    COSTLY,
    DEPTH,
    INDICES,
    INIT,
    INTEGER_OPS,
    KERNEL,
    LOOPS,
    MAX_LOOPS,
    OPERATION_COLUMNS,
    PIPELINED,
    PREDICATES,
    PRODUCTS,
    QUOTIENTS,
    REALIZE,
    STORE,
    TOO_LARGE,
    UNKNOWN_DTYPE,
    UNROLL,
    constant,
    member,
    ref,
    size,
)

_A, _B, _D = 0, 1, 3
_BYTES_OF, _FLOATING_OF = w.BYTES_OF, w.FLOATING_OF
#: Buffers of a leaf that are told apart; further ones count with none.
_MAX_BUFFERS = 24


@part
def leaf_vector(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, leaves: Any, loops: Any, number: int,
    operations: Any, accesses: Any, params: Any, buffers: Any, sizes: Any, touches: Any, found: int,
    state: Any, apart: Any, order: Any, rows: Any, stack: Any, out: Any, totals: Any,
) -> Any:  # fmt: skip
    """Fill the vector of one leaf and add to the totals; 0, or what stopped it."""
    leaf = leaves[number]
    count, many = leaf[LOOPS], leaf[ACCESSES]
    extents = np.ones(MAX_LOOPS)
    running = np.zeros(MAX_LOOPS, dtype=np.int64)
    jobs, threads = read_loops(nodes, loops[number], count, loop_of, extents, running)
    everything = (1 << count) - 1

    # Index expressions of the accesses, and what the block's iterators are bound to.
    starts = stack[:512]
    used = 0
    for item in range(many):
        for dim in range(size(nodes, accesses[item, INDICES])):
            if used == 400:
                return TOO_LARGE
            starts[used] = member(nodes, pool, accesses[item, INDICES], dim)
            used += 1
    first_binding = used
    values = ref(nodes, leaf[REALIZE], _A)
    iterators = ref(nodes, ref(nodes, leaf[REALIZE], _B), _A)
    bindings = min(size(nodes, values), size(nodes, iterators), 64)
    for item in range(bindings):
        starts[used] = member(nodes, pool, values, item)
        used += 1
    state[:, 2] = -1
    length = arrange(
        nodes, pool, alias, loop_of, starts, used, False, -1, 0, state, order, stack[512:]
    )
    if length < 0:
        return TOO_LARGE
    # What is the same in all virtual threads, as their copy to shared memory, is done once.
    meant = 0
    for item in range(first_binding):
        meant |= state[starts[item], 2]
    for loop in range(count):
        if running[loop] == VIRTUAL and not meant >> loop & 1:
            everything &= ~(1 << loop)
    reducing, domain = 0, 1.0
    for item in range(bindings):
        iterator = member(nodes, pool, iterators, item)
        if nodes[iterator, _D] == 2:
            reducing |= state[starts[first_binding + item], 2]
        domain *= max(1, constant(nodes, ref(nodes, ref(nodes, iterator, _B), _B), 1))
    reducing &= everything
    if leaf[INIT]:  # runs once a result, not once a term
        everything &= ~reducing
    total = iterations(everything, extents, count)

    # Distinct buffers of the leaf, the stored one first; elements by set of running loops.
    own = np.zeros(_MAX_BUFFERS, dtype=np.int64)
    distinct = 0
    for item in range(many):
        known = False
        for slot in range(distinct):
            known = known or own[slot] == accesses[item, BUFFER]
        if not known and distinct < _MAX_BUFFERS:
            own[distinct] = accesses[item, BUFFER]
            distinct += 1
    levels, runs = np.zeros((count + 1, distinct)), np.ones((count + 1, distinct))
    known_dtypes = region_levels(
        nodes, pool, alias, loop_of, accesses, many, own, distinct, count, extents, everything,
        order, length, state, levels, runs,
    )  # fmt: skip
    if not known_dtypes:
        return UNKNOWN_DTYPE

    dtype = buffer(nodes, own[0])[2]
    flops = (
        operations[ADDS] + operations[PRODUCTS] + operations[QUOTIENTS] + operations[CHOICES]
        + operations[CHEAP] + operations[COSTLY] + operations[CALLED]
    )  # fmt: skip
    at = 0
    for item in range(OPERATION_COLUMNS):
        out[at] = log(operations[item] * total)
        at += 1
    out[at] = log(flops)
    out[at + 1] = min(1.0, max(0.0, _FLOATING_OF[dtype]))
    out[at + 2] = 1.0 if _FLOATING_OF[dtype] == 2 else 0.0
    out[at + 3] = log(_BYTES_OF[dtype])
    at += 4

    inner, lane = loop_entries(
        extents, running, count, everything, jobs, reducing, total, leaf[UNROLL], out[at : at + 13]
    )
    at += 13
    parallel = product(running, extents, count, PARALLEL)
    blocks = product(running, extents, count, BLOCK)
    threads_x = product(running, extents, count, THREAD_X)
    threads_yz = product(running, extents, count, THREAD_YZ)
    out[at] = log(blocks)
    out[at + 1] = log(threads_x)
    out[at + 2] = log(threads_yz)
    out[at + 3] = log(product(running, extents, count, VIRTUAL))
    out[at + 4] = log(iterations(everything & ~jobs & ~threads, extents, count))
    out[at + 5] = leaf[KERNEL]
    at += 6
    reads_own = 0.0
    for item in range(1, many):
        if accesses[item, BUFFER] == own[0]:
            reads_own = 1.0
    out[at] = leaf[INIT]
    out[at + 1] = 1.0 if reducing else 0.0
    out[at + 2] = reads_own
    out[at + 3] = leaf[PREDICATES]
    out[at + 4] = log(iterations((1 << count) - 1, extents, count) / domain - 1.0)
    out[at + 5] = leaf[DEPTH]
    at += 6

    widths, common = np.ones((distinct, MAX_DIMS)), np.zeros(distinct, dtype=np.int64)
    allocated = at + MEMORY_ENTRIES + CROWDED_ENTRIES
    shared, local = allocation_entries(
        nodes, pool, alias, loop_of, accesses, many, own, distinct, params, buffers, sizes,
        touches, found, leaves, loops, number, extents, running, everything, levels[0], order,
        length, state, widths, common, out[allocated : allocated + 3],
    )  # fmt: skip
    per_level = np.zeros(count + 1)
    traffic_l1, traffic_l2 = memory_entries(
        nodes, own, distinct, params, widths, levels, runs, leaf[KERNEL] > 0, everything, extents,
        count, flops * total, per_level, out[at:allocated],
    )  # fmt: skip
    if leaf[KERNEL] == 0:
        crowded_entries(
            nodes, pool, alias, loop_of, accesses, many, own, distinct, widths, count, extents,
            everything, order, length, state, out[at + MEMORY_ENTRIES : allocated],
        )  # fmt: skip
    at = allocated + 3
    units, requests = np.zeros(distinct), np.zeros(distinct)
    if leaf[KERNEL] > 0:
        step = float(leaf[UNROLL])
        out[at + 7] = log(
            lane_straight(
                nodes, pool, accesses, many, own, distinct, count, extents, running, everything,
                state,
            )
        )  # fmt: skip
        indexed, unrolled, inside = lane_requests(
            nodes, pool, accesses, many, own, max(UNASKED, step), distinct, count, extents,
            running, everything, levels, state, True, requests,
        )  # fmt: skip
        merged, passes = np.ones(distinct), np.zeros(distinct)
        lane_merged(
            nodes, pool, alias, loop_of, accesses, many, own, distinct, count, extents, running,
            everything, inside, widths, common, order, length, state, merged,
        )  # fmt: skip
        lane_units(
            nodes, pool, alias, loop_of, accesses, many, own, distinct, count, loops[number],
            extents, running, widths, order, length, state, merged, units, passes,
        )  # fmt: skip
        requests /= merged
        out[at + 6], out[at + 9] = log(indexed - 1.0), log(unrolled)
        out[at + 10] = log(lane_turns(count, extents, running, everything, step))
        fused = min(operations[ADDS], operations[PRODUCTS])  # one instruction does both
        mine = iterations(everything & ~jobs & ~threads, extents, count)
        passed = lane_entries(
            nodes, own, distinct, blocks * math.ceil(threads_x * threads_yz / 32.0), units,
            passes, requests, (flops - fused) * mine, out[at : at + 6],
        )  # fmt: skip
        out[at + 11] = log(passed)
    else:
        lane_requests(
            nodes, pool, accesses, many, own, max(UNASKED_CPU, float(leaf[UNROLL])), distinct,
            count, extents, running, everything, levels, state, False, requests,
        )  # fmt: skip
        if max(lane, inner) >= 0:
            lane_segments(
                nodes, pool, alias, loop_of, accesses, many, own, distinct, extents,
                lane if lane >= 0 else inner, widths, order, length, state, units,
            )  # fmt: skip
        all_jobs = iterations(jobs & everything, extents, count)
        out[at + 1] = log((requests * units).sum() * all_jobs)
        out[at + 3] = log(requests.sum() * all_jobs)
    out[at + 8] = leaf[PIPELINED]
    at += 12
    slots = np.zeros(many, dtype=np.int64)
    for item in range(many):
        for slot in range(distinct):
            if accesses[item, BUFFER] == own[slot]:
                slots[item] = slot
    calls = np.zeros(OPERATION_COLUMNS)
    kept = code_entries(
        nodes, pool, alias, loop_of, accesses, many, slots, widths, ref(nodes, leaf[STORE], _A),
        ref(nodes, leaf[REALIZE], _D), own[0], float(leaf[UNROLL]), count, extents, running,
        everything, jobs, reducing, total, lane if lane >= 0 else inner, order, length, state,
        apart, rows, stack[512:], calls, out[at : at + 24],
    )  # fmt: skip
    if leaf[KERNEL] == 0:  # as often as they run after what the compilers move out of loops
        for item in (CHEAP, COSTLY, CALLED):
            out[item] = log(calls[item])
    whole = out[at + 10] == 0.0 and out[at + 4] == 0.0 and out[at] != 3.0
    at += 24
    if leaf[KERNEL] == 0:
        block_entries(
            nodes, pool, alias, loop_of, accesses, many, own, distinct, slots, widths, count,
            extents, running, kept, jobs, reducing, float(leaf[UNROLL]), flops,
            min(operations[ADDS], operations[PRODUCTS]), whole, order, length, state,
            out[at : at + 17],
        )  # fmt: skip
    at += 17
    buffer_entries(
        nodes, pool, alias, loop_of, accesses, many, own, distinct, count, extents, everything,
        jobs, threads, total, levels[0], per_level, runs[0], inner, lane, order, length, state,
        units, requests, widths, out[at:],
    )  # fmt: skip

    totals[0] += flops * total
    totals[1] += (operations[CHEAP] + operations[COSTLY] + operations[CALLED]) * total
    totals[2] += (operations[INTEGER_OPS] + operations[ADDRESS]) * total
    totals[6] = max(totals[6], blocks)
    totals[7] = max(totals[7], threads_x * threads_yz)
    totals[8] = max(totals[8], shared)
    totals[9] = max(totals[9], local)
    totals[10] = max(totals[10], parallel)
    totals[12] += total
    totals[13] += traffic_l1
    totals[14] += traffic_l2
    if flops * total >= totals[18]:
        totals[15], totals[16] = _BYTES_OF[dtype], max(0, _FLOATING_OF[dtype])
        totals[18] = flops * total
    return 0
