"""Gradients by tables of narrow rows, which a processor adds up row by row.

Profiles time tables of decoders, whose rows have hundreds of elements. Tables of recommenders have
8 to 128: what torch does once for a row decides there. A look-up's gradient goes through the rows
that were read and adds each to its place (``EmbeddingKernel``), a bag's sorts them by their places
first (``_embedding_bag_dense_backward_cpu_sum_mean``), that of a bag's largest goes by elements,
and an index's, which any stride may have, too (``IndexKernel.cpp``).
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import NamedTuple

from foreplan.cost_models.lowering.argument_words import LARGEST
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program


class _Rows(NamedTuple):
    """Calls' worth of time of what is added up.

    Attributes:
        row: of each row.
        element: of each of its elements.
        sorted: of each row and halving of all rows.
    """

    row: float = 0.0
    element: float = 0.0
    sorted: float = 0.0


#: Read off 14 tables of 1,000 to 100,000 rows of 8 to 256 elements in fp32, of which 256 to 30,000
#: were read, on one core of an EPYC (Zen 5, 1.0 us a call; by hand, as
#: ``tests/benchmarks/processor_functions.py`` times four): 40-78 ns a row of a look-up, 43-80 of a
#: bag, 2.6-4 an element of a bag's largest, 13-135 a row of an index. Beside them zeros of all of a
#: table are written, 0.04 ns an element while the last-level cache holds them.
_FIGURES = MappingProxyType(
    {
        "torch.embedding": _Rows(row=0.040, element=0.00013),
        "torch.embedding_bag": _Rows(sorted=0.005, element=0.0001),
        f"torch.embedding_bag{LARGEST}": _Rows(element=0.0035),
        "torch.index": _Rows(row=0.008, element=0.0004),
    }
)
_ZEROS = 0.00004
#: The widest rows; those of decoders' tables go by what profiles timed.
_WIDEST = 128
#: Calls of the rest.
_CALLS = 4.0


def table_gradient_s(item: Program, device: Device, launch_s: float) -> float | None:
    """Seconds of such a gradient; ``None`` of other work and devices.

    Args:
        item: what is asked for.
        device: on which; a core adds rows up by itself.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op != "embedding_backward":
        return None
    rows, vocab, cols = (item.dims[name] for name in ("rows", "vocab", "cols"))
    figures = _FIGURES.get(item.variant.kernel)
    if figures is None or cols > _WIDEST or item.variant.compute != "fp32":
        return None
    each = figures.row + figures.element * cols + figures.sorted * math.log2(max(2, rows))
    return launch_s * (_CALLS + rows * each + vocab * cols * _ZEROS)
