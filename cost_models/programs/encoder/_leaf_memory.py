"""Memory entries of a leaf: what it touches while its inner loops run, and what passes a cache.

The bytes of a GPU's leaf are those of its elements. On a CPU whole lines are counted, and a buffer
that the function allocates is never larger than TVM makes it: the loops around its allocation use
it again. Compiled; called by `_leaf_vector`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.cost_models.programs.encoder import _leaf_names as names
from foreplan.cost_models.programs.encoder._leaf_lanes import MAX_DIMS
from foreplan.cost_models.programs.encoder._leaf_loops import buffer, log, set_highest
from foreplan.cost_models.programs.encoder._leaf_names import LINE_BYTES
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.cost_models.programs.encoder._tir_regions import evaluate, iterations, touched

_CACHES = np.array(names.CACHE_SIZES, dtype=np.float64)
_L1, _L2 = 2, 4
#: Distinct bytes, traffic by size of cache, three intensities.
MEMORY_ENTRIES = 1 + len(names.CACHE_SIZES) + 3


@part
def region_levels(
    nodes: Any, pool: Any, alias: Any, loop_of: Any, accesses: Any, many: int, own: Any,
    distinct: int, count: int, extents: Any, everything: int, order: Any, length: int, state: Any,
    levels: Any, runs: Any,
) -> Any:  # fmt: skip
    """Elements of each buffer, and runs among them, while the loops from each level inwards run.

    Fills ``levels`` and ``runs`` (count + 1, distinct).

    Returns:
        Whether all data types are known.
    """
    zeros, highest = np.zeros(extents.size, dtype=np.int64), np.zeros(extents.size, dtype=np.int64)
    for level in range(count, -1, -1):
        mask = everything & ~((1 << level) - 1)
        if level < count and not (everything >> level & 1 and extents[level] > 1):
            levels[level] = levels[level + 1]  # a loop of one iteration touches nothing new
            runs[level] = runs[level + 1]
            continue
        set_highest(extents, count, mask, highest)
        evaluate(nodes, pool, alias, loop_of, zeros, highest, order, length, state)
        for slot in range(distinct):
            shape, width, _, _ = buffer(nodes, own[slot])
            if width < 0:
                return False
            levels[level, slot], runs[level, slot] = touched(
                nodes, pool, accesses, many, own[slot], shape, mask, extents, count, state
            )
    return True


@part
def memory_entries(
    nodes: Any, own: Any, distinct: int, params: Any, widths: Any, levels: Any, runs: Any,
    gpu: bool, everything: int, extents: Any, count: int, operations: float, per_level: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Fill the "memory" entries; ``per_level`` gets the bytes that lie in use at each level.

    Returns:
        Bytes through caches of 32 KiB and 1 MiB.
    """
    device_level = np.zeros(count + 1)
    for slot in range(distinct):
        _, width, _, scope = buffer(nodes, own[slot])
        own_elements = 1.0
        for dim in range(MAX_DIMS):
            own_elements *= widths[slot, dim]
        for level in range(count + 1):
            moved = levels[level, slot] * width
            if not gpu and params[own[slot]]:
                lines = math.ceil(runs[level, slot] * width / LINE_BYTES)
                moved = levels[level, slot] / runs[level, slot] * lines * LINE_BYTES
            elif not gpu:
                moved = min(levels[level, slot], own_elements) * width
            per_level[level] += moved
            if scope == 0:
                device_level[level] += moved
    unique = device_level[0]
    out[0] = log(unique)
    # The outermost level whose data fits a cache is loaded once for each turn outside it.
    traffic_l1 = traffic_l2 = 0.0
    for item in range(_CACHES.size):
        level = 0
        while level < count and per_level[level] > _CACHES[item]:
            level += 1
        traffic = device_level[level] * iterations(everything & ((1 << level) - 1), extents, count)
        out[1 + item] = log(traffic)
        if item == _L1:
            traffic_l1 = traffic
        if item == _L2:
            traffic_l2 = traffic
    at = 1 + _CACHES.size
    out[at] = log(operations / max(1.0, unique))
    out[at + 1] = log(operations / max(1.0, traffic_l1))
    out[at + 2] = log(operations / max(1.0, traffic_l2))
    return traffic_l1, traffic_l2
