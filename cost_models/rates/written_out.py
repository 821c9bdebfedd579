"""Convolutions that a processor's library writes out window by window and multiplies as a matrix.

torch hands a convolution in fp32 to oneDNN but where it thinks that its own is quicker
(``ConvParams::use_mkldnn``, torch 2.13): of one image without groups, of windows of up to three
elements, with `LARGE_VOLUME` elements in all dimensions but a volume's last. Of an image its own
(``slow_conv2d``) is as quick as oneDNN's; of a volume (``slow_conv3d``) windows are written element
by element. oneDNN (3.12, as its ``ONEDNN_VERBOSE`` names it) has no kernel for these either, and
takes ``x64:gemm:jit``:

- groups whose inputs and outputs share no factor of four (`channel_lanes`): all three passes; of
  four, or of a volume's eight: the gradient by filters;
- filters of one channel: the gradient by images of volumes, by filters of lines and volumes; images
  are told in `filter_gradients` and `wide_windows`;
- windows wider than 16 elements of lines, all passes, and than 14 of images, by filters; but for
  patches, whose windows write each element once;
- volumes of 4 to 15 channels: the gradient by filters.

A written element takes what it does in `filter_gradients`. Of drawn sizes that no constant was
read off (``tests/benchmarks/convolution_figures.py``, seeds 2 and 3, one core of an EPYC, Zen 5,
0.86 us a call) uneven groups are a factor of 1.23 off in the mean, their gradients 1.13 and 1.15;
volumes in groups 1.28 by images and 1.36 by filters; all other volumes 1.23, 1.29 and 1.32.
Before 1.4 to 2.6.
"""

from __future__ import annotations

from foreplan.cost_models.lowering.kernel_words import LARGE, LARGE_VOLUME, SMALL
from foreplan.cost_models.rates.channel_lanes import (
    FEWEST,
    QUICKER,
    dimensions,
    group_lanes,
    lanes,
)
from foreplan.cost_models.rates.filter_gradients import CHANNEL, PLAIN, WINDOWS
from foreplan.cost_models.rates.new_pages import ALWAYS_MAPPED, PAGE, PAGE_BYTES
from foreplan.cost_models.rates.operator_rates import by_channel
from foreplan.cost_models.rates.pixel_products import is_pixel_product
from foreplan.datasets.device import Device
from foreplan.datasets.program import (
    CHANNELS_LAST,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Program,
)

#: The widest window of one image that torch keeps for itself: 3 in its source.
_NARROW = 3
#: Of a volume's positions those along all dimensions but the last, as a power and a share of all,
#: where its kernel does not say how large it is: the first a quarter of the others, as in clips of
#: a film (assumed).
_FIRST, _FIRST_SHARE = 2 / 3, 0.63
#: The widest windows that oneDNN has kernels for: of lines, and of the gradient by filters.
_WIDEST_LINE, _WIDEST_FILTER = 16, 14
#: Channels of a volume that its gradient by filters has a kernel for: so few, or so many.
_FEW, _MANY = 3, 16
#: Calls' worth of time of one of torch's own, and elements of windows that it writes, or gathers
#: again, in the time of a call (read off seeds 0 and 1).
_OWN, _WRITTEN, _GATHERED = 16, 1000, 600
#: Weights that its products lay out in the time of a call: 0.75-0.95 ns each of volumes of 256
#: channels and 98 positions (``tests/benchmarks/processor_functions.py``).
_WEIGHTS = 1150


def written_out_s(item: Program, device: Device, launch_s: float) -> float | None:
    """Seconds of such a convolution; ``None`` of other work and devices.

    Args:
        item: what is asked for.
        device: on which; its cores share channels out.
        launch_s: seconds of one call on it.
    """
    if item.op != "conv" or not lanes(device) or item.variant.compute != "fp32":
        return None
    if is_pixel_product(item, device):
        return None
    own = is_own_volume(item)
    if not own and not _has_no_kernel(item):
        return None
    d, units = item.dims, device.units or 1
    written = d["batch"] * d["cin"] * d["taps"] * d["outputs"]
    if own:
        back = item.variant.kernel.endswith(INPUT_GRADIENT)
        calls = written / (_GATHERED if back else _WRITTEN)
        calls += d["cin"] * d["cout"] * d["taps"] / _WEIGHTS
        if 4 * written > ALWAYS_MAPPED:
            calls += PAGE * 4 * written / PAGE_BYTES
    else:
        calls = CHANNEL * d["batch"] * d["groups"] + written / WINDOWS
    multiplied_s = item.flops / (QUICKER * (device.peak("fp32") or float("inf")))
    return launch_s * ((_OWN if own else PLAIN) + calls / units) + multiplied_s


def is_own(item: Program) -> bool:
    """Whether torch keeps a convolution in fp32 for itself."""
    d, sides = item.dims, dimensions(item)
    first = _FIRST_SHARE * d["inputs"] ** _FIRST if sides == 3 else d["inputs"]
    small = d["cin"] * first <= LARGE_VOLUME
    if sides == 3 and (LARGE in item.variant.kernel or SMALL in item.variant.kernel):
        small = SMALL in item.variant.kernel
    narrow = sides == 1 or d["taps"] <= _NARROW**sides
    return d["groups"] == d["batch"] == 1 and narrow and small


def is_own_volume(item: Program) -> bool:
    """Whether it is a volume's, and no product of each of its positions."""
    d = item.dims
    return dimensions(item) == 3 and is_own(item) and (d["taps"] > 1 or d["inputs"] > d["outputs"])


def _has_no_kernel(item: Program) -> bool:
    d, sides, kernel = item.dims, dimensions(item), item.variant.kernel
    if is_own(item) or CHANNELS_LAST in kernel:
        return False
    filters = kernel.endswith(WEIGHT_GRADIENT)
    wide = d["taps"] > (_WIDEST_FILTER if filters else _WIDEST_LINE) ** sides
    if by_channel(item):
        if sides == 3:
            return kernel.endswith((INPUT_GRADIENT, WEIGHT_GRADIENT))
        return sides == 1 and filters and d["taps"] > _NARROW
    if d["groups"] > 1:
        if d["taps"] == 1 and d["inputs"] == d["outputs"]:
            return False
        fewest = (16 if sides == 3 else 8) if filters else FEWEST
        if group_lanes(item) < fewest:
            return True
    elif sides == 3 and filters and _FEW < d["cin"] < _MANY:
        return True
    return wide and (filters or sides == 1) and d["outputs"] * d["taps"] > d["inputs"]
