"""`offset_thread_s`: what maps take on a GPU whose operands are not alike, or not as the result.

torch computes where each element of each operand lies, by divisions, and reads it by itself
(``OffsetCalculator.cuh``, ``CatArrayBatchedCopy``): as long for 16 bits as for FP32, and longer
than moving the bytes. Operands of two data types are converted one by one as well.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Numbers of `operator_table.KINDS`, ``strided`` and ``broadcast``.
_LIES_ACROSS, _BLOCKS = 5, 3

#: Clock cycles of a multiprocessor for each element of a map of one operand in parts, for each more
#: operand, and where operands lie in different orders: medians of rows of 20 us and more of an H200
#: in BF16 and FP16, sixth and seventh sweep inside CUDA graphs (fitted), of one operand those of
#: products and negatives. FP32 takes 5 to 35 % longer.
_PARTS, _MORE, _ORDERS = 0.65, 0.10, 0.76
#: The same of the eighth sweep (fitted): where an operand lies across; where the larger operand is
#: converted, and where another one is; how much more where one is a block that is read again and
#: again; and of one data type beside such a block. Middle halves of rows lie within 10 %.
_ACROSS, _LARGER, _OTHER, _BLOCK, _BESIDE = 1.82, 1.10, 1.00, 0.35, 0.80
#: The same of copies that have a name; of joined parts that are no vectors the lower quartile.
_COPIES = MappingProxyType(
    {"permuted": 0.65, "cat_halves": 0.56, "cat_unaligned": 0.45, "cat_heads": 1.12,
     "transposed": 1.80, "pad": 0.82}
)  # fmt: skip
#: Copies that take no longer than their bytes, or hang on more than is known.
_OTHERS = (MAP_FUNCTIONS["cat"], MAP_FUNCTIONS["channels_last"])


def offset_thread_s(table: OperatorTable, work: OperatorWork, clock_hz: Floats) -> Floats:
    """Seconds (N,) of maps of operands that lie apart or in other orders, 0 of all others.

    Args:
        table: the rows (N,).
        work: with the multiprocessors of each row's device.
        clock_hz: of their devices (N,).
    """
    d = table.dims
    named = np.array([0.0, *(_COPIES.get(name, 0.0) for name in MAP_FUNCTIONS)])
    more = _MORE * np.maximum(d["inputs"] - 1, 0)
    plain = np.where(d["strided"] == 4, _ORDERS, np.where(d["strided"] == 3, _PARTS, 0.0))
    own = named[d["function"].astype(np.int64)]
    known = (d["function"] > 0) & ~np.isin(d["function"], _OTHERS)
    cycles = np.where(own > 0, own, np.where(known & (plain > 0), plain + more, 0.0))
    # Named maps alone: what sweeps before the eighth called broadcast has no function.
    block = known & (d["broadcast"] == _BLOCKS)
    converted = np.where(d["converts"] == 1, _LARGER, _OTHER) + _BLOCK * block
    cycles = np.where(block, _BESIDE, cycles)
    cycles = np.where(known & (d["converts"] > 0), converted, cycles)
    cycles = np.where(d["strided"] == _LIES_ACROSS, _ACROSS, cycles)
    seconds = d["rows"] * d["cols"] * cycles / (work.units * clock_hz)
    return np.asarray(np.where(table.kind == "elementwise", seconds, 0.0))
