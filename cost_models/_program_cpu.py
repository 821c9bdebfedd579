"""cpu_parts: seconds that each kind of work of a program would take on one CPU core, by theory.

Arithmetic at the full width of the vector unit and at one element a cycle, loop iterations, address
arithmetic and calls at a round price in cycles, and the bytes that must pass each size of cache at
a round rate. `program_scale` fits one weight for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models._leaf_names import CACHE_SIZES
from foreplan.cost_models._program_counts import Counts

Floats = NDArray[np.float64]

_BYTES_PER_CYCLE = 16.0
_CHEAP_CYCLES, _COSTLY_CYCLES, _CALL_CYCLES, _MISS_CYCLES = 8.0, 30.0, 60.0, 10.0

#: Names of the columns.
PARTS = (
    "vector", "scalar", "iterations", "unvectorized", "address", "cheap", "costly", "called",
    "quotients", "strided", "requests", "integer", "gathered", "scalarised", "index_divided",
    *(f"traffic_{size}" for size in CACHE_SIZES),
)  # fmt: skip


def cpu_parts(counts: Counts) -> tuple[Floats, Floats]:
    """Return parts (N, ``len(PARTS)``) and the rough time of each leaf (M)."""
    c = counts
    clock = c.figure("clock_hz")[c.program]
    peak = np.array([float(d.peak("fp32") or 1e11) for d in c.table.devices])
    jobs = np.maximum(1.0, c.plain("loops.parallel"))
    clock = clock * np.minimum(jobs, np.maximum(1.0, c.figure("units")[c.program]))
    iterations = c.plain("loops.iterations")
    flops = iterations * c.plain("arithmetic.flops_per_iteration")
    lanes = np.maximum(1.0, c.plain("loops.vectorized"))
    vector = np.minimum(8.0, lanes)
    stride = np.minimum(c.plain("load0.stride_inner"), c.plain("load1.stride_inner"))
    stride = np.where(c.raw("load1.present") > 0, stride, c.plain("load0.stride_inner"))
    choices = c.plain("arithmetic.choices")
    gathered = c.plain("gpu.sectors") > 1.5 * c.plain("gpu.requests")
    by_leaf = [
        flops / peak[c.table.device][c.program], flops / vector / clock, iterations / clock,
        np.where(lanes > 1, 0.0, flops) / clock, c.plain("arithmetic.address_operations") / clock,
        c.plain("arithmetic.cheap_functions") * _CHEAP_CYCLES / clock,
        c.plain("arithmetic.costly_functions") * _COSTLY_CYCLES / clock,
        c.plain("arithmetic.called_functions") * _CALL_CYCLES / clock,
        c.plain("arithmetic.quotients") * _CHEAP_CYCLES / clock,
        np.where(stride > 8, iterations, 0.0) * _MISS_CYCLES / clock,
        c.plain("gpu.requests") / clock, c.plain("arithmetic.integer_operations") / clock,
        c.plain("gpu.sectors") / clock, np.where(lanes > 1, choices, 0.0) / clock,
        np.where(gathered, c.plain("arithmetic.address_operations"), 0.0) / clock,
        *[
            c.plain(f"memory.traffic_{size}") / (_BYTES_PER_CYCLE * clock)
            for size in CACHE_SIZES
        ],
    ]  # fmt: skip
    leaf_s = by_leaf[1] + by_leaf[2] / vector + by_leaf[7] + by_leaf[17] + 1e-12
    return c.columns(by_leaf), np.asarray(leaf_s)
