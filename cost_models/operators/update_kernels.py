"""`update_s`: what a fused update of many tensors takes beside its bytes: kernels one by one.

Each kernel ends with its longest chunk, which one block goes through by itself, so that an update
of many small tensors takes several times what its bytes do (`update_packing`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Clock cycles of a kernel, and of an element of its longest chunk; what a byte takes of what
#: `memory_time` says of it. Least absolute errors of logarithms over 629 updates of an H200 in BF16
#: (torch 2.11, seventh sweep inside CUDA graphs) whose elements are multiples of 64, fitted: 4.6 %
#: off; 112 in FP16 5.0, 305 in FP32 16.9, too long; trees correct it
#: (docs/results/operators_history.md).
_KERNEL, _ELEMENT, _MOVING = 4750.0, 0.76, 1.4


def update_s(table: OperatorTable, memory_s: Floats, clock_hz: Floats) -> Floats:
    """Seconds (N,) of an update's kernels beside its bytes; 0 of what is none.

    The longest chunk is gone through while all others move, and hides behind the more of them the
    more they are: as the sides of a right angle.

    Args:
        table: the rows (N,).
        memory_s: seconds to move their bytes (N,).
        clock_hz: of their devices (N,).
    """
    d = table.dims
    chunk = d["longest"] * _ELEMENT / clock_hz
    whole = d["kernels"] * _KERNEL / clock_hz + np.hypot(_MOVING * memory_s, chunk)
    return np.asarray(np.where(d["kernels"] > 0, whole - memory_s, 0.0))
