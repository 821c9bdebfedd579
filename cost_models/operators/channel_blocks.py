"""`channel_block_s`: what batch norms take beside their bytes, where one block sums up a channel.

torch's kernels (``Normalization.cuh``, 2.11) for images whose channels do not lie last give a
channel to one block of 512 threads, which goes through all images' pixels of it: for the statistics
of a batch, and for the gradients by weight and bias, before what is given back can be written.
Few channels leave most multiprocessors idle, however large the batch. Images with channels last
have kernels that share a channel out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Threads of a block; its first side is the least of these that is as wide as an image has pixels.
_THREADS = 512
_SIDES = (32, 64, 128, 256)
#: Clock cycles that a block takes for each turn of a thread: of a gradient, which reads two tensors
#: twice, and of the statistics of a batch. Least absolute errors of logarithms over 1,358 and 433
#: norms of an H200 in the sweeps inside CUDA graphs, beside their bytes (fitted): 0.54-0.75 ns and
#: 0.32-0.39 ns for each of 512 threads (docs/results/operators.md).
_GRADIENT, _STATISTICS = 1.4 * _THREADS, 0.7 * _THREADS


def channel_block_s(table: OperatorTable, memory_s: Floats, clock_hz: Floats) -> Floats:
    """Seconds (N,) of batch norms and their gradients beside their bytes, 0 of all others.

    Args:
        table: the rows (N,).
        memory_s: of each row's bytes, read or written once (N,).
        clock_hz: of its device (N,).
    """
    d, kind = table.dims, table.kind
    plain = (d["channels"] > 0) & (d["channels_last"] == 0)
    gradient = plain & (kind == "batchnorm_gradient")
    statistics = plain & (kind == "batchnorm") & (d["training"] > 0)
    images, pixels = d["rows"] / np.maximum(d["channels"], 1), np.maximum(d["cols"], 1)
    side = np.select([pixels <= each for each in _SIDES], _SIDES, _THREADS)
    turns = np.ceil(images * side / _THREADS) * np.ceil(pixels / side)
    cycles = turns * np.where(gradient, _GRADIENT, np.where(statistics, _STATISTICS, 0.0))
    # Both operands of a gradient are read twice, of three tensors; of statistics one of two.
    again = memory_s * np.where(gradient, 2 / 3, np.where(statistics, 1 / 2, 0.0))
    return np.asarray(cycles / clock_hz + again)
