"""Convolutions of one pixel a window, which a processor's core multiplies image by image.

torch hands a convolution without stride, padding or groups whose window is one pixel to oneDNN only
from 16 images or two threads on (``ConvParams::use_mkldnn``, torch 2.13); else every image is a
product of its channels and the weight by the library of other products. That is slow where an image
has few pixels: they are the columns of the product, and fill no vector.
"""

from __future__ import annotations

from foreplan.datasets.device import Device
from foreplan.datasets.program import (
    CHANNELS_LAST,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Program,
    Variant,
    program,
)

#: Images from which on oneDNN takes them.
_IMAGES = 16
#: Pixels of an image that fill a vector (of 16 in fp32), and weights that one with fewer goes
#: through in the time of a call. Measured on one core of an EPYC (Zen 5, 1.0 us a call) for 2 to 10
#: pixels with 196,608 and 840,000 weights: 0.8-0.9 ns a weight and image, 0.9-1.4 for the gradient
#: by images, whatever the pixels (docs/results/end_to_end.md).
_FULL, _IN_A_CALL = 16, 1200
#: What the product takes of its price, forward, where so few channels come in or out: 0.5-0.95 of
#: 20 drawn ones on that core.
_FEW, _OF_FEW = 32, 0.7


def is_pixel_product(item: Program, device: Device) -> bool:
    """Whether a convolution is a product of each image on a device."""
    if item.op != "conv" or device.kind != "cpu" or (device.units or 1) > 1:
        return False
    d = item.dims
    plain = d["taps"] == d["groups"] == 1 and d["inputs"] == d["outputs"]
    return plain and d["batch"] < _IMAGES


def pixel_product(item: Program) -> tuple[Program, float]:
    """The product that does a convolution's work, and how often.

    Args:
        item: one that `is_pixel_product`.
    """
    d, v = item.dims, item.variant
    kernel = Variant(v.storage, v.compute, "torch.linear")
    pixels, cin, cout, often = d["inputs"], d["cin"], d["cout"], 1
    if pixels == 1:  # a vector times the weight, which is read again for every image
        often, images = d["batch"], 1
    else:
        images = d["batch"]
    rows, n, k = images * pixels, cout, cin
    if v.kernel.endswith(INPUT_GRADIENT):
        n, k = cin, cout
    elif v.kernel.endswith(WEIGHT_GRADIENT):
        rows, n, k = cout, cin, images * pixels
    elif pixels >= _FULL and min(cin, cout) <= _FEW:
        return program("linear", kernel, rows=rows, n=n, k=k), _OF_FEW
    return program("linear", kernel, rows=rows, n=n, k=k), float(often)


def narrow_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds that images of few pixels take beside their product; 0 of all other work.

    Args:
        item: what is asked for.
        device: on which.
        launch_s: seconds of one call on it.
    """
    d = item.dims
    if not is_pixel_product(item, device) or not 1 < d["inputs"] < _FULL:
        return 0.0
    if item.variant.kernel.endswith(WEIGHT_GRADIENT) or CHANNELS_LAST in item.variant.kernel:
        return 0.0
    return launch_s * d["batch"] * d["cin"] * d["cout"] / _IN_A_CALL
