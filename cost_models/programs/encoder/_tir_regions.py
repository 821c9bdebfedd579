"""Regions that the accesses of a leaf touch while some of its loops run and the others stand still.

Compiled. Index expressions are brought into an order once a leaf; for every set of running loops
(bits of ``mask``) each expression then gets an interval of values, and a buffer the number of its
elements that are touched. Loops that stand still are at zero. Intervals are exact for sums of
disjoint strides, which is what tiling makes; dependence masks keep strided dimensions honest.
"""

from __future__ import annotations

from typing import Any

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_walk import (
    BUFFER,
    INDICES,
    constant,
    member,
    ref,
    size,
)

#: Bit of a dependence mask that says "through a table", as a gather's index is.
INDIRECT = 1 << 62

_A, _B, _C, _E = 0, 1, 2, 4
_KIND = w.KIND
_VARIABLE, _INTEGER, _LOAD, _CALL, _CAST = w.VARIABLE, w.INTEGER, w.LOAD, w.CALL, w.CAST
_SELECT, _ADD, _SUB, _MUL, _DIV, _MOD = w.SELECT, w.ADD, w.SUB, w.MUL, w.DIV, w.MOD
_FLOOR_DIV, _FLOOR_MOD, _MIN, _MAX, _NOT = w.FLOOR_DIV, w.FLOOR_MOD, w.MIN, w.MAX, w.NOT
_LIMIT = 1 << 40


@part
def arrange(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, starts: Any, number: int,
    conditions: bool, own: int, everything: int, state: Any, out: Any, stack: Any,
) -> Any:  # fmt: skip
    """Order the expressions below ``starts``, operands first, and note what loops they depend on.

    Args:
        nodes: rows.
        pool: members of arrays.
        alias: what block iterators are bound to.
        loop_of: int32 (rows), number of the loop of a loop variable, -1 for others.
        starts: rows of expressions.
        number: how many.
        conditions: follow what a choice between two values depends on, too.
        own: row of the leaf's result, which changes with every iteration; -1 if that is no matter.
        everything: loops that run; loading ``own`` depends on all of them.
        state: int64 (rows, 3): lowest value, highest value, dependence mask. A mask of -1 means
            "not seen"; filled.
        out: int32, the order; filled.
        stack: int32, scratch.

    Returns:
        Length of the order, -1 where it is too long.
    """
    length = 0
    for start in range(number):
        stack[0] = starts[start]
        top = 1
        while top > 0:
            top -= 1
            row = stack[top]
            if row < 0:  # its operands are done
                row = -row - 1
                state[row, 2] = _depends(
                    nodes, pool, alias, loop_of, row, conditions, own, everything, state
                )
                if length == out.size:
                    return -1
                out[length] = row
                length += 1
                continue
            if state[row, 2] != -1:
                continue
            state[row, 2] = 0
            if top > stack.size - 64:
                return -1
            stack[top] = -row - 1
            top += 1
            kind = nodes[row, _KIND]
            if kind == _VARIABLE:
                if alias[row] > 0:
                    stack[top] = alias[row]
                    top += 1
            elif kind in (_LOAD, _CALL):
                inner = ref(nodes, row, _B)
                for item in range(min(size(nodes, inner), 16)):
                    stack[top] = member(nodes, pool, inner, item)
                    top += 1
            elif kind == _CAST or _SELECT <= kind <= _NOT:
                stack[top] = ref(nodes, row, _A)
                top += 1
                if kind != _CAST and kind != _NOT:
                    stack[top] = ref(nodes, row, _B)
                    top += 1
                if conditions and kind == _SELECT:
                    stack[top] = ref(nodes, row, _C)
                    top += 1
    return length


@part
def _depends(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, row: int, conditions: bool,
    own: int, everything: int, state: Any,
) -> Any:  # fmt: skip
    kind = nodes[row, _KIND]
    found = 0
    if kind == _VARIABLE:
        if alias[row] > 0:
            found = state[alias[row], 2]
        elif loop_of[row] >= 0:
            found = 1 << loop_of[row]
    elif kind in (_LOAD, _CALL):
        inner = ref(nodes, row, _B)
        for item in range(min(size(nodes, inner), 16)):
            found |= state[member(nodes, pool, inner, item), 2]
        if kind == _LOAD:
            found |= everything if ref(nodes, row, _E) == own else INDIRECT
    elif kind in (_CAST, _NOT):
        found = state[ref(nodes, row, _A), 2]
    elif _SELECT <= kind < _NOT:
        found = state[ref(nodes, row, _A), 2] | state[ref(nodes, row, _B), 2]
        if conditions and kind == _SELECT:
            found |= state[ref(nodes, row, _C), 2]
    return found


@part
def evaluate(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, lowest: Any, highest: Any, order: Any,
    length: int, state: Any,
) -> None:  # fmt: skip
    """Interval of every ordered expression: loop j runs from ``lowest[j]`` to ``highest[j]``."""
    for number in range(length):
        row = order[number]
        kind = nodes[row, _KIND]
        low = high = 0
        if kind == _INTEGER:
            low = high = constant(nodes, row, 0)
        elif kind == _VARIABLE:
            if alias[row] > 0:
                low, high = state[alias[row], 0], state[alias[row], 1]
            elif loop_of[row] >= 0:
                low, high = lowest[loop_of[row]], highest[loop_of[row]]
        elif kind == _CAST:
            low, high = state[ref(nodes, row, _A), 0], state[ref(nodes, row, _A), 1]
        elif kind == _CALL:
            inner = ref(nodes, row, _B)
            if size(nodes, inner) == 3:  # a choice between two values
                a, b = member(nodes, pool, inner, 1), member(nodes, pool, inner, 2)
                low = min(state[a, 0], state[b, 0])
                high = max(state[a, 1], state[b, 1])
        elif _SELECT <= kind < _NOT:
            a, b = ref(nodes, row, _A), ref(nodes, row, _B)
            low, high = _combine(kind, state[a, 0], state[a, 1], state[b, 0], state[b, 1])
        state[row, 0] = max(-_LIMIT, min(_LIMIT, low))
        state[row, 1] = max(-_LIMIT, min(_LIMIT, high))


@part
def _combine(kind: int, a: int, b: int, c: int, d: int) -> Any:
    """Interval of an operator on [a, b] and [c, d]."""
    if kind == _ADD:
        return a + c, b + d
    if kind == _SUB:
        return a - d, b - c
    if kind == _MUL:
        if c == d:
            return (a * c, b * c) if c >= 0 else (b * c, a * c)
        return min(a * c, a * d, b * c, b * d), max(a * c, a * d, b * c, b * d)
    if kind in (_FLOOR_DIV, _DIV):
        if c == d and c > 0:
            return a // c, b // c
        return 0, max(abs(a), abs(b))
    if kind in (_FLOOR_MOD, _MOD):
        if c == d and c > 0:
            if a // c == b // c:
                return a % c, b % c
            return 0, c - 1
        return 0, max(abs(c), abs(d))
    if kind == _MIN:
        return min(a, c), min(b, d)
    if kind == _MAX:
        return max(a, c), max(b, d)
    if kind == _SELECT:
        return min(a, c), max(b, d)
    return 0, 1  # a comparison


@part
def iterations(mask: int, extents: Any, number: int) -> Any:
    """Product of the extents of the loops in a mask."""
    product = 1.0
    for loop in range(number):
        if mask >> loop & 1:
            product *= extents[loop]
    return product


@part
def _same(nodes: Any, pool: Any, one: int, other: int) -> Any:
    """Whether two accesses have the same index expressions."""
    dims = size(nodes, one)
    if dims != size(nodes, other):
        return False
    for dim in range(dims):
        if member(nodes, pool, one, dim) != member(nodes, pool, other, dim):
            return False
    return True


@part
def touched(
    nodes: Any, pool: Any, accesses: Any, count: int, buffer: int, shape: int, mask: int,
    extents: Any, number: int, state: Any,
) -> Any:  # fmt: skip
    """Elements of a buffer that a leaf touches while the loops of ``mask`` run.

    Accesses of one buffer are taken together, as the stencil they usually are.

    Returns:
        Elements, and the length of contiguous runs among them.
    """
    elements, run, union, together = 1.0, 1.0, 0, 0.0
    dims = 0
    for item in range(count):
        if accesses[item, BUFFER] == buffer:
            dims = max(dims, size(nodes, accesses[item, INDICES]))
            known = False  # a sum's own result is loaded where it is stored
            for other in range(item):
                known = known or (
                    accesses[other, BUFFER] == buffer
                    and _same(nodes, pool, accesses[other, INDICES], accesses[item, INDICES])
                )
            together += 0.0 if known else 1.0
    for dim in range(dims):
        low, high, depends = _LIMIT, -_LIMIT, 0
        for item in range(count):
            if accesses[item, BUFFER] == buffer and dim < size(nodes, accesses[item, INDICES]):
                row = member(nodes, pool, accesses[item, INDICES], dim)
                low, high = min(low, state[row, 0]), max(high, state[row, 1])
                depends |= state[row, 2]
        extent = 0
        if dim < size(nodes, shape):
            extent = constant(nodes, member(nodes, pool, shape, dim), 0)
        running = iterations(depends & mask, extents, number)
        span = (extent if depends & mask else 1.0) if depends & INDIRECT else high - low + 1.0
        if extent > 0:
            span = min(span, extent)
        span = max(1.0, min(span, running * together))
        union |= depends
        elements *= span
        run = span if span < extent else run * span
    return max(1.0, min(elements, iterations(union & mask, extents, number) * together)), max(
        1.0, run
    )
