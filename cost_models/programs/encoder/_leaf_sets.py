"""Sets of a CPU's caches: what passes a cache when lines crowd into few of its sets.

A cache keeps a line in one of few ways of the set that its address names, so lines that lie a power
of two apart share sets and push each other out long before the cache is full: rows of 4 KiB, as of
32 x 32 images or of products with 1,024 columns, all fall into one set of the first level. A buffer
whose lines crowd counts here with as many bytes as a cache must have to hold its fullest set.
Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder._leaf_lanes import MAX_DIMS
from foreplan.cost_models.programs.encoder._leaf_loops import buffer, log, set_highest
from foreplan.cost_models.programs.encoder._leaf_names import LINE_BYTES
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import evaluate, iterations
from foreplan.cost_models.programs.encoder._tir_walk import BUFFER, INDICES, member, size

#: Bytes of a cache and of one of its ways, first and second level. The first level of x86 is looked
#: up within a page of 4 KiB; both are of cores of 2023 and 2024 (AMD Zen 5: 48 KiB in 12 ways,
#: 1 MiB in 16; Intel Sapphire Rapids: 48 KiB in 12, 2 MiB in 16).
_CACHES = np.array([[49152.0, 4096.0], [1048576.0, 65536.0]])
#: Groups of neighbouring sets that are told apart.
_GROUPS = 64
CROWDED_ENTRIES = 2


@part
def _needed(lines: float, run: float, steps: Any, turns: Any, outer: int, way: float) -> Any:
    """Bytes that a cache must have to hold runs of neighbours that lie ``steps`` bytes apart."""
    group = way / _GROUPS
    met, shifted = np.zeros(_GROUPS, dtype=np.int64), np.zeros(_GROUPS, dtype=np.int64)
    for item in range(int(min(_GROUPS, math.ceil(run / group)))):
        met[item] = 1
    for dim in range(outer):
        shifted[:] = 0
        for turn in range(int(min(turns[dim], 4.0 * _GROUPS))):
            moved = (steps[dim] * turn) % way
            if turn > 0 and moved == 0.0:
                break
            first = int(moved // group)
            for item in range(_GROUPS):
                if met[item]:
                    shifted[(item + first) % _GROUPS] = 1
        met, shifted = shifted, met
    fullest = lines * LINE_BYTES / (met.sum() * group)  # ways
    return max(lines * LINE_BYTES, (fullest - 1.0) * way)


@part
def crowded_entries(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, widths: Any, count: int, extents: Any, everything: int, order: Any, length: int,
    state: Any, out: Any,
) -> None:  # fmt: skip
    """Fill the "crowded" entries: bytes through the first and the second level."""
    zeros, highest = np.zeros(extents.size, dtype=np.int64), np.zeros(extents.size, dtype=np.int64)
    steps, turns = np.zeros(MAX_DIMS), np.zeros(MAX_DIMS)
    moved, needed = np.zeros(count + 1), np.zeros((count + 1, CROWDED_ENTRIES))
    for level in range(count, -1, -1):
        if level < count and not (everything >> level & 1 and extents[level] > 1):
            moved[level], needed[level] = moved[level + 1], needed[level + 1]
            continue
        mask = everything & ~((1 << level) - 1)
        set_highest(extents, count, mask, highest)
        evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
        for slot in range(distinct):
            width = float(buffer(nodes, own[slot])[1])
            dims, together = 0, 0.0
            for item in range(many):
                if accesses[item, BUFFER] == own[slot]:
                    dims = max(dims, size(nodes, accesses[item, INDICES]))
                    together += 1.0
            stride, run, lines, outer = width, width, 0.0, 0
            for dim in range(min(MAX_DIMS, dims) - 1, -1, -1):
                low, high, depends = 1 << 40, -(1 << 40), 0
                for item in range(many):
                    if accesses[item, BUFFER] == own[slot] and dim < size(
                        nodes, accesses[item, INDICES]
                    ):
                        row = member(nodes, pool, accesses[item, INDICES], dim)
                        low, high = min(low, state[row, 0]), max(high, state[row, 1])
                        depends |= state[row, 2]
                span = min(high - low + 1.0, widths[slot, dim])
                turn = max(1.0, min(span, iterations(depends & mask, extents, count) * together))
                if turn > 1.0:
                    step = stride * (span - 1.0) / (turn - 1.0)
                    if outer == 0 and step <= max(run, LINE_BYTES):
                        run += step * (turn - 1.0)
                    else:
                        steps[outer], turns[outer] = step, turn
                        outer += 1
                stride *= widths[slot, dim]
            lines = math.ceil(run / LINE_BYTES)
            for dim in range(outer):
                lines *= turns[dim]
            moved[level] += lines * LINE_BYTES
            for cache in range(CROWDED_ENTRIES):
                needed[level, cache] += _needed(lines, run, steps, turns, outer, _CACHES[cache, 1])
    for cache in range(CROWDED_ENTRIES):
        level = 0
        while level < count and needed[level, cache] > _CACHES[cache, 0]:
            level += 1
        out[cache] = log(moved[level] * iterations(everything & ((1 << level) - 1), extents, count))
