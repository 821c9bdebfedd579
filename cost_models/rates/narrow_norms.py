"""Gradients of norms whose images or rows fill no vector of a processor.

torch goes through the images of each channel by vectors, and copies what is left of an image into
one of its own (``batch_norm_cpu_backward_contiguous_impl``): images of 2 x 2 pixels are nothing but
such rests. One pixel is a row of channels, and where channels lie last they are the vectors. A norm
of rows goes by vectors along each, which none of fewer elements fills.
"""

from __future__ import annotations

from foreplan.cost_models.lowering.backward_steps import BY_GROUP
from foreplan.datasets.device import Device
from foreplan.datasets.program import CHANNELS_LAST, Program

#: Pixels that fill a vector in fp32, and images of a channel in the time of a call: 36-50 ns each
#: for 2 x 2 pixels, 392 to 1,816 channels of 1 to 4 images, whether by the batch's own statistics
#: or not, on one core of an EPYC (Zen 5, 1.0 us a call; ``tests/benchmarks/likeness_figures.py
#: --kinds narrow_norms``).
_FULL, _IN_A_CALL = 16, 28
#: Elements that fill a vector of the kernel of rows (of 256 bits, whatever the processor; assumed
#: of Arm), and elements in the time of a call: 9.3 ns each in rows of 2 and 4
#: (``tests/benchmarks/function_figures.py --rows``).
_FULL_ROW, _ROW_ELEMENTS = 8, 108


def narrow_norm_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds that few pixels or elements take beside their bytes; 0 of all other work.

    Args:
        item: what is asked for.
        device: on which; its cores share channels and rows out.
        launch_s: seconds of one call on it.
    """
    d = item.dims
    if device.kind != "cpu" or item.op != "norm_gradient":
        return 0.0
    if d["channels"] == 1:
        alone = d["cols"] < _FULL_ROW and BY_GROUP not in item.variant.kernel
        return alone * launch_s * d["rows"] * d["cols"] / _ROW_ELEMENTS / (device.units or 1)
    if not 1 < d["cols"] < _FULL or CHANNELS_LAST in item.variant.kernel:
        return 0.0
    return launch_s * d["rows"] / _IN_A_CALL / (device.units or 1)
