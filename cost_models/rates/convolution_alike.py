"""The convolution of a profile that does the work of one that a traced network calls.

Profiles time plain images in squares, forward and both gradients as one pass, by all channels or by
each. Lines and volumes go by images of as many positions and windows of as many elements, as oneDNN
has the same kernels for all three.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from foreplan.cost_models.rates.channel_lanes import filled_up
from foreplan.cost_models.rates.operator_rates import by_channel
from foreplan.cost_models.rates.pixel_products import is_pixel_product
from foreplan.cost_models.rates.written_out import is_own
from foreplan.datasets.device import Device
from foreplan.datasets.program import (
    CHANNELS_LAST,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Program,
    Variant,
    program,
)

#: What gradients of a convolution by channel take of the time that it takes itself where a kernel
#: has them in registers: read off seeds 0 and 1 of ``tests/benchmarks/convolution_figures.py``, one
#: core of an EPYC (Zen 5); of seeds 2 and 3 they are a factor of 1.33 to 1.47 off in the mean, the
#: forward pass itself 1.45 and 1.36. As long in bf16, but for strides (a few times as long).
_BY_CHANNEL = MappingProxyType({"": 1.0, INPUT_GRADIENT: 1.05, WEIGHT_GRADIENT: 0.8})
#: The same where channels lie last, of the time of plain images.
_BY_CHANNEL_LAST = MappingProxyType({"": 0.45, INPUT_GRADIENT: 0.55, WEIGHT_GRADIENT: 0.42})


def convolution_alike(item: Program, device: Device, plain: str) -> tuple[Program, float]:
    """The likeness of a convolution, and how much of it.

    Args:
        item: what is asked for.
        device: on which; a processor.
        plain: storage and data type of the likeness.
    """
    kernel = item.variant.kernel
    back = next((g for g in (INPUT_GRADIENT, WEIGHT_GRADIENT) if kernel.endswith(g)), "")
    share = 1.0
    if by_channel(item):
        op = "conv2d_forward"
        share = (_BY_CHANNEL_LAST if CHANNELS_LAST in kernel else _BY_CHANNEL)[back]
    else:
        # Gradients of inputs and of weights are timed as one pass.
        op, share = ("conv2d_backward", 0.5) if back else ("conv2d_forward", 1.0)
        if has_vectors(item, device):
            item, filled = filled_up(item, device)
            share *= filled
    d = item.dims
    (height, width), (out_height, out_width), (high, wide) = (
        _square(d[name]) for name in ("inputs", "outputs", "taps")
    )
    # What no rectangle has exactly: five elements of a line go by four.
    share *= d["outputs"] * d["taps"] / (out_height * out_width * high * wide)
    return program(
        op, Variant.parse(f"{plain}/torch.conv2d"), batch=d["batch"], channels=d["cin"],
        height=height, width=width, filters=d["cout"], kernel_height=high, kernel_width=wide,
        out_height=out_height, out_width=out_width, stride=max(1, round(height / out_height)),
        groups=d["groups"],
    ), share  # fmt: skip


def _square(positions: int) -> tuple[int, int]:
    """Height and width of what is nearly a square of so many."""
    height = math.isqrt(positions)
    return height, round(positions / height)


def has_vectors(item: Program, device: Device) -> bool:
    """Whether a convolution has oneDNN's kernels for plain images."""
    if item.variant.compute != "fp32" or CHANNELS_LAST in item.variant.kernel:
        return False
    return not (is_own(item) or is_pixel_product(item, device))
