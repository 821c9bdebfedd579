"""`update_s`: what a fused update of many tensors takes beside its bytes: kernels one by one.

Each kernel ends with its longest chunk, which one block goes through by itself, so that an update
of many small tensors takes several times what its bytes do (`update_packing`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Clock cycles of a kernel, and of an element of its longest chunk. Least squares of relative
#: errors, together with the bytes, over 538 updates of an H200 (torch 2.11) whose elements are
#: multiples of 64: 3.0-3.1 us a kernel and 0.54-0.60 ns an element, in 16 bits and FP32 alike;
#: 5.7 and 8.0 % off in the mean, by their elements alone 29 % (docs/results/operators.md).
_KERNEL, _ELEMENT = 6100.0, 1.15


def update_s(table: OperatorTable, clock_hz: Floats) -> Floats:
    """Seconds (N,) of an update's kernels beside its bytes; 0 of what is none.

    Args:
        table: the rows (N,).
        clock_hz: of their devices (N,).
    """
    d = table.dims
    return np.asarray((d["kernels"] * _KERNEL + d["longest"] * _ELEMENT) / clock_hz)
