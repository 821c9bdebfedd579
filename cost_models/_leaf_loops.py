"""Loops and buffers of a leaf: how a loop runs, what a buffer is.

Compiled; the smaller half of `_leaf_vector`.
"""

from __future__ import annotations

import math
from typing import Any

from foreplan.cost_models import _tir_words as w
from foreplan.cost_models._tir_compiled import part
from foreplan.cost_models._tir_walk import LOOPS, ref, tag, word

_A, _B, _D, _G = 0, 1, 3, 6
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
