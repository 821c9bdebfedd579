"""Code of a leaf: what a compiler can and cannot do with its loops, for the leaf's "code" entries.

An operation is counted as often as the loops run that its operands depend on (the compiler moves it
out of the others). An access is followed along the innermost loop and along the vector loop: it
stays, goes on by one element, jumps, or lies *scattered*, where an index holds divisions that TVM
does not see through: of x // 49 and x % 49 with x = 16 f + v it simplifies what 16 divides, after
which the rest no longer joins to x. A condition on the innermost loop is one bound or two: the
last iteration can be peeled off, both ends cannot. Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._leaf_lanes import place
from foreplan.cost_models.programs.encoder._leaf_loops import SERIAL, UNROLLED, VECTOR, log
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import (
    INDIRECT,
    arrange,
    evaluate,
    iterations,
)
from foreplan.cost_models.programs.encoder._tir_walk import (
    CHOICES,
    INDICES,
    PRODUCTS,
    called,
    constant,
    dtype_code,
    member,
    ref,
    size,
)

_A, _B, _C = 0, 1, 2
_KIND, _VARIABLE, _LOAD, _CALL, _CAST = w.KIND, w.VARIABLE, w.LOAD, w.CALL, w.CAST
_SELECT, _ADD, _DIV, _MOD = w.SELECT, w.ADD, w.DIV, w.MOD
_FLOOR_DIV, _FLOOR_MOD, _MIN, _MAX, _NOT = w.FLOOR_DIV, w.FLOOR_MOD, w.MIN, w.MAX, w.NOT
_EQ, _NE, _LT, _GT, _GE = w.EQ, w.NE, w.LT, w.GT, w.GE
_FLOATING_OF = w.FLOATING_OF

#: Instructions up to which LLVM unrolls a loop whole before it looks for vector code (-O3).
_UNROLLED_SIZE = 300.0
#: How an access goes along a loop.
STAYS, NEXT, JUMPS, SCATTERED = range(4)
#: Accesses of a leaf that are followed, the store first.
FOLLOWED = 16
#: Steps up to which vector code loads all and shuffles.
_INTERLEAVED = 4.0


@part
def _executions(mask: int, everything: int, extents: Any, count: int) -> Any:
    """Times that something runs that depends on these loops: its deepest loop and all around it."""
    deepest = -1
    for loop in range(count):
        if mask & everything & ~INDIRECT & (1 << loop) and extents[loop] > 1:
            deepest = loop
    return iterations(everything & ((1 << (deepest + 1)) - 1), extents, count)


@part
def _kept_divisions(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, loop: int, extent: float, order: Any,
    length: int, state: Any, divided: Any,
) -> None:  # fmt: skip
    """What divisions make of a loop in every ordered expression.

    Fills ``divided``: 0 does not change along the loop, 1 changes, 2 changes with a division that
    TVM simplifies, 3 with one that it leaves as it is, 4 with both. TVM drops divisions by more
    than there is (``state`` holds intervals over all loops) and joins those that follow each other,
    (x // 81) // 960 to x // 77760 and (x // 81) % 960 to (x % 77760) // 81, before it simplifies.
    """
    by = np.ones(nodes.shape[0])  # what the loop has been divided by so far, -1 for not known
    for number in range(length):
        row = order[number]
        kind = nodes[row, _KIND]
        found = 0
        if kind == _VARIABLE:
            if alias[row] > 0:
                found = divided[alias[row]]
                by[row] = by[alias[row]]
            elif loop_of[row] == loop:
                found = 1
        elif kind in (_LOAD, _CALL):
            inner = ref(nodes, row, _B)
            for item in range(min(size(nodes, inner), 16)):
                if divided[member(nodes, pool, inner, item)] > 0:
                    found = 3
            by[row] = -1.0
        elif kind in (_CAST, _NOT):
            found = divided[ref(nodes, row, _A)]
            by[row] = by[ref(nodes, row, _A)]
        elif _SELECT <= kind < _NOT:
            left, right = ref(nodes, row, _A), ref(nodes, row, _B)
            a, b = divided[left], divided[right]
            found = max(a, b)
            if kind == _SELECT:
                found = max(found, divided[ref(nodes, row, _C)])
            if min(a, b) >= 2 and a != b:
                found = 4
            by[row] = 1.0 if found < 2 else -1.0
            if kind == _ADD and found >= 2:  # nothing added leaves the other as it was
                if state[left, 0] == 0 and state[left, 1] == 0:
                    by[row] = by[right]
                elif state[right, 0] == 0 and state[right, 1] == 0:
                    by[row] = by[left]
            if kind in (_FLOOR_DIV, _FLOOR_MOD, _DIV, _MOD):
                quotient = kind in (_FLOOR_DIV, _DIV)
                divisor = constant(nodes, right, 1)
                if divisor <= 1 or a == 0:
                    by[row] = by[left]
                elif state[left, 0] >= 0 and state[left, 1] < divisor:
                    found = 0 if quotient else a
                    by[row] = by[left]
                else:
                    if by[left] > 0:
                        by[row] = by[left] * (divisor if quotient else 1.0)
                    if divisor % extent == 0 and a < 3:
                        found = 0 if quotient else 2
                    elif a == 3 and by[left] > 0 and divisor * by[left] % extent == 0:
                        found = 0 if quotient else 4
                    elif extent % divisor == 0:
                        found = 2 if a < 3 else 4
                    else:
                        found = 3 if a != 2 else 4
        divided[row] = found


@part
def ways_along(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, slots: Any,
    widths: Any, loop: int, extents: Any, at: Any, order: Any, length: int, state: Any,
    ways: Any, steps: Any,
) -> None:  # fmt: skip
    """How each access goes along a loop while the others stand still, and by how many elements."""
    places, extent = np.zeros((3, many)), extents[loop]
    for turn in range(3):
        at[:] = 0
        at[loop] = (0, 1, int(extent) - 1)[turn]
        evaluate(nodes, pool, alias, loop_of, at, at, order, length, state)
        for item in range(many):
            places[turn, item] = place(
                nodes, pool, accesses[item, INDICES], widths[slots[item]], state
            )
    divided = np.zeros(nodes.shape[0], dtype=np.int8)
    for other in range(extents.size):
        at[other] = max(0, int(extents[other]) - 1)
    evaluate(nodes, pool, alias, loop_of, np.zeros_like(at), at, order, length, state)
    _kept_divisions(nodes, pool, alias, loop_of, loop, extent, order, length, state, divided)
    for item in range(many):
        step = places[1, item] - places[0, item]
        straight = places[2, item] - places[0, item] == step * (extent - 1)
        simple = kept = False
        for dim in range(size(nodes, accesses[item, INDICES])):
            found = divided[member(nodes, pool, accesses[item, INDICES], dim)]
            simple = simple or found in (2, 4)
            kept = kept or found >= 3
        steps[item] = step
        if not straight or (kept and (simple or step != 1.0)):
            ways[item] = SCATTERED
        elif step == 0.0:
            ways[item] = STAYS
        else:
            ways[item] = NEXT if abs(step) <= _INTERLEAVED else JUMPS


@part
def _of_values(nodes: Any, row: int, mask: int) -> Any:
    """Whether a comparison is one of values, not one of positions."""
    code = dtype_code(nodes, ref(nodes, row, _A))
    return (code >= 0 and _FLOATING_OF[code] > 0) or mask & INDIRECT != 0


@part
def _unchanged(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, running: Any, extents: Any, count: int,
    order: Any, length: int, state: Any, same: Any,
) -> None:  # fmt: skip
    """Vector loops that an expression depends on and along which it does not change.

    Of x % 1024 // 128 with 64 lanes TVM's lowering leaves one number and spreads it: what is
    computed of it is computed once, not once a lane. Fills ``same`` with masks of loops; ``state``
    holds intervals over all loops.
    """
    divided = np.zeros(nodes.shape[0], dtype=np.int8)
    for loop in range(count):
        if running[loop] == VECTOR and extents[loop] > 1:
            _kept_divisions(
                nodes, pool, alias, loop_of, loop, extents[loop], order, length, state, divided
            )
            for number in range(length):
                row = order[number]
                if divided[row] == 0:
                    same[row] |= 1 << loop


@part
def code_entries(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, slots: Any,
    widths: Any, value: int, predicate: int, own: int, step: float, count: int, extents: Any,
    running: Any, everything: int, jobs: int, reducing: int, total: float, lane: int, order: Any,
    length: int, state: Any, meant: Any, rows: Any, stack: Any, calls: Any, out: Any,
) -> Any:  # fmt: skip
    """Fill the "code" entries of a leaf.

    ``meant`` is a second ``state``, of the stored value's expressions; ``rows`` and ``stack`` are
    scratch. ``calls`` (operations) is filled with how often functions run, by kind.

    Returns:
        Loops that run and that something depends on.
    """
    many = min(many, FOLLOWED)
    at, ways = np.zeros(extents.size, dtype=np.int64), np.zeros(FOLLOWED, dtype=np.int64)
    steps = np.zeros(FOLLOWED)
    roots = np.zeros(2 + 16 * many, dtype=np.int32)
    roots[0], roots[1] = value, predicate
    number = 2
    for item in range(many):
        for dim in range(min(16, size(nodes, accesses[item, INDICES]))):
            roots[number] = member(nodes, pool, accesses[item, INDICES], dim)
            number += 1
    meant[0, :] = 0
    meant[:, 2] = -1
    found = arrange(
        nodes, pool, alias, loop_of, roots, number, True, own, everything, meant, rows, stack
    )
    if found < 0:
        return everything

    # Short innermost loops are unrolled whole; the next one is then what becomes vector code.
    body = many + 3.0
    for item in range(found):
        kind = nodes[rows[item], _KIND]
        code = dtype_code(nodes, rows[item])
        if kind in (_CALL, _CAST) or _EQ <= kind <= _GE:
            body += 1.0
        elif _SELECT <= kind <= _MAX and code >= 0 and _FLOATING_OF[code] > 0:
            body += 2.0 if kind in (_MIN, _MAX) else 1.0
    # A loop that nothing depends on repeats its results: once is left of it, if what it repeats is
    # straight code.
    touched, kept = 0, 0
    for item in range(many):
        for dim in range(size(nodes, accesses[item, INDICES])):
            touched |= meant[member(nodes, pool, accesses[item, INDICES], dim), 2]
    inside = 1.0
    for loop in range(count - 1, -1, -1):
        if (
            running[loop] not in (SERIAL, UNROLLED, VECTOR)
            or (touched | reducing) >> loop & 1
            or (inside > step and inside * body > _UNROLLED_SIZE)
        ):
            kept |= 1 << loop
            if everything >> loop & 1 and running[loop] != VECTOR:
                inside *= extents[loop]
    repeated = iterations(everything & ~kept, extents, count)
    everything &= kept
    total /= repeated
    inner, turns, unrolled, spatial = -1, 1.0, True, -1
    for loop in range(count - 1, -1, -1):
        if extents[loop] <= 1 or not everything >> loop & 1 or jobs >> loop & 1:
            continue
        inner = loop
        if spatial < 0 and not reducing >> loop & 1:
            spatial = loop
        whole = turns * extents[loop]
        if running[loop] == VECTOR or (
            running[loop] != UNROLLED and whole > step and whole * body > _UNROLLED_SIZE
        ):
            unrolled = False
            break
        turns = whole
    if unrolled and spatial >= 0:  # straight code: neighbouring stores are joined
        inner = spatial
    for turn in range(2):
        loop = inner if turn == 0 else lane
        if loop < 0:
            continue
        ways_along(
            nodes, pool, alias, loop_of, accesses, many, slots, widths, loop, extents, at, order,
            length, state, ways, steps,
        )  # fmt: skip
        out[5 * turn] = ways[0]
        for item in range(1, many):
            out[5 * turn + 1 + ways[item]] += 1.0

    zeros, highest = np.zeros(extents.size, dtype=np.int64), at
    for loop in range(count):
        highest[loop] = int(extents[loop]) - 1
    evaluate(nodes, pool, alias, loop_of, zeros, highest, rows, found, meant)
    lower = upper = other = around = above = below = 0.0
    flops = quotients = functions = addresses = divisions = 0.0
    for item in range(found):
        row = rows[item]
        kind, mask = nodes[row, _KIND], meant[row, 2]
        if not _EQ <= kind <= _GE or _of_values(nodes, row, mask):
            continue
        a, b = ref(nodes, row, _A), ref(nodes, row, _B)
        if kind in (_GT, _GE):
            a, b = b, a
        strict = 1 if kind in (_LT, _GT) else 0
        if kind > _NE and (
            meant[a, 1] + strict <= meant[b, 0] or meant[a, 0] + strict > meant[b, 1]
        ):
            continue
        if inner < 0 or not mask >> inner & 1:
            if kind <= _NE:
                around += 1.0
            elif meant[a, 2] > 0:
                above += 1.0
            else:
                below += 1.0
        elif kind <= _NE:
            other += 1.0
        elif meant[a, 2] >> inner & 1:
            upper += 1.0
        else:
            lower += 1.0
    both = min(lower, upper)
    guarded = both + other > 0.0
    same = np.zeros(nodes.shape[0], dtype=np.int64)
    if not guarded:  # TVM makes vector loops with such conditions serial again
        _unchanged(nodes, pool, alias, loop_of, running, extents, count, rows, found, meant, same)
    for item in range(found):
        row = rows[item]
        kind, mask = nodes[row, _KIND], meant[row, 2]
        code = dtype_code(nodes, row)
        if guarded and mask != 0 and code >= 0 and _FLOATING_OF[code] > 0:
            mask |= 1 << inner  # nothing that needs a load is moved out from behind a branch
        times = _executions(mask & ~same[row], everything, extents, count)
        if _EQ <= kind <= _GE:
            if _of_values(nodes, row, mask):
                flops += times
        elif kind == _CALL:
            operation = called(nodes, pool, row)
            if operation == PRODUCTS:
                flops += times
            elif operation >= 0 and operation != CHOICES:
                functions += times
                calls[operation] += times
        elif kind in (_SELECT, _MIN, _MAX):
            flops += times
        elif _ADD <= kind <= _FLOOR_MOD:
            if code >= 0 and _FLOATING_OF[code] > 0:
                if kind == _DIV:
                    quotients += times
                else:
                    flops += times
            elif kind >= _DIV and constant(nodes, ref(nodes, row, _B), 1) > 1:
                divisions += times
            else:
                addresses += times
    around += min(above, below)
    out[10], out[11], out[12], out[13] = both + other, abs(upper - lower), log(turns), around
    out[14], out[15], out[16] = log(flops), log(quotients), log(functions)
    out[17], out[18] = log(addresses), log(divisions)
    # Results that a turn of the innermost reducing loop updates: sums that do not wait for each
    # other.
    last = -1
    for loop in range(count):
        if reducing >> loop & 1 and extents[loop] > 1:
            last = loop
    inside = ~((1 << (last + 1)) - 1)
    sums = iterations(everything & ~reducing & ~jobs & inside, extents, count)
    out[19] = log(sums) if last >= 0 else 0.0
    out[20] = log(total / sums) if last >= 0 else 0.0
    out[21] = 1.0 if inner >= 0 and reducing >> inner & 1 else 0.0
    out[22] = log(repeated - 1.0)
    out[23] = log(total / (extents[inner] if inner >= 0 else 1.0))
    return everything
