"""`sum_block_s`: what sums take beside their bytes, by how torch shares them out among threads.

torch gives each sum to as many threads, warps and blocks as its rules say (``Reduce.cuh``,
``setReduceConfig``, 2.11): a thread goes through what falls to it four loads at a time, and waits
for each four. Few sums of many elements are split among blocks, which then add up through memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Threads of a block at most; elements from which a row is read by vectors; loads of a turn.
_THREADS, _VECTORS_FROM, _LOADS = 512, 128, 4
#: Elements of a thread that are few, and many: from the many on a sum is split among blocks.
_FEW, _MANY = 16, 256
#: Threads of a multiprocessor where they are not known: of all since Volta but Turing's.
_USUAL_RESIDENT = 2048.0
#: Clock cycles of a thread's turn: rows read by vectors, columns, and all else, whose addresses are
#: computed one by one; of a wave of blocks that add up rows; of adding up through memory, which a
#: second kernel prepares. Least absolute errors of logarithms over 3,297 sums of an H200 in the
#: sweeps inside CUDA graphs, beside their bytes (fitted).
_VECTOR, _COLUMN, _SINGLE = 330.0, 360.0, 1030.0
_WAVE, _THROUGH_MEMORY = 2300.0, 13000.0


class SumShares(NamedTuple):
    """How sums are shared out; (N,) each.

    Attributes:
        elements: that a thread adds up.
        threads: of a block.
        blocks: in all.
        split: blocks that share a sum.
    """

    elements: Floats
    threads: Floats
    blocks: Floats
    split: Floats


def sum_shares(
    sums: Floats, elements: Floats, strided: Floats, units: Floats, resident: Floats
) -> SumShares:
    """How torch shares sums out.

    Args:
        sums: how many (N,).
        elements: of each (N,).
        strided: as `operator_table.KINDS` has it (N,).
        units: streaming multiprocessors (N,).
        resident: threads of one at most (N,).
    """
    columns = strided == 1
    # Of columns a thread adds up several that lie beside each other.
    beside = np.where(columns, np.where(sums % 4 == 0, 4, np.where(sums % 2 == 0, 2, 1)), 1)
    vectors = (strided == 0) & (elements >= _VECTORS_FROM)
    along = np.where(columns, np.floor(sums / beside), np.where(vectors, elements // 4, elements))
    across = np.where(columns, elements, sums)
    most = _THREADS // beside
    along, across = (np.minimum(_power(size), most) for size in (along, across))
    height = np.minimum(across, most // np.minimum(along, 32))
    width = np.minimum(along, most // height)
    threads = width * height
    parts, kept = np.where(columns, 1.0, width), np.where(columns, width, 1.0)
    warps = np.ceil(elements / parts) >= np.minimum(16 * height, _MANY)
    parts, kept = np.where(warps, parts * height, parts), np.where(warps, kept, kept * height)
    own, grid = np.ceil(elements / parts), np.ceil(np.floor(sums / beside) / kept)
    wanted = units * np.floor(resident / threads)
    shared = np.maximum(
        np.minimum(np.ceil(wanted / grid), np.ceil(own / _FEW)), np.ceil(own / _MANY)
    )
    split = np.where(warps & (own >= _MANY) & (grid <= wanted), shared, 1.0)
    return SumShares(np.ceil(elements / (parts * split)), threads, grid * split, split)


def sum_block_s(
    table: OperatorTable, work: OperatorWork, resident: Floats, clock_hz: Floats
) -> Floats:
    """Seconds (N,) of sums beside their bytes, 0 of all others.

    Args:
        table: the rows (N,).
        work: what each has to do, and its device's multiprocessors.
        resident: threads of a multiprocessor, NaN where not known (N,).
        clock_hz: of its device (N,).
    """
    d = table.dims
    sums = np.where(table.kind == "reduction", d["rows"], 1.0)
    elements = np.where(table.kind == "reduction", d["cols"], 1.0)
    resident = np.nan_to_num(resident, nan=_USUAL_RESIDENT)
    shares = sum_shares(sums, elements, d["strided"], work.units, resident)
    vectors = (d["strided"] == 0) & (elements >= _VECTORS_FROM)
    columns = d["strided"] == 1
    # A vector is four elements and one load.
    turns = np.ceil(shares.elements / _LOADS)
    turn = np.where(vectors, _VECTOR, np.where(columns, _COLUMN, _SINGLE))
    resident_blocks = work.units * np.maximum(np.floor(resident / shares.threads), 1)
    waves = np.ceil(shares.blocks / resident_blocks)
    cycles = waves * (turns * turn + np.where(columns, 0.0, _WAVE))
    cycles += np.where(shares.split > 1, _THROUGH_MEMORY, 0.0)
    return np.asarray(np.where(table.kind == "reduction", cycles / clock_hz, 0.0))


def _power(size: Floats) -> Floats:
    """The largest power of two that is not larger (N,)."""
    return np.asarray(2 ** np.floor(np.log2(np.maximum(size, 1))))
