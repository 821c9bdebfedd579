"""Lanes of a leaf: what one warp asks of memory when the leaf's accesses run on a GPU.

The addresses of the 32 lanes of a block's first warp are evaluated one by one, so fused and split
thread loops come out right. Device memory is counted in sectors of 32 bytes, shared memory in
wavefronts: the most distinct words that one of 32 banks of 4 bytes must give. Compiled; called by
`_leaf_vector`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder._leaf_loops import (
    THREAD_X,
    THREAD_YZ,
    VECTOR,
    VIRTUAL,
    buffer,
    log,
)
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import evaluate
from foreplan.cost_models.programs.encoder._tir_walk import (
    BUFFER,
    INDICES,
    constant,
    member,
    size,
    tag,
)

#: Of every NVIDIA GPU since Maxwell (CUDA C++ programming guide, compute capabilities).
_LANES = 32
_SECTOR_BYTES = 32
#: Sectors of a line of the L1 cache. That it gives one of each place at a time is measured: sums
#: of rows that lie 128 bytes times any integer apart take 32 cycles a request of a warp on the
#: H200, others 8 to 12 (docs/results/program_history.md).
_LINE_SECTORS = 4
#: Bytes that one instruction of a thread loads at most.
_WIDEST_BYTES = 16
_BANKS, _BANK_BYTES = 32, 4
#: Dimensions of a buffer that are looked at: room in the compiled arrays.
MAX_DIMS = 12


@part
def spans(
    nodes: Any, pool: Any, accesses: Any, many: int, variable: int, shape: int, state: Any, out: Any
) -> None:
    """Width of the region of a buffer in each dimension, from intervals: as it is laid out."""
    out[:] = 1.0
    for dim in range(min(MAX_DIMS, size(nodes, shape))):
        low, high = 1 << 40, -(1 << 40)
        for item in range(many):
            if accesses[item, BUFFER] == variable and dim < size(nodes, accesses[item, INDICES]):
                row = member(nodes, pool, accesses[item, INDICES], dim)
                low, high = min(low, state[row, 0]), max(high, state[row, 1])
        extent = constant(nodes, member(nodes, pool, shape, dim), 1)
        out[dim] = max(1.0, min(float(extent), high - low + 1.0))


@part
def place(nodes: Any, pool: Any, indices: int, widths: Any, state: Any) -> Any:
    """Element that an access meets where every interval is a point, as its buffer is laid out."""
    found = 0.0
    for dim in range(min(MAX_DIMS, size(nodes, indices))):
        found = found * widths[dim] + state[member(nodes, pool, indices, dim), 0]
    return found


@part
def _distinct(values: Any, count: int) -> Any:
    """Number of different values among the first ``count``, which are sorted in place."""
    found = 0
    for item in range(count):
        value = values[item]
        at = item
        while at > 0 and values[at - 1] > value:
            values[at] = values[at - 1]
            at -= 1
        values[at] = value
    for item in range(count):
        if item == 0 or values[item] != values[item - 1]:
            found += 1
    return found


@part
def lane_units(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, count: int, loops: Any, extents: Any, running: Any, widths: Any, order: Any,
    length: int, state: Any, merged: Any, units: Any, passes: Any,
) -> None:  # fmt: skip
    """Sectors or wavefronts of one warp's access to each buffer, 0 for a thread's own memory.

    ``merged`` are the neighbours that one load of a thread takes together, fewer where lanes are
    not aligned; ``passes`` gets the most sectors that lie at one of the four places of a line,
    which the L1 cache gives in turn.
    """
    at = np.zeros(extents.size, dtype=np.int64)
    lanes, vector = 1, -1
    for loop in range(count):
        if running[loop] in (THREAD_X, THREAD_YZ):
            lanes *= int(extents[loop])
        if running[loop] == VECTOR and extents[loop] > 1:
            vector = loop
    lanes = min(_LANES, lanes)
    wide = int(min(16.0, extents[vector])) if vector >= 0 else 1
    places = np.zeros((distinct, _LANES))
    steps = np.zeros(distinct)
    indices = np.zeros(distinct, dtype=np.int64)
    for slot in range(distinct):
        for item in range(many - 1, -1, -1):
            if accesses[item, BUFFER] == own[slot]:
                indices[slot] = accesses[item, INDICES]
    for lane in range(lanes + (1 if vector >= 0 else 0)):
        at[:] = 0
        if lane == lanes:
            at[vector] = 1
        else:
            rest = lane
            for axis in range(3, 6):  # threadIdx.x runs fastest
                for loop in range(count):
                    if extents[loop] > 1 and tag(nodes, loops[loop]) == axis:
                        at[loop] = rest % int(extents[loop])
                        rest //= int(extents[loop])
        evaluate(nodes, pool, alias, loop_of, at, at, order, length, state)
        for slot in range(distinct):
            met = place(nodes, pool, indices[slot], widths[slot], state)
            if lane == lanes:
                steps[slot] = met - places[slot, 0]
            else:
                places[slot, lane] = met
    keys = np.zeros(_LANES * 16)
    per_bank = np.zeros(_BANKS, dtype=np.int64)
    for slot in range(distinct):
        _, width, _, scope = buffer(nodes, own[slot])
        if scope == 2:
            continue
        many_keys = 0
        unit = _SECTOR_BYTES if scope == 0 else _BANK_BYTES
        step = steps[slot] if steps[slot] != 0 else 1.0
        for lane in range(lanes):
            off = places[slot, lane] - places[slot, 0]
            while merged[slot] > 1.0 and off % merged[slot] != 0.0:
                merged[slot] /= 2.0
        for lane in range(lanes):
            for item in range(wide if steps[slot] != 0 else int(merged[slot])):
                keys[many_keys] = (places[slot, lane] + item * step) * width // unit
                many_keys += 1
        found = _distinct(keys, many_keys)
        banks = _LINE_SECTORS if scope == 0 else _BANKS
        per_bank[:] = 0
        for item in range(many_keys):
            if item == 0 or keys[item] != keys[item - 1]:
                per_bank[int(keys[item]) % banks] += 1
        units[slot] = found if scope == 0 else per_bank.max()
        passes[slot] = per_bank.max()


@part
def lane_segments(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, extents: Any, lane: int, widths: Any, order: Any, length: int, state: Any,
    units: Any,
) -> None:  # fmt: skip
    """Runs of neighbours (or of one element) among eight iterations of a CPU's vector loop.

    One is a vector load or a broadcast, eight are gathered one by one.
    """
    at = np.zeros(extents.size, dtype=np.int64)
    before = np.zeros(distinct)
    for turn in range(int(min(8.0, extents[lane]))):
        at[lane] = turn
        evaluate(nodes, pool, alias, loop_of, at, at, order, length, state)
        for slot in range(distinct):
            for item in range(many):
                if accesses[item, BUFFER] == own[slot]:
                    met = place(nodes, pool, accesses[item, INDICES], widths[slot], state)
                    break
            step = met - before[slot]
            if turn == 0 or (step != 1.0 and step != 0.0):
                units[slot] += 1.0
            before[slot] = met


@part
def lane_merged(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, count: int, extents: Any, running: Any, everything: int, inside: int,
    widths: Any, common: Any, order: Any, length: int, state: Any, merged: Any,
) -> None:  # fmt: skip
    """Neighbours in shared memory that straight code loads or stores with one instruction.

    A power of two that divides the run of neighbours among the loops ``inside`` and every other
    step, so that addresses are aligned; 1 where TVM asked for vectors. Loops below ``common`` lie
    around the buffer, which starts anew in each of their iterations.
    """
    at = np.zeros(extents.size, dtype=np.int64)
    steps = np.zeros((count + 1, distinct))  # and where the first iteration lies
    shared = False
    for slot in range(distinct):
        shared = shared or buffer(nodes, own[slot])[3] == 1
    for loop in range(count):
        shared = shared and not (running[loop] == VECTOR and extents[loop] > 1)
    merged[:] = 1.0
    if not shared:
        return
    for turn in range(count + 1):
        loop = turn - 1
        if loop >= 0 and not (everything >> loop & 1 and extents[loop] > 1):
            continue
        at[:] = 0
        if loop >= 0:
            at[loop] = 1
        evaluate(nodes, pool, alias, loop_of, at, at, order, length, state)
        for slot in range(distinct):
            if buffer(nodes, own[slot])[3] == 1:
                for item in range(many):
                    if accesses[item, BUFFER] == own[slot]:
                        met = place(nodes, pool, accesses[item, INDICES], widths[slot], state)
                        steps[turn, slot] = met if loop < 0 else met - steps[0, slot]
                        break
    for slot in range(distinct):
        _, width, _, scope = buffer(nodes, own[slot])
        if scope != 1 or width <= 0:
            continue
        run, used, grown = 1.0, 0, True
        while grown:
            grown = False
            for loop in range(count):
                free = (inside & ~used) >> loop & 1 and extents[loop] > 1
                if free and steps[loop + 1, slot] == run:  # neighbours of the run
                    run *= extents[loop]
                    used |= 1 << loop
                    grown = True
        best = min(16.0, _WIDEST_BYTES / width)
        while best > 1.0:
            fits = run % best == 0.0 and steps[0, slot] % best == 0.0
            for loop in range(count):
                anew = loop < common[slot] and running[loop] not in (THREAD_X, THREAD_YZ, VIRTUAL)
                if not (anew or used >> loop & 1) and steps[loop + 1, slot] % best != 0.0:
                    fits = False
            if fits:
                break
            best /= 2.0
        merged[slot] = max(1.0, best)


@part
def lane_entries(
    nodes: Any, own: Any, distinct: int, warps: float, units: Any, passes: Any, requests: Any,
    arithmetic: float, out: Any,
) -> Any:  # fmt: skip
    """Fill the six entries of the leaf's work on a GPU, all warps together.

    Returns:
        Passes of the L1 cache.
    """
    sectors = wavefronts = asked = asked_own = passed = 0.0
    for slot in range(distinct):
        scope = buffer(nodes, own[slot])[3]
        if scope == 2:
            asked_own += requests[slot] * warps
        else:
            asked += requests[slot] * warps
        if scope == 0:
            sectors += requests[slot] * warps * units[slot]
            passed += requests[slot] * warps * passes[slot]
        elif scope == 1:
            wavefronts += requests[slot] * warps * units[slot]
    out[0], out[1], out[2] = log(warps), log(sectors), log(wavefronts)
    out[3], out[4], out[5] = log(asked), log(asked_own), log(math.ceil(warps * arithmetic))
    return passed
