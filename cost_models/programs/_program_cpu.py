"""cpu_parts: seconds that each kind of work of a leaf would take on one CPU core, by theory.

Arithmetic of loops that become vector code and of those that stay scalar (a sum that waits for
itself, an index that TVM cannot see through, a condition with two ends), loop iterations, address
arithmetic and calls at a round price in cycles, and the bytes that must pass each size of cache at
a round rate. `program_scale` fits one weight for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs._program_counts import Counts
from foreplan.cost_models.programs.encoder._leaf_names import CACHE_SIZES, LINE_BYTES

Floats = NDArray[np.float64]

#: Bytes a cycle from any cache; cycles of a term of a sum, of a cheap and a costly function, of a
#: call, of an element in a line of its own; lanes of vector code. Round: part weights are fitted.
_BYTES_PER_CYCLE = 16.0
_SUM_CYCLES, _CHEAP_CYCLES, _COSTLY_CYCLES, _CALL_CYCLES, _MISS_CYCLES = 4.0, 8.0, 30.0, 60.0, 10.0
_LANES = 8.0
_STORE_JUMPS, _STORE_SCATTERED = 2.0, 3.0

_BLOCK = (
    "bodies", "operations", "beside", "broadcast", "gathered", "results", "apart", "hoisted_apart",
    "spilled", "chained", "divisions",
)  # fmt: skip
#: Until a sum's result can be added to (an addition of x86's last ten years), and instructions that
#: a core looks ahead (reorder buffers hold 224 to 512): theory, round numbers.
_LATENCY_CYCLES, _WINDOW = 4.0, 256.0
#: Names of the columns.
PARTS = (
    "peak", "wide", "narrow", "iterations_wide", "iterations_narrow", "starts", "chained",
    "address", "divisions", "scattered", "jumping", "guarded", "guarded_functions", "cheap_wide",
    "cheap_narrow", "costly", "called", "quotients_wide", "quotients_narrow", "requests",
    "segments", "integer", "casts", "choices", "strided",
    *(f"traffic_{size}" for size in CACHE_SIZES),
    "crowded_l1", "crowded_l2", *(f"block_{name}" for name in _BLOCK), "block_bound",
)  # fmt: skip


def cpu_parts(counts: Counts) -> Floats:
    """Return parts of every leaf (M, ``len(PARTS)``); those of a GPU are to be ignored."""
    c = counts
    clock = c.figure("clock_hz")[c.program]
    peak = np.array([float(d.peak("fp32") or 1e11) for d in c.table.devices])
    jobs = np.maximum(1.0, c.plain("loops.parallel"))
    clock = clock * np.minimum(jobs, np.maximum(1.0, c.figure("units")[c.program]))
    once = 1.0 + c.plain("code.repeated")  # of what is repeated one turn is left
    iterations = c.plain("loops.iterations") / once
    flops = c.plain("code.flops")
    scattered = c.raw("code.inner_scattered") + (c.raw("code.inner_store") == _STORE_SCATTERED)
    far = c.raw("code.inner_store") == _STORE_JUMPS
    jumping = c.raw("code.inner_jumping") + far
    guards = c.raw("code.guards")
    alone = (c.raw("code.sums_innermost") > 0) | (scattered > 0) | (guards > 0)
    alone |= far & (c.plain("loops.vectorized") <= 1)

    def wide(values: Floats) -> Floats:
        return np.where(alone, 0.0, values) / _LANES / clock

    def narrow(values: Floats) -> Floats:
        return np.where(alone, values, 0.0) / clock

    functions, quotients = c.plain("code.functions"), c.plain("code.quotients")
    costly, called = c.plain("arithmetic.costly_functions"), c.plain("arithmetic.called_functions")
    every = c.plain("arithmetic.cheap_functions") + c.plain("arithmetic.quotients")
    stride = np.minimum(c.plain("load0.stride_inner"), c.plain("load1.stride_inner"))
    stride = np.where(c.raw("load1.present") > 0, stride, c.plain("load0.stride_inner"))
    # Instructions go on side by side, a chain of sums waits; few instructions let the next block's
    # chain begin.
    block = {name: c.plain(f"block.{name}") for name in _BLOCK}
    asked = block["beside"] + block["broadcast"] + 2 * block["gathered"] + block["results"]
    busy = 0.5 * np.maximum(block["operations"], asked)
    each = (block["operations"] + asked) / np.maximum(1.0, block["bodies"])
    chain = _LATENCY_CYCLES * block["chained"] / np.clip(_WINDOW / np.maximum(1.0, each), 1.0, 8.0)
    by_leaf = [
        c.plain("arithmetic.flops_per_iteration") * iterations / peak[c.table.device][c.program],
        wide(flops), narrow(flops), wide(iterations), narrow(iterations),
        c.plain("code.inner_starts") / clock, c.plain("code.chained") * _SUM_CYCLES / clock,
        c.plain("code.address_operations") / clock,
        np.where(scattered > 0, c.plain("code.divisions"), 0.0) / clock,
        scattered * iterations / clock, jumping * iterations / clock, guards * iterations / clock,
        np.where(guards > 0, every, 0.0) * _CHEAP_CYCLES / clock,
        wide(functions) * _CHEAP_CYCLES, narrow(functions) * _CHEAP_CYCLES,
        costly * _COSTLY_CYCLES / clock, called * _CALL_CYCLES / clock,
        wide(quotients) * _CHEAP_CYCLES, narrow(quotients) * _CHEAP_CYCLES,
        c.plain("gpu.requests") / once / clock, c.plain("gpu.sectors") / once / clock,
        c.plain("arithmetic.integer_operations") / once / clock,
        c.plain("arithmetic.casts") / once / clock, c.plain("arithmetic.choices") / once / clock,
        np.where(stride > 8, iterations, 0.0) * _MISS_CYCLES / clock,
        *[
            c.plain(f"memory.traffic_{size}") / (_BYTES_PER_CYCLE * clock)
            for size in CACHE_SIZES
        ],
        *[np.minimum(c.plain(f"memory.{name}"), LINE_BYTES * asked) / (_BYTES_PER_CYCLE * clock)
          for name in ("crowded_l1", "crowded_l2")],
        *[block[name] / clock for name in _BLOCK], np.maximum(busy, chain) / clock,
    ]  # fmt: skip
    return np.stack(by_leaf, 1)
