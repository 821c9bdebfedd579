"""`splits_sums`: products whose sum over ``k`` a library may cut into parts.

cuBLAS does (`tile_times`). The kernels for quantised operands are CUTLASS's or vectors': SGLang's
(``sgl-kernel``) and TensorRT-LLM's for blocks of scales, for weights alone and for SmoothQuant. In
them a block takes its tile's whole sum, or nearly: few outputs of a long sum keep few
multiprocessors busy. Plain 8-bit floats go through cuBLAS in TensorRT-LLM alone.

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import widths
from foreplan.datasets.sweeps.operator_table import OperatorTable

#: Data types of 8 bits that a library's cuBLAS multiplies (``theory``, its ``linear.py``).
_BY_CUBLAS = frozenset({("trtllm", "fp8"), ("trtllm", "fp8_static")})


def splits_sums(table: OperatorTable) -> NDArray[np.bool_]:
    """Rows whose sums may be split (N,)."""
    named = [key in _BY_CUBLAS for key in zip(table.library, table.dtype, strict=True)]
    whole = (widths(table)[1] < 2) & ~np.array(named, dtype=np.bool_)
    return np.asarray((table.kind == "linear") & ~whole)
