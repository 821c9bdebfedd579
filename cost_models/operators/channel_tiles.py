"""`channel_tile_s`: what batch norms with channels last take beside their bytes.

torch's kernels for them (``Normalization.cuh``, 2.11, ``flexible_launch_configs``) give 32 channels
to a block of 512 threads and share out the pixels among up to 128 blocks; a thread goes through
what falls to it four loads at a time and waits for each four. Where that would make fewer than
eight blocks, one goes through all pixels: a few thousand take several times as long as in eight.
Channels that do not lie last have kernels of their own (`channel_block_s`).
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

#: Channels, threads of a block at most; pixels from which a thread takes a second turn of loads.
_CHANNELS, _THREADS, _PIXELS, _LOADS = 32, 512, 16, 4
#: Blocks of the same channels at most, and the fewest that are worth to add up through memory.
_MOST, _WORTH = 128, 8
#: Blocks that a multiprocessor runs at once.
_RESIDENT = 2


class _Cost(NamedTuple):
    """Of a kind of norm: clock cycles, and passes over its bytes beside the first.

    Attributes:
        start: of its further kernels.
        passes: over the bytes, beside the one that is counted.
        summing: a turn of a thread that adds up channels.
        writing: a turn of a thread that writes what is given back.
        shared: adding up through memory.
    """

    start: float
    passes: float
    summing: float
    writing: float
    shared: float


#: By operator, whether of the statistics of the batch, and whether of 16 bits: FP32 has other
#: kernels. Least absolute errors of logarithms over 1,605 norms of an H200 in the sweeps inside
#: CUDA graphs (fitted; 6-12 % a kind, FP32 with given statistics 34).
_COSTS: Mapping[tuple[str, bool, bool], _Cost] = MappingProxyType(
    {
        ("batchnorm", True, True): _Cost(3800, 1.0, 1830, 830, 5200),
        ("batchnorm", True, False): _Cost(2000, 0.6, 0, 1480, 4100),
        ("batchnorm", False, True): _Cost(3200, 0.1, 70, 540, 0),
        ("batchnorm", False, False): _Cost(2400, 0.55, 120, 0, 0),
        ("batchnorm_gradient", True, True): _Cost(850, 0.7, 630, 870, 5300),
        ("batchnorm_gradient", True, False): _Cost(2500, 0.65, 0, 1140, 2800),
        ("batchnorm_gradient", False, True): _Cost(5800, 4.3, 570, 0, 6100),
        ("batchnorm_gradient", False, False): _Cost(3300, 2.0, 560, 0, 8100),
    }
)


def channel_tile_s(
    table: OperatorTable, work: OperatorWork, memory_s: Floats, clock_hz: Floats
) -> Floats:
    """Seconds (N,) of batch norms and their gradients beside their bytes, 0 of all others.

    Args:
        table: the rows (N,).
        work: of them.
        memory_s: of each row's bytes, read or written once (N,).
        clock_hz: of its device (N,).
    """
    d = table.dims
    channels = np.maximum(d["channels"], 1)
    pixels = np.maximum(d["rows"] / channels * np.maximum(d["cols"], 1), 1)
    wide = np.minimum(_power_of_two(channels), _CHANNELS)
    deep = np.minimum(_power_of_two(np.ceil(pixels / _PIXELS)), _THREADS / wide)
    wide = np.minimum(_power_of_two(channels), _THREADS / deep)
    writers = np.minimum(np.ceil(pixels / (deep * _PIXELS)), _MOST)
    adders = np.where(writers < _WORTH, 1, writers)
    at_once = _RESIDENT * work.units

    def cycles(blocks: Floats, turn: float) -> Floats:
        waves = np.maximum(np.ceil(channels / wide) * blocks / at_once, 1)
        return np.asarray(turn * waves * np.ceil(pixels / (deep * blocks * _LOADS)))

    found = np.zeros(len(pixels))
    half = widths(table)[0] < 4
    last = (d["channels"] > 0) & (d["channels_last"] > 0)
    for (kind, training, is_half), cost in _COSTS.items():
        asked = last & (table.kind == kind) & ((d["training"] > 0) == training) & (half == is_half)
        turns = cycles(adders, cost.summing) + cycles(writers, cost.writing)
        whole = (cost.start + turns + cost.shared * (adders > 1)) / clock_hz
        found = np.where(asked, whole + cost.passes * memory_s, found)
    return found


def _power_of_two(size: Floats) -> Floats:
    """The largest that is no larger."""
    return np.asarray(2 ** np.floor(np.log2(size)))
