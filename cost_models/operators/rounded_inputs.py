"""`rounding_s`: seconds in which a product's inputs are rounded to 8 bits, where a table has them.

The loops of aiconfigurator hand quantised products inputs of 16 bits (``collector/*/
collect_gemm.py``): those of 8-bit floats are rounded by one kernel, but for TensorRT-LLM's with one
scale for all, which is looked for first (``cudaFp8Utils.cu``); those that SGLang's
``int8_scaled_mm`` takes by torch's operators one after another.

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Kernels, and bytes that they move an element, by library and data type. Read in 16 bits and
#: written in 8; or a zero, the largest of all, that rounding, and the scale's cast; or cast, its
#: magnitude, the largest of a row, that clamped, divided, rounded, clamped and cast, in fp32
#: (``theory``).
_ONE, _BY_LARGEST, _BY_TORCH = (1.0, 3.0), (4.0, 5.0), (9.0, 47.0)
_KERNELS = MappingProxyType({
    ("trtllm", "fp8"): _BY_LARGEST, ("trtllm", "fp8_block"): _ONE, ("sglang", "fp8"): _ONE,
    ("sglang", "fp8_block"): _ONE, ("sglang", "int8_wo"): _BY_TORCH,
})  # fmt: skip
#: Seconds of a kernel that does next to nothing in a graph (``measured``, `replayed_kernels`), and
#: share of the memory's bandwidth that is reached (`memory_time`).
_KERNEL_S, _REACHED = 1.2e-6, 0.85


def rounding_s(table: OperatorTable, work: OperatorWork) -> Floats:
    """Seconds of rounding (N,), 0 where a row has none."""
    keys = list(zip(table.library, table.dtype, strict=True))
    known = {key: _KERNELS.get(key, (0.0, 0.0)) for key in set(keys)}
    count, moved = np.array([known[key] for key in keys], dtype=np.float64).reshape(-1, 2).T
    elements = table.dims["b"] * table.dims["m"] * table.dims["k"]
    moving_s = moved * elements / (_REACHED * work.bandwidth)
    return np.asarray(np.where(count > 0, count * _KERNEL_S + moving_s, 0.0))
