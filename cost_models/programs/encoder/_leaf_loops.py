"""Loops and buffers of a leaf: how a loop runs, what a buffer is.

Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

import math
from typing import Any

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import iterations
from foreplan.cost_models.programs.encoder._tir_walk import LOOPS, constant, ref, tag, word

_A, _B, _D, _G, _H = 0, 1, 3, 6, 7
_KIND, _BUFFER_TYPE, _STRING = w.KIND, w.BUFFER_TYPE, w.STRING
_BYTES_OF, _SCOPE_OF = w.BYTES_OF, w.SCOPE_OF

#: How a loop runs.
SERIAL, PARALLEL, VECTOR, UNROLLED, BLOCK, THREAD_X, THREAD_YZ, VIRTUAL = range(8)


@part
def log(value: float) -> Any:
    return math.log2(1.0 + max(0.0, value))


@part
def how(nodes: Any, loop: int) -> Any:
    axis = tag(nodes, loop)
    if axis >= 0:
        if axis <= 2:
            return BLOCK
        return VIRTUAL if axis == 6 else (THREAD_X if axis == 3 else THREAD_YZ)
    kind = nodes[loop, _D]
    return kind if SERIAL <= kind <= UNROLLED else SERIAL


@part
def buffer(nodes: Any, variable: int) -> Any:
    """Shape (row), bytes of an element (-1 if unknown), dtype code, scope of a buffer."""
    kind = ref(nodes, variable, _G)
    if nodes[kind, _KIND] != _BUFFER_TYPE:
        return 0, -1, -1, 0
    dtype = word(nodes, ref(nodes, kind, _A))
    scope = ref(nodes, kind, _D)
    place = _SCOPE_OF[nodes[scope, _A]] if nodes[scope, _KIND] == _STRING else 0
    return ref(nodes, kind, _B), _BYTES_OF[dtype], dtype, max(0, place)


@part
def product(running: Any, extents: Any, number: int, kind: int) -> Any:
    product = 1.0
    for loop in range(number):
        if running[loop] == kind:
            product *= extents[loop]
    return product


@part
def set_highest(extents: Any, number: int, mask: int, highest: Any) -> None:
    for loop in range(number):
        highest[loop] = extents[loop] - 1 if mask >> loop & 1 else 0


@part
def common_loops(loops: Any, leaves: Any, touches: Any, found: int, number: int, mine: int) -> Any:
    """Loops around every leaf that touches buffer ``number``, of which ``mine`` is one."""
    common = leaves[mine, LOOPS]
    for leaf in range(found):
        if touches[leaf, number]:
            shared = 0
            while (
                shared < min(common, leaves[leaf, LOOPS])
                and loops[leaf, shared] == loops[mine, shared]
            ):
                shared += 1
            common = shared
    return common


@part
def read_loops(nodes: Any, loops: Any, count: int, loop_of: Any, extents: Any, running: Any) -> Any:
    """Fill ``extents`` and ``running`` of a leaf's loops, and ``loop_of`` of their variables.

    Returns:
        Masks of the loops that are jobs (blocks, parallel loops) and of those that are threads.
    """
    for loop in range(count):
        row = loops[loop]
        loop_of[ref(nodes, row, _H)] = loop
        extents[loop] = constant(nodes, ref(nodes, row, _B), 1)
        running[loop] = how(nodes, row)
    # Loops bound to one axis are one loop: a block's threads copy together below the loop that
    # they are.
    for loop in range(count):
        for below in range(loop + 1, count):
            axis = tag(nodes, loops[loop])
            if axis >= 0 and axis != 6 and axis == tag(nodes, loops[below]):
                extents[below] = max(extents[below], extents[loop])
                extents[loop] = 1.0
                loop_of[ref(nodes, loops[loop], _H)] = below
    jobs = threads = 0
    for loop in range(count):
        if running[loop] == BLOCK or running[loop] == PARALLEL:
            jobs |= 1 << loop
        if running[loop] == THREAD_X or running[loop] == THREAD_YZ:
            threads |= 1 << loop
    return jobs, threads


@part
def loop_entries(
    extents: Any, running: Any, count: int, everything: int, jobs: int, reducing: int,
    total: float, step: int, out: Any,
) -> Any:  # fmt: skip
    """Fill the "loops" entries; ``step`` is what TVM unrolls unasked (``auto_unroll``).

    Returns:
        The innermost loop, and the one along which neighbours run together (vector loop, else
        threads); -1 where there is none.
    """
    unrolled, still = 1.0, True
    inner = second = lane = -1
    for loop in range(count - 1, -1, -1):
        if extents[loop] <= 1 or not everything >> loop & 1:
            continue
        kind = running[loop]
        if kind == THREAD_X and (lane < 0 or running[lane] != VECTOR):
            lane = loop
        if kind == VECTOR:
            lane = loop
        if kind in (SERIAL, UNROLLED, VECTOR):
            still = still and (kind != SERIAL or unrolled * extents[loop] <= step)
            if still and kind == SERIAL:
                unrolled *= extents[loop]
            if inner < 0:
                inner = loop
            elif second < 0:
                second = loop
    out[0] = log(total)
    out[1] = count
    out[2] = log(product(running, extents, count, SERIAL))
    out[3] = log(product(running, extents, count, PARALLEL))
    out[4] = log(product(running, extents, count, VECTOR))
    out[5] = log(product(running, extents, count, UNROLLED))
    out[6] = log(unrolled)
    out[7] = log(step)
    out[8] = log(extents[inner] if inner >= 0 else 1.0)
    out[9] = log(extents[second] if second >= 0 else 1.0)
    out[10] = log(iterations(reducing & everything, extents, count))
    out[11] = log(iterations(everything & ~reducing, extents, count))
    out[12] = log(iterations(everything & ~jobs, extents, count))
    return inner, lane
