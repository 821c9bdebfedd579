"""What a processor takes for each row of a softmax, a sum or a norm, beside its elements.

Profiles time rows of hundreds of elements. What torch does once a row weighs little there and much
in a row of ten; and what fills no vector of a row it computes element by element, a softmax by the
exponential of C's library. How quickly a core does that, how quickly it issues a call says best (as
of functions, see `slow_functions`).
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import NamedTuple

from foreplan.cost_models.lowering.copy_layout import ACROSS, plain_kernel
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import Program


class _Rows(NamedTuple):
    """What is done in the time of a call.

    Attributes:
        rows: rows begun and ended; the share ``1 - cols / wide`` of it, none of wider ones.
        wide: see there.
        alone: elements of rows that fill no vector of the processor.
        ragged: ends of rows that fill a vector in part, behind whole ones.
        rest: elements behind the last whole ``step`` of a row.
        chained: pairs of these: each waits for the one before it.
        step: elements that a kernel takes at once whatever the processor (torch dispatches it by
            vectors of 256 bits at most), or in four such vectors.
        records: natural logarithms of a row's length: as often an element of a random row is
            larger than all before it, which no processor foretells.
        elements: of any row.
    """

    rows: float = math.inf
    wide: float = math.inf
    alone: float = math.inf
    ragged: float = math.inf
    rest: float = math.inf
    chained: float = math.inf
    step: int = 8
    records: float = math.inf
    elements: float = math.inf


#: Measured in fp32 on one core of an EPYC (Zen 5, 1.0 us a call) for 262,144 elements in rows of 2
#: to 512 (``tests/benchmarks/function_figures.py --rows``): within 1.35, but for logarithms of a
#: softmax of 2 (1.5 times too long), the largest of 32 and 64 (half as long) and layer norms
#: without scales (0.55-0.6 of 32 to 128). Vectors of 256 bits: the same figures with
#: ``ATEN_CPU_CAPABILITY=avx2`` and rows of 8; those of Arm have half as many elements (assumed).
_BACK = _Rows(rows=770, wide=48, alone=220, ragged=285)
_LARGEST, _SPREAD = _Rows(rest=2200, chained=45000, step=32), _Rows(rows=12.3)
_SUM = _Rows(rows=360, wide=93)
_OF_SINGLE = MappingProxyType({
    "softmax": _Rows(rows=100, wide=48, alone=95, ragged=110),
    "log_softmax": _Rows(rows=285, wide=48, alone=106, ragged=220),
    "_log_softmax": _Rows(rows=285, wide=48, alone=106, ragged=220),
    "softmax_backward": _BACK, "log_softmax_backward": _BACK,
    "layer_norm": _Rows(rows=80, wide=256, rest=450), "rms_norm": _Rows(rows=230, wide=40),
    "sum": _SUM, "mean": _SUM,
    "norm": _Rows(rows=330, wide=200), "linalg_vector_norm": _Rows(rows=330, wide=200),
    "prod": _Rows(rest=5000, chained=250_000, step=32), "amax": _LARGEST, "amin": _LARGEST,
    "logsumexp": _LARGEST._replace(rows=140, wide=64),
    "var": _SPREAD, "std": _SPREAD, "var_mean": _Rows(rows=10.5), "std_mean": _Rows(rows=10.5),
    "max": _Rows(records=128, elements=2000), "min": _Rows(records=128, elements=2000),
    "argmax": _Rows(records=100, elements=4000), "argmin": _Rows(records=100, elements=4000),
})  # fmt: skip
#: Likewise in bf16 (fp16: assumed), whose vectors have twice as many elements, each of which is
#: converted; of others as in fp32.
_OF_HALVES = MappingProxyType(dict(_OF_SINGLE) | {
    "softmax": _Rows(alone=170), "log_softmax": _Rows(alone=115),
    "layer_norm": _Rows(rows=55, wide=256, rest=700, chained=4200, step=16),
    "sum": _Rows(rows=170, wide=60), "mean": _Rows(rows=170, wide=60),
})  # fmt: skip
#: What takes as long where elements of a row are no neighbours (`copy_layout.ACROSS`).
_EITHER_WAY = frozenset({"var", "std", "var_mean", "std_mean", "max", "min"})
#: What goes by vectors where there is one row, all elements.
_OF_ROWS = frozenset({"max", "min"})
#: Work on rows, and gradients of a softmax.
_OPS = frozenset({"softmax", "reduction", "norm", "elementwise"})


def narrow_row_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds that rows take beside their elements; 0 of all other work and devices.

    Args:
        item: what is asked for.
        device: its cores share the rows out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op not in _OPS:
        return 0.0
    name = plain_kernel(item.variant.kernel).removeprefix("torch.")
    width = DTYPE_BYTES[item.variant.compute]
    figures = (_OF_HALVES if width == 2 else _OF_SINGLE).get(name)
    rows, cols = item.dims["rows"], item.dims["cols"]
    if figures is None or (ACROSS in item.variant.kernel and name not in _EITHER_WAY):
        return 0.0
    if rows == 1 and name in _OF_ROWS:
        return 0.0
    calls = max(0.0, 1.0 - cols / figures.wide) / figures.rows
    vector = _vector_bytes(device) // width
    if cols < vector:
        calls += cols / figures.alone
    elif cols % vector:
        calls += 1.0 / figures.ragged
    rest = cols % figures.step
    calls += rest / figures.rest + rest * rest / figures.chained
    calls += math.log(cols) / figures.records + cols / figures.elements
    return launch_s * rows * calls / (device.units or 1)


def _vector_bytes(device: Device) -> int:
    if "avx512" in device.isa:
        return 64
    return 16 if "neon" in device.isa else 32
