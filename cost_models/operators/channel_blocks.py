"""`channel_block_s`: what batch norms take beside their bytes, where one block sums up a channel.

torch's kernels (``Normalization.cuh``, 2.11) for images whose channels do not lie last give a
channel to one block of 512 threads, which goes through all images' pixels of it: for the statistics
of a batch, and for the gradients by weight and bias, before what is given back can be written.
Few channels leave most multiprocessors idle, however large the batch. What is written, or a norm
with given statistics, has a block for each channel of an image or of a few: small images make many
short blocks. Images with channels last have kernels of their own (`channel_tile_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork, widths
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Threads of a block that sums up; its first side is the least of these as wide as an image's
#: pixels. Blocks of it that a multiprocessor runs at once.
_THREADS, _RESIDENT = 512, 2
_SIDES = (32, 64, 128, 256)
#: Threads of a block that writes: a quarter of the pixels, 64 at least for as many pixels, so many
#: images together that 64 threads have work; blocks at most, pixels of all channels together.
_WRITERS = (16, 32, 64, 128, 256)
_FEWEST, _MOST = 64, 256 * 1024
#: Threads that a multiprocessor has at once: all since Volta but Turing's.
_USUAL_RESIDENT = 2048.0


class _Cost(NamedTuple):
    """Of a kind of norm: clock cycles, and passes over its bytes beside the first.

    Attributes:
        start: of its further kernels.
        passes: over the bytes, beside the one that is counted; that one is in the turns, too, where
            negative.
        summing: a turn of a thread that sums up a channel whose tensors the L2 holds.
        missing: more of it where they come from memory.
        block: a multiprocessor's for each block that writes.
        writing: a turn of a thread that writes.
    """

    start: float
    passes: float
    summing: float
    missing: float
    block: float
    writing: float


#: By operator, whether of the statistics of the batch, and whether of 16 bits (FP32 norms are
#: cuDNN's). Least absolute errors of logarithms over 4,575 norms of an H200 in the sweeps inside
#: CUDA graphs (fitted; 11-21 % a kind).
_COSTS: Mapping[tuple[str, bool, bool], _Cost] = MappingProxyType(
    {
        ("batchnorm", True, True): _Cost(6400, 0, 425, 400, 160, 105),
        ("batchnorm", True, False): _Cost(500, 0.2, 325, 80, 0, 0),
        ("batchnorm", False, True): _Cost(3100, 0.8, 0, 0, 128, 198),
        ("batchnorm", False, False): _Cost(0, 0.3, 0, 0, 82, 63),
        ("batchnorm_gradient", True, True): _Cost(1050, -1, 770, 630, 57, 0),
        ("batchnorm_gradient", True, False): _Cost(2700, -0.65, 490, 840, 10, 0),
        ("batchnorm_gradient", False, True): _Cost(1800, -1, 680, 600, 41, 0),
        ("batchnorm_gradient", False, False): _Cost(1300, -1, 680, 900, 21, 0),
    }
)


def channel_block_s(
    table: OperatorTable,
    work: OperatorWork,
    memory_s: Floats,
    from_memory: Floats,
    clock_hz: Floats,
) -> Floats:
    """Seconds (N,) of batch norms and their gradients beside their bytes, 0 of all others.

    Args:
        table: the rows (N,).
        work: of them.
        memory_s: of each row's bytes, read or written once (N,).
        from_memory: share of its bytes that no cache holds (N,).
        clock_hz: of its device (N,).
    """
    d = table.dims
    channels = np.maximum(d["channels"], 1)
    images, pixels = np.maximum(d["rows"] / channels, 1), np.maximum(d["cols"], 1)
    side = _least(pixels, _SIDES)
    summing = np.ceil(images * side / _THREADS) * np.ceil(pixels / side)
    summing = summing * np.maximum(channels / (_RESIDENT * work.units), 1)
    threads = np.minimum(_least(pixels, _WRITERS), _FEWEST)
    threads = np.maximum(_least(pixels // 4, _WRITERS), threads)
    together = np.maximum(_FEWEST / threads, 1)
    rows = np.clip(np.ceil(images / together), 1, np.maximum(_MOST // channels, 1))
    resident = work.units * _USUAL_RESIDENT
    writing = np.ceil(images / (rows * together)) * np.ceil(pixels / threads)
    writing = writing * np.maximum(channels * rows * threads * together / resident, 1)
    blocks = channels * rows / work.units
    found = np.zeros(len(pixels))
    half = widths(table)[0] < 4
    plain = (d["channels"] > 0) & (d["channels_last"] == 0)
    for (kind, training, is_half), cost in _COSTS.items():
        asked = plain & (table.kind == kind) & ((d["training"] > 0) == training)
        turn = cost.summing + cost.missing * from_memory
        cycles = cost.start + turn * summing + cost.block * blocks + cost.writing * writing
        here = cycles / clock_hz + cost.passes * memory_s
        found = np.where(asked & (half == is_half), here, found)
    return found


def _least(size: Floats, sides: tuple[int, ...]) -> Floats:
    """The least of the sides that a size does not pass, or 512."""
    return np.asarray(np.select([size <= side for side in sides], sides, _THREADS), np.float64)
