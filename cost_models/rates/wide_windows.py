"""Convolutions by filters of one channel and windows that a processor's library has no kernel for.

oneDNN computes a depthwise convolution in registers for windows of up to 14 elements a side
(``jit_dw``, as its ``ONEDNN_VERBOSE`` names it in 3.12: 13 have it, 15 do not). Wider ones go as
their filters' gradients do without a kernel: ``gemm:jit`` writes every channel of every image out
window by window, and multiplies a matrix of one row (`filter_gradients`).
"""

from __future__ import annotations

import math

from foreplan.cost_models.rates.filter_gradients import CHANNEL, PLAIN, WINDOWS
from foreplan.cost_models.rates.operator_rates import by_channel
from foreplan.datasets.device import Device
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program

_WIDEST = 14
_LINE = "conv1d"


def wide_window_s(item: Program, device: Device, launch_s: float) -> float | None:
    """Seconds of such a convolution; ``None`` of other work and devices.

    All of 20 drawn ones are within a factor of 1.34 (one core of an EPYC, Zen 5, 1.0 us a call;
    windows of 15 to 41 elements, lines and images). Windows twice as wide as their image take up to
    2.4 times as long.

    Args:
        item: what is asked for.
        device: on which; its cores share channels out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op != "conv" or not by_channel(item):
        return None
    d, kernel = item.dims, item.variant.kernel
    if item.variant.compute != "fp32" or kernel.endswith((INPUT_GRADIENT, WEIGHT_GRADIENT)):
        return None
    sides = 1 if _LINE in kernel else 2
    window, out = (d[name] if sides == 1 else math.isqrt(d[name]) for name in ("taps", "outputs"))
    if window <= _WIDEST:
        return None
    # Elements of a window that lie within the image; ends are padded by half a window.
    half = window // 2
    along = out * window - half * (half + 1) if half < out else out * out
    inside = along * along if sides == 2 else along
    calls = CHANNEL * d["batch"] * d["cout"] + d["batch"] * d["cout"] * inside / WINDOWS
    return launch_s * (PLAIN + calls / (device.units or 1))
