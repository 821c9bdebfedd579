"""What a processor takes where elements that meet are no neighbours in memory.

Sums over another dimension than the innermost go by vectors of neighbours and take what sums of
rows do. Kernels that go through each row by itself step through memory instead, and a map of two
operands of which one is transposed has no vectors. Steps of a power of two fall on few lines of a
cache, so that each drives out the others.
"""

from __future__ import annotations

from types import MappingProxyType

from foreplan.cost_models.lowering.argument_words import CROWDED
from foreplan.cost_models.lowering.copy_layout import ACROSS, CONVERTED, MIXED, plain_kernel
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Rows and elements in the time of a call, beside what rows of neighbours take. Measured in fp32 on
#: one core of an EPYC (Zen 5, 1.0 us a call) for 12 shapes, rows of 21 to 1024 elements
#: (``tests/benchmarks/function_figures.py``): 100-110 ns a row and 0.5 an element of the place of
#: the largest and of a norm, 1.1-1.4 ns an element of a running maximum.
_REDUCED = MappingProxyType({
    "argmax": (10, 2000), "argmin": (10, 2000), "norm": (10, 2000),
    "linalg_vector_norm": (10, 2000), "cummax": (1e9, 900), "cummin": (1e9, 900),
})  # fmt: skip
#: Elements likewise of scans in steps that fall into few sets of the nearest cache (`CROWDED`): 3.4
#: to 5.5 ns (steps of 64 to 4,096 elements, 8 to 512 of them).
_THRASHED = MappingProxyType({"cumsum": 290, "cumprod": 290, "cummax": 220, "cummin": 220})
#: Elements likewise of a map whose operands lie across: 0.25-0.43 ns; 0.65-0.85 in steps of a
#: multiple of 128 elements (1-1.6 of 512, 3.3 of 1024 x 1024). Gradients of a softmax are no such.
_MAPPED, _MAPPED_STEP, _MAPPED_THRASHED = 3700, 128, 1350
_BACK = "softmax_backward"


def across_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds that steps through memory take; 0 of all other work and devices.

    Args:
        item: what is asked for.
        device: its cores share the rows out.
        launch_s: seconds of one call on it.
    """
    kernel = item.variant.kernel.removesuffix(MIXED).removesuffix(CONVERTED)
    if device.kind != "cpu" or not kernel.endswith(ACROSS):
        return 0.0
    if item.op not in ("reduction", "elementwise"):
        return 0.0
    name = plain_kernel(kernel).removeprefix("torch.")
    rows, cols = item.dims["rows"], item.dims["cols"]
    count, calls = rows * cols, 0.0
    if item.op == "elementwise" and not name.endswith(_BACK):
        calls = count / (_MAPPED if rows % _MAPPED_STEP else _MAPPED_THRASHED)
    elif name in _REDUCED:
        each, elements = _REDUCED[name]
        calls = rows / each + count / elements
    if name in _THRASHED and CROWDED in kernel:
        calls += count / _THRASHED[name]
    return launch_s * calls / (device.units or 1)
