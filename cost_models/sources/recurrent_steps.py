"""What the steps of a recurrent layer take on a GPU, where cuDNN runs them in kernels of its own.

Of 16 bits a step is a kernel, whose weights come from L2, and both directions run side by side; a
layer of one direction begins while the one before it is at work. Of FP32 a kernel stays for all
steps where its weights fit into a multiprocessor's shared memory, one direction after the other.
What does not fit is priced by its products (`recurrent_parts`).

All constants: one H200, torch 2.11, from CUDA graphs, 2026-11-28, fitted to every second one of
124 drawn layers (3 kinds, 8 to 256 steps, 1 to 128 rows, 16 to 1,024 wide); the others are a factor
of 1.11 to 1.17 off in the mean, where products and maps of each step were 2.6 and 2.2
(``tests/benchmarks/recurrent_figures.py``). Latencies go by the clock, bytes by the bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

from foreplan.cost_models.lowering.recurrent_parts import GRADIENT
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import Program

#: Bytes of a multiprocessor's shared memory that a kernel may have (H100, H200: published).
_SHARED_BYTES = 227 << 10
#: Of the device that the constants are of.
_CLOCK_HZ, _BANDWIDTH = 1.755e9, 4.8e12


class _Steps(NamedTuple):
    """Seconds of a step, bytes of weights a second, a further layer's share, and once a layer."""

    step_s: float
    rate: float
    behind: float
    once_s: float


_HALF = {"": _Steps(4.4e-6, 1.9e12, 0.37, 4e-6), GRADIENT: _Steps(4.2e-6, 0.86e12, 0.28, 0.0)}
#: Likewise of FP32, bytes from one multiprocessor's shared memory.
_STAYING = {
    "": _Steps(0.29e-6, 2.37e11, 0.88, 12e-6), GRADIENT: _Steps(0.40e-6, 1.72e11, 0.88, 13e-6),
}  # fmt: skip


def steps_s(item: Program, device: Device) -> float | None:
    """Seconds of all steps of a recurrent layer or its gradient, beside what is done once.

    Args:
        item: of the kind that `recurrent_parts` knows.
        device: a GPU.

    Returns:
        ``None`` where products and maps say it: FP32 beyond shared memory, projected states, and
        devices without a clock or bandwidth.
    """
    d, width = item.dims, DTYPE_BYTES[item.variant.compute]
    if d["outputs"] != d["hidden"] or not device.clock_hz or not device.memory_bandwidth:
        return None
    weights = float(d["gates"] * d["hidden"] * d["hidden"] * width)
    of = GRADIENT if item.op.endswith(GRADIENT) else ""
    slower = _CLOCK_HZ / float(device.clock_hz)
    if width == 2:
        law, chains = _HALF[of], 1
        rate = law.rate * float(device.memory_bandwidth) / _BANDWIDTH
        step_s = law.step_s * slower + weights * d["directions"] / rate
    elif width == 4 and weights <= _SHARED_BYTES:
        law, chains = _STAYING[of], d["directions"]
        step_s = (law.step_s + weights / law.rate) * slower
    else:
        return None
    behind = law.behind if d["directions"] == 1 else 1.0
    layers = 1 + behind * (d["layers"] - 1)
    return chains * d["steps"] * layers * step_s + law.once_s * slower * d["layers"]
