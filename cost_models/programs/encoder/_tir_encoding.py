"""encode: text of a TIR module to computation vectors, positions, depths and totals, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.cost_models.programs.encoder._leaf_loops import buffer
from foreplan.cost_models.programs.encoder._leaf_vector import leaf_vector
from foreplan.cost_models.programs.encoder._tir_compiled import STAMP, part
from foreplan.cost_models.programs.encoder._tir_scan import scan
from foreplan.cost_models.programs.encoder._tir_walk import (
    ACCESSES,
    BUFFER,
    KERNEL,
    NO_FUNCTION,
    REALIZE,
    TOO_LARGE,
    gather,
    main_function,
    member,
    ref,
    size,
    walk,
)

_D = 3


@part
def _drop_loaded(leaf: Any, accesses: Any, before: Any, accesses_before: Any) -> None:
    """Drop loads that the store before, of the same block, has made: sums updated together."""
    kept = 1
    for item in range(1, leaf[ACCESSES]):
        loaded = False
        for other in range(1, before[ACCESSES]):
            loaded = loaded or accesses_before[other, BUFFER] == accesses[item, BUFFER]
        if not loaded or accesses[item, BUFFER] == accesses[0, BUFFER]:
            for column in range(accesses.shape[1]):
                accesses[kept, column] = accesses[item, column]
            kept += 1
    leaf[ACCESSES] = kept


@compiled
def encode(
    data: Any, nodes: Any, pool: Any, leaves: Any, loops: Any, rows: Any, state: Any, work: Any,
    operations: Any, accesses: Any, touches: Any, out: Any, totals: Any,
) -> Any:  # fmt: skip
    """Encode one module; see `compact_ast.CompactAstEncoder` for the arrays.

    Returns:
        Number of leaves, or what stopped it (negative, `_tir_walk`); -10 for a damaged text.
    """
    used = data.size // 12 + 1
    nodes[:used] = 0
    root = scan(data, nodes[:used], pool)
    if root < 0:
        return -10
    function = main_function(nodes[:used], pool, root)
    if function == 0:
        return NO_FUNCTION
    alias, loop_of, params, buffers = rows[0], rows[1], rows[2], rows[3]
    alias[:used], loop_of[:used], params[:used], buffers[:used] = 0, -1, 0, -1
    found = walk(nodes[:used], pool, function, leaves, loops, alias, work)
    if found < 0:
        return found
    arguments = ref(nodes, function, _D)
    for item in range(size(nodes, arguments)):
        params[member(nodes, pool, arguments, item)] = 1
    operations[:found] = 0.0
    touches[:found] = 0
    known = 0
    kernels = 0
    for leaf in range(found):
        stopped = gather(
            nodes[:used], pool, alias, leaves[leaf], operations[leaf], accesses[leaf], work
        )
        if stopped < 0:
            return stopped
        if leaf > 0 and leaves[leaf, REALIZE] == leaves[leaf - 1, REALIZE]:
            _drop_loaded(leaves[leaf], accesses[leaf], leaves[leaf - 1], accesses[leaf - 1])
        kernels = max(kernels, leaves[leaf, KERNEL])
        for item in range(leaves[leaf, ACCESSES]):
            variable = accesses[leaf, item, BUFFER]
            if buffers[variable] < 0:
                if known == touches.shape[1]:
                    return TOO_LARGE
                buffers[variable] = known
                known += 1
            touches[leaf, buffers[variable]] = 1
    sizes = np.zeros(touches.shape[1])
    out[:found] = 0.0
    totals[:] = 0.0
    for leaf in range(found):
        stopped = leaf_vector(
            nodes[:used], pool, alias, loop_of, leaves, loops, leaf, operations[leaf],
            accesses[leaf], params, buffers, sizes, touches, found, state[0, :used],
            state[1, :used], work[:2048], rows[4], work[2048:], out[leaf], totals,
        )  # fmt: skip
        if stopped < 0:
            return stopped
    for row in range(used):
        if buffers[row] >= 0 and buffer(nodes, row)[3] == 0:
            totals[3 if params[row] else 4] += sizes[buffers[row]]
    totals[5] = max(1, kernels)
    totals[11] = found
    totals[17] = size(nodes, arguments)
    totals[-1] = STAMP
    return found
