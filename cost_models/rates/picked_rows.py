"""What a processor takes for rows that an index picks, beside moving them.

``torch.embedding`` and ``torch.index_select`` copy a row at once. ``torch.index`` (``x[i]``) goes
through every element of the result by a loop that takes any stride (``IndexKernel.cpp``), however
wide rows are.
"""

from __future__ import annotations

from types import MappingProxyType

from foreplan.cost_models.lowering.argument_words import LARGEST
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import Program

#: Elements in the time of a call by their bytes: those of fewer bytes leave more of the same time
#: beside what moving takes. Measured on one core of an EPYC (Zen 5, 1.0 us a call) for rows of 4 to
#: 4096 elements (``tests/benchmarks/function_figures.py``): 0.25-0.5 ns an element in all.
_ELEMENTS = MappingProxyType({1: 2700, 2: 3400, 4: 4300, 8: 2200})
#: Rows likewise, and single elements, which are one loop: 1.4 ns each by one index, 2.9 by two.
_ROWS, _SINGLE = 330, 550
#: Elements likewise of bags of which the largest is kept, which are compared one by one (2.2 and
#: 2.9 ns, 10,240 rows of 32 and 8,192 of 128; ``tests/benchmarks/processor_functions.py``).
_COMPARED = 400
_LARGEST = f"torch.embedding_bag{LARGEST}"


def picked_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds of an index beside moving what it picks; 0 of all other work and devices.

    Args:
        item: what is asked for.
        device: its cores share the rows out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op != "embedding":
        return 0.0
    rows, cols, units = item.dims["rows"], item.dims["cols"], device.units or 1
    if item.variant.kernel == _LARGEST:
        return launch_s * rows * cols / _COMPARED / units
    if item.variant.kernel != "torch.index":
        return 0.0
    elements = _ELEMENTS.get(int(DTYPE_BYTES[item.variant.compute]), _ELEMENTS[4])
    calls = rows / _SINGLE if cols == 1 else rows / _ROWS + rows * cols / elements
    return launch_s * calls / units
