"""Requests of a leaf: how often one thread asks for each buffer, and which loops stay loops.

What a compiler unrolls is straight code, in which equal loads are one; what a loop does not change
is moved out of it. Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

from typing import Any

from foreplan.cost_models.programs.encoder._leaf_loops import (
    BLOCK,
    PARALLEL,
    THREAD_X,
    THREAD_YZ,
    VECTOR,
    VIRTUAL,
    buffer,
)
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import iterations
from foreplan.cost_models.programs.encoder._tir_walk import BUFFER, INDICES, member, size

#: Iterations that a compiler unrolls unasked. GPUs: longer straight code is rare in what nvcc 13.0
#: makes of 769 kernels of the development families (320 and 512 were compared). CPUs: LLVM's limit
#: of 300 instructions is 48 to 64 iterations of a bare sum or copy (measured on what TVM 0.27
#: builds, AVX-512), fewer of longer bodies; 16 is a round number for those.
UNASKED, UNASKED_CPU = 512.0, 16.0
#: So many virtual threads become a loop around each store (TVM's InjectVirtualThread).
_VIRTUAL_LOOP = 16
#: Elements of a thread's own memory that nvcc keeps in registers while a loop runs that does not
#: change their places. Assumed: on the development families 32 and 128 are equal, none is 0.2
#: points worse and any number 0.4.
_KEPT = 32.0


@part
def _moved_out(outer: int, depends: int, running: Any, extents: Any, count: int) -> Any:
    """Times that an access runs which is moved out of the loops that it does not depend on.

    It stays in the deepest one that it depends on, and so in all around that; virtual threads that
    are a loop are the innermost one.
    """
    around, innermost = 0, False
    for loop in range(count):
        if outer & depends & (1 << loop) and extents[loop] > 1:
            if running[loop] == VIRTUAL:
                innermost = True
            else:
                around = (1 << (loop + 1)) - 1
    mask = 0
    for loop in range(count):
        if outer >> loop & 1:
            if running[loop] == VIRTUAL:
                mask |= depends & (1 << loop)
            elif innermost:
                mask |= 1 << loop
            else:
                mask |= around & (1 << loop)
    return iterations(mask, extents, count)


@part
def lane_requests(
    nodes: Any, pool: Any, accesses: Any, many: int, own: Any, limit: float, distinct: int,
    count: int, extents: Any, running: Any, everything: int, levels: Any, state: Any,
    moving: bool, requests: Any,
) -> Any:  # fmt: skip
    """Times that one thread asks for each buffer: equal loads among unrolled iterations are one.

    Few virtual threads are straight code around each store: a load that is the same for all is one
    load. Many are the innermost loop. With ``moving`` a buffer is asked for no more often than the
    loops run that change the place: nvcc moves loads, and sums that stay where they are, out of the
    others.

    Returns:
        Positions in the thread's own memory that loops beyond ``limit`` iterations give,
        iterations that become straight code, and the mask of their loops.
    """
    window, level, wide = 1.0, count, 1.0
    closed = False
    outer, virtual = 0, 0
    for loop in range(count):
        if running[loop] == VIRTUAL and everything >> loop & 1 and extents[loop] < _VIRTUAL_LOOP:
            virtual |= 1 << loop
    window = iterations(virtual, extents, count)
    for loop in range(count):  # many virtual threads are the innermost loop
        if running[loop] == VIRTUAL and everything >> loop & 1 and not virtual >> loop & 1:
            if window * extents[loop] > limit:
                closed = True
                outer |= 1 << loop
            else:
                window *= extents[loop]
                virtual |= 1 << loop
    for loop in range(count - 1, -1, -1):
        kind = running[loop]
        if not everything >> loop & 1 or kind in (BLOCK, PARALLEL, VIRTUAL):
            continue
        if kind in (THREAD_X, THREAD_YZ):
            closed = True
        else:
            if kind == VECTOR:
                wide *= extents[loop]
            closed = closed or window * extents[loop] > limit
            if closed:
                outer |= 1 << loop
            else:
                window *= extents[loop]
                level = loop
    indexed, inside = 1.0, virtual
    for loop in range(level, count):
        if everything >> loop & 1 and running[loop] not in (
            BLOCK, PARALLEL, THREAD_X, THREAD_YZ, VIRTUAL, VECTOR,
        ):  # fmt: skip
            inside |= 1 << loop
    outside = iterations(outer, extents, count)
    for slot in range(distinct):
        depends = 0
        for item in range(many):
            if accesses[item, BUFFER] == own[slot]:
                for dim in range(size(nodes, accesses[item, INDICES])):
                    depends |= state[member(nodes, pool, accesses[item, INDICES], dim), 2]
        copies = iterations(virtual & depends, extents, count)
        scope = buffer(nodes, own[slot])[3]
        around = outside
        if moving and (scope != 2 or levels[level, slot] * copies <= _KEPT):
            around = _moved_out(outer, depends, running, extents, count)
        requests[slot] = max(1.0, levels[level, slot] / wide) * around * copies
        if scope == 2:
            indexed = max(indexed, iterations(outer & depends, extents, count))
    return indexed, window, inside


@part
def lane_turns(count: int, extents: Any, running: Any, everything: int, step: float) -> Any:
    """Iterations of one thread, those that TVM makes straight code as it was asked to taken as one.

    Args:
        count: loops.
        extents: of each.
        running: how each runs.
        everything: mask of those that run.
        step: iterations of a loop that are unrolled.
    """
    window, turns = 1.0, 1.0
    for loop in range(count - 1, -1, -1):
        kind = running[loop]
        if not everything >> loop & 1 or kind in (BLOCK, PARALLEL, THREAD_X, THREAD_YZ, VIRTUAL):
            continue
        if kind == VECTOR or (turns == 1.0 and window * extents[loop] <= step):
            window *= extents[loop]
        else:
            turns *= extents[loop]
    return turns


@part
def lane_straight(
    nodes: Any, pool: Any, accesses: Any, many: int, own: Any, distinct: int, count: int,
    extents: Any, running: Any, everything: int, state: Any,
) -> Any:  # fmt: skip
    """Iterations to unroll before every position in the thread's own memory is a constant."""
    depends = 0
    for slot in range(distinct):
        if buffer(nodes, own[slot])[3] == 2:
            for item in range(many):
                if accesses[item, BUFFER] == own[slot]:
                    for dim in range(size(nodes, accesses[item, INDICES])):
                        depends |= state[member(nodes, pool, accesses[item, INDICES], dim), 2]
    depends &= everything
    if depends == 0:
        return 0.0
    inside, found = 1.0, 0.0
    for loop in range(count):
        if running[loop] == VIRTUAL and everything >> loop & 1:
            inside *= extents[loop]
            if depends >> loop & 1:
                found = inside
    for loop in range(count - 1, -1, -1):
        kind = running[loop]
        if everything >> loop & 1 and kind not in (BLOCK, PARALLEL, VIRTUAL, THREAD_X, THREAD_YZ):
            inside *= extents[loop]
            if depends >> loop & 1 and extents[loop] > 1:
                found = inside
    return found
