"""`row_block_s`: what norms of rows take beside their bytes, where each row has threads of its own.

torch's kernels (``layer_norm_kernel.cu``, 2.11) give a block to every row, however short: of 128
threads where its elements can be read four at a time, of 512 where not. Gradients by weight and
bias add up over all rows in few blocks, but for more than 2^16 rows of few columns in many. So many
short rows take as many times longer than their bytes. Groups of channels are few long rows: one
block each goes through a row for its mean (``group_norm_kernel.cu``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Clock cycles that a multiprocessor is busy with a row: of a layer norm, of a root mean square,
#: of either where rows are no multiple of four; of a gradient up to `_FEW_ROWS` and beyond. Medians
#: of rows of up to 300 columns of an H200, in the sweeps inside CUDA graphs (fitted). Rows of 260
#: and more on five other chips, by torch 2.1, take 800 to 1,100.
_NORM, _ROOT_MEAN_SQUARE, _ODD = 300.0, 170.0, 1300.0
_GRADIENT, _GRADIENT_OF_MANY = 1000.0, 300.0
#: Elements that are read at a time, and the rows up to which a gradient is one pass.
_VECTOR, _FEW_ROWS = 4, 1 << 16
#: Threads of a group's block, and clock cycles for each turn of them: the median of groups of an
#: H200 in the eighth sweep (fitted; the middle half 460 to 900). Gradients have a block a channel.
_THREADS, _TURN = 512, 620.0


def row_block_s(table: OperatorTable, work: OperatorWork, clock_hz: Floats) -> Floats:
    """Seconds (N,) of norms of rows and their gradients beside their bytes, 0 of all others.

    Args:
        table: the rows (N,).
        work: what each has to do, and its device's multiprocessors.
        clock_hz: of its device (N,).
    """
    d, kind = table.dims, table.kind
    norm, gradient = kind == "layernorm", kind == "layernorm_gradient"
    whole = np.where(d["rms"] > 0, _ROOT_MEAN_SQUARE, _NORM)
    forward = np.where(d["cols"] % _VECTOR > 0, _ODD, whole)
    back = np.where(d["rows"] > _FEW_ROWS, _GRADIENT_OF_MANY, _GRADIENT)
    cycles = d["rows"] * np.where(norm, forward, np.where(gradient, back, 0.0))
    groups = np.maximum(d["rows"], work.units) * np.ceil(d["cols"] / _THREADS) * _TURN
    cycles = np.where(norm & (d["channels"] > 0), groups, cycles)
    return np.asarray(cycles / (work.units * clock_hz))
