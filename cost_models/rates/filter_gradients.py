"""Gradients of filters of one channel, where a processor's library has no kernel for them.

oneDNN computes a depthwise convolution's gradient by its weights in registers, but only for windows
of up to three elements that lie within the image (``jit_uni_dw_conv_bwd_weights_kernel::
init_conf``). For others it takes what is left (3.12, as its ``ONEDNN_VERBOSE`` names them):

- of plain images ``gemm:jit``: every channel of every image is written out window by window, and
  multiplied as a matrix of one row;
- where channels lie last the kernel of dense convolutions: every filter is one block of as many
  inputs and outputs as a vector has lanes, of which one pair is asked for, and has to be written
  and gathered again.

Such blocks may be larger than what the allocator keeps, and then come from the system page by page.
"""

from __future__ import annotations

import math

from foreplan.cost_models.rates.new_pages import ALWAYS_MAPPED, PAGE, PAGE_BYTES
from foreplan.cost_models.rates.operator_rates import by_channel
from foreplan.datasets.device import Device
from foreplan.datasets.program import CHANNELS_LAST, WEIGHT_GRADIENT, Program

#: The widest window that has a kernel.
_WIDEST = 3
#: Calls' worth of time, fitted to 111 drawn gradients (windows of 3 to 9, images of 2 to 32 to a
#: side, 24 to 768 channels; ``tests/benchmarks/likeness_figures.py --kinds filters``) on one core
#: of an EPYC (Zen 5, AVX-512, 1.0 us a call): of plain images a gradient, each channel of an image,
#: and elements of all windows in a call; where channels lie last a gradient, elements of blocks and
#: of windows in a call, and each page (`PAGE`). Of 56 others the mean factor is 1.26.
PLAIN, CHANNEL, WINDOWS = 48, 0.27, 1350
_LAST, _BLOCKS, _WINDOWS_LAST = 16, 4400, 3700
#: Data types that take as long: of 10 gradients in bf16 (plain images) the mean factor is 1.2.
_MEASURED = frozenset({"fp32", "bf16"})


def filter_gradient_s(item: Program, device: Device, launch_s: float) -> float | None:
    """Seconds of a gradient by filters of one channel that has no kernel; ``None`` of other work.

    Args:
        item: what is asked for.
        device: on which; its cores share channels out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op != "conv" or not by_channel(item):
        return None
    if item.variant.compute not in _MEASURED or not item.variant.kernel.endswith(WEIGHT_GRADIENT):
        return None
    d, units = item.dims, device.units or 1
    window, side, out = (math.isqrt(d[name]) for name in ("taps", "inputs", "outputs"))
    if window**2 != d["taps"] or _has_kernel(window, side, out):
        return None
    windows = d["batch"] * d["cout"] * d["outputs"] * d["taps"]
    if CHANNELS_LAST not in item.variant.kernel:
        calls = CHANNEL * d["batch"] * d["cout"] + windows / WINDOWS
        return launch_s * (PLAIN + calls / units)
    lanes = 16 if "avx512" in device.isa else 8
    blocks = d["cout"] * d["taps"] * lanes**2
    calls = blocks / _BLOCKS + windows / _WINDOWS_LAST
    if 4 * blocks > ALWAYS_MAPPED:
        calls += PAGE * 4 * blocks / PAGE_BYTES
    return launch_s * (_LAST + calls / units)


def _has_kernel(window: int, side: int, out: int) -> bool:
    """Whether oneDNN computes it in registers; ends are taken to be padded by half a window."""
    stride = max(1, round(side / max(1, out)))
    return window <= _WIDEST and side >= window + -(window // 2) % stride
