"""Block of a leaf: the straight code that a CPU's compiler makes of its inner loops.

Loops join the block from the inside out: vector loops, those that TVM unrolls (``auto_unroll``
steps), and those that LLVM unrolls whole, as long as the unrolled code stays below its limit of 300
instructions (-O3). The first loop that does not join runs the block. Its code is vectors of
neighbours along the vector loop, else along that running loop if the results lie side by side
there (loop vectoriser), else along a loop of the block (joined stores, SLP). From that follow the
instructions that are left: distinct loads only, each as often as the loops run that it depends on;
results stay in registers while only sums run, until there are more of them than registers; a vector
whose length is no power of two comes apart into single numbers whenever it lives across a loop
(LLVM has no such registers). Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._leaf_code import (
    FOLLOWED,
    NEXT,
    SCATTERED,
    STAYS,
    ways_along,
)
from foreplan.cost_models.programs.encoder._leaf_loops import (
    SERIAL,
    UNROLLED,
    VECTOR,
    buffer,
    log,
    set_highest,
)
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import evaluate, iterations, touched
from foreplan.cost_models.programs.encoder._tir_walk import (
    BUFFER,
    INDICES,
    constant,
    member,
    ref,
    size,
)

_B, _KIND = 1, w.KIND
_DIV, _MOD, _FLOOR_DIV, _FLOOR_MOD = w.DIV, w.MOD, w.FLOOR_DIV, w.FLOOR_MOD

#: Instructions up to which LLVM unrolls a loop whole (-O3), bytes of a vector register, registers
#: that sums can stay in.
_WHOLE, _REGISTER_BYTES, _REGISTERS = 300.0, 32, 14.0
#: How the block becomes vectors.
_EXPLICIT, _LOOP, _JOINED, _SCALAR = 0.0, 1.0, 2.0, 3.0


@part
def _pieces(lanes: int, width: int) -> Any:
    """Registers that hold a vector: whole ones, and one for each power of two of the rest."""
    found = lanes // width
    rest = lanes % width
    while rest:
        found += rest & 1
        rest >>= 1
    return float(found)


@part
def _in_lanes(extent: int, width: int) -> Any:
    """Instructions for ``extent`` iterations in vectors of at most ``width``, the rest single."""
    vector = 1
    while 2 * vector <= min(extent, width):
        vector *= 2
    return float(extent // vector + extent % vector)


@part
def _until(mask: int, block: int, everything: int, extents: Any, count: int) -> Any:
    """Executions of what depends on the loops of ``mask`` outside of the block."""
    deepest = -1
    for loop in range(count):
        if (mask & everything & ~block) >> loop & 1 and extents[loop] > 1:
            deepest = loop
    return iterations(everything & ~block & ((1 << (deepest + 1)) - 1), extents, count)


@part
def _elements(
    nodes: Any, pool: Any, accesses: Any, many: int, variable: int, block: int, extents: Any,
    count: int, state: Any,
) -> Any:  # fmt: skip
    """Elements of a buffer that one execution of the block touches."""
    shape = buffer(nodes, variable)[0]
    return touched(nodes, pool, accesses, many, variable, shape, block, extents, count, state)[0]


@part
def block_entries(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, slots: Any, widths: Any, count: int, extents: Any, running: Any,
    everything: int, jobs: int, reducing: int, step: float, flops: float, fused: float,
    whole: bool, order: Any, length: int, state: Any, out: Any,
) -> None:  # fmt: skip
    """Fill the "block" entries of a leaf.

    ``own`` are the rows of its distinct buffers, the stored one first; ``everything`` the loops
    that run and that something depends on; ``step`` the iterations that TVM unrolls; ``flops``
    floating operations of an iteration, ``fused`` the pairs of them that one instruction does;
    ``whole`` says that nothing forbids vector code that was not asked for.
    """
    many = min(many, FOLLOWED)
    distinct = min(distinct, FOLLOWED)
    zeros, highest = np.zeros(extents.size, dtype=np.int64), np.zeros(extents.size, dtype=np.int64)
    at, ways = np.zeros(extents.size, dtype=np.int64), np.zeros(FOLLOWED, dtype=np.int64)
    depends, elements = np.zeros(FOLLOWED, dtype=np.int64), np.ones(FOLLOWED)
    first = np.zeros(FOLLOWED, dtype=np.int64)
    for slot in range(distinct):
        for item in range(many - 1, -1, -1):
            if accesses[item, BUFFER] == own[slot]:
                first[slot] = item
                for dim in range(size(nodes, accesses[item, INDICES])):
                    depends[slot] |= state[member(nodes, pool, accesses[item, INDICES], dim), 2]
    width = max(1, _REGISTER_BYTES // max(1, buffer(nodes, own[0])[1]))
    block, lanes, along = 0, 1, -1
    for loop in range(count):
        if running[loop] == VECTOR and everything >> loop & 1 and extents[loop] > 1:
            block |= 1 << loop
            lanes *= int(extents[loop])
            along = loop
    pieces = _pieces(lanes, width)
    sums = reducing & everything
    own_read = sums != 0
    turns, asked, runs = 1.0, True, -1
    for loop in range(count - 1, -1, -1):
        if (everything & ~jobs & ~block) >> loop & 1 and extents[loop] > 1:
            kind = running[loop]
            if kind not in (SERIAL, UNROLLED):
                continue
            asked = asked and (kind == UNROLLED or turns * extents[loop] <= step)
            if not asked:
                set_highest(extents, count, block, highest)
                evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
                body = 3.0 + turns * flops * pieces
                for slot in range(distinct):
                    if not depends[slot] >> loop & 1:
                        continue
                    found = _elements(
                        nodes, pool, accesses, many, own[slot], block, extents, count, state
                    )
                    if along >= 0 and depends[slot] >> along & 1:
                        found = found / lanes * pieces
                    elif along >= 0:
                        found *= 2.0
                    body += found * (2.0 if slot == 0 and own_read else 1.0)
                if body * extents[loop] > _WHOLE:
                    runs = loop
                    break
            block |= 1 << loop
            turns *= extents[loop]

    # What becomes vectors, and instructions for each element along them.
    mode, each, vector, taken = _SCALAR, 1.0, -1, 0
    steps = np.zeros(FOLLOWED)
    if along >= 0:
        mode, each, vector = _EXPLICIT, pieces / lanes, along
    elif whole:
        run = 1  # results that lie side by side
        for _ in range(4):
            longer = False
            for loop in range(count - 1, -1, -1):
                if extents[loop] <= 1 or reducing >> loop & 1 or taken >> loop & 1:
                    continue
                if not block >> loop & 1 and loop != runs:
                    continue
                ways_along(
                    nodes, pool, alias, loop_of, accesses, 1, slots, widths, loop, extents, at,
                    order, length, state, ways, steps,
                )  # fmt: skip
                if ways[0] == SCATTERED or steps[0] != run:
                    continue
                if loop == runs:
                    if run == 1:
                        mode, vector = _LOOP, loop
                        each = _in_lanes(int(extents[loop]), width) / extents[loop]
                    continue
                mode, vector = _JOINED, (loop if run == 1 else vector)
                run *= int(extents[loop])
                taken |= 1 << loop
                each = _pieces(run, width) / run
                longer = True
                break
            if not longer:
                break
    ways[:] = STAYS
    steps[:] = 0.0
    if vector >= 0:
        ways_along(
            nodes, pool, alias, loop_of, accesses, many, slots, widths, vector, extents, at, order,
            length, state, ways, steps,
        )  # fmt: skip

    set_highest(extents, count, block, highest)
    evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
    for slot in range(distinct):
        elements[slot] = _elements(
            nodes, pool, accesses, many, own[slot], block, extents, count, state
        )
    bodies = iterations(everything & ~block, extents, count)
    inside = iterations(everything & block, extents, count)
    carried, turning = 1.0, sums != 0
    for loop in range(count - 1, -1, -1):
        if (everything & ~jobs & ~block) >> loop & 1 and extents[loop] > 1:
            turning = turning and reducing >> loop & 1 == 1
            if turning:
                carried *= extents[loop]
    beside = broadcast = gathered = hoisted = 0.0
    for slot in range(1, distinct):
        asks = elements[slot] * _until(depends[slot], block, everything, extents, count)
        way = ways[first[slot]]
        stride = abs(steps[first[slot]])
        if vector < 0 or (way == NEXT and (stride == 1 or mode != _EXPLICIT)):
            beside += asks * each * max(1.0, stride)
        elif way == STAYS:
            broadcast += asks
        else:
            gathered += asks
        if mode == _EXPLICIT and runs >= 0 and not depends[slot] >> runs & 1:
            hoisted += elements[slot] * (1.0 if way == NEXT else float(lanes))
    in_lanes = each if vector < 0 or (ways[0] == NEXT and abs(steps[0]) == 1) else 1.0
    registers = elements[0] * in_lanes
    crooked = mode == _EXPLICIT and lanes & (lanes - 1) != 0
    out[0] = mode
    out[1] = log(float(lanes) if mode == _EXPLICIT else 1.0 / each)
    out[2] = 1.0 if crooked else 0.0
    out[3] = log(carried - 1.0)
    out[4] = log(registers)
    out[5] = log(bodies)
    out[6] = log(inside)
    out[7] = log(bodies * inside * (flops - fused) * each)
    out[8], out[9], out[10] = log(beside), log(broadcast), log(gathered)
    out[11] = log(bodies / carried * elements[0] * in_lanes * (2.0 if own_read else 1.0))
    out[12] = log(bodies * elements[0]) if crooked and carried > 1 else 0.0
    out[13] = log(bodies * hoisted) if crooked else 0.0
    out[14] = log(bodies * max(0.0, registers - _REGISTERS)) if carried > 1 else 0.0
    divisions = 0.0
    for number in range(length):
        row = order[number]
        mask = state[row, 2]
        if nodes[row, _KIND] in (_DIV, _MOD, _FLOOR_DIV, _FLOOR_MOD) and (
            mask & everything & ~block and constant(nodes, ref(nodes, row, _B), 1) > 1
        ):
            divisions += _until(mask, block, everything, extents, count) * iterations(
                mask & everything & block & (~(1 << along) if along >= 0 else -1), extents, count
            )
    out[16] = log(divisions)
    out[15] = log(bodies * iterations(sums & block, extents, count)) if sums else 0.0
