"""What a processor takes for results of pools whose windows are no fixed number of elements.

Adaptive pools compute the ends of each window from its place, by divisions of whole numbers; and
gradients of pools go through the same windows again, or follow the places that were kept. Plain
pools stand in `pool_windows`.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import NamedTuple

from foreplan.datasets.device import Device
from foreplan.datasets.program import Program


class _Results(NamedTuple):
    """What is done in the time of a call.

    Attributes:
        results: each begun and ended.
        elements: of all windows.
        records: natural logarithms of the elements of a window, see `narrow_rows`.
        most: elements of the largest window that is priced.
    """

    results: float = math.inf
    elements: float = math.inf
    records: float = math.inf
    most: float = math.inf


#: Elements of a window beyond which it is taken for the whole image: torch takes the mean of one by
#: vectors. A program does not say which it is (assumed; the most of 7 x 7 results of 42 x 42).
_WHOLE = 36
#: Measured in fp32 on one core of an EPYC (Zen 5, 1.0 us a call) for images of 14 x 14 to 57 x 57
#: and 2 x 2 to 28 x 28 results (``tests/benchmarks/function_figures.py``), 6-130 ns a result,
#: maxima 18-500, within 1.35; maxima of few or short images 2.2 times too long, whose branches are
#: learnt. Where channels lie last they are vectors, gradients of plain pools 0.75-1.1 ns a result.
_MEAN = _Results(results=150, elements=3300, most=_WHOLE)
_LARGEST = _Results(elements=1800, records=83)
_PLACES = _Results(results=1900)
_LAST = _Results(results=1800)
_KERNELS = MappingProxyType({
    "adaptive_avg_pool1d": _Results(results=330, elements=4500, most=_WHOLE),
    "adaptive_avg_pool2d": _MEAN, "adaptive_avg_pool3d": _MEAN, "adaptive_max_pool2d": _LARGEST,
    "fractional_max_pool2d": _Results(results=70),
    "avg_pool1d_backward": _Results(results=330),
    "avg_pool2d_backward": _Results(results=230, elements=5900),
    "avg_pool3d_backward": _Results(results=135),
    "avg_pool2d_channels_last_backward": _LAST, "max_pool2d_channels_last_backward": _LAST,
    **{f"max_pool{sides}d{kept}_backward": _PLACES
       for sides in (1, 2, 3) for kept in ("", "_with_indices")},
})  # fmt: skip


def pool_result_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds that go into a pool's results; 0 of all other work and devices.

    Args:
        item: what is asked for.
        device: its cores share the results out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op not in ("pool", "pool_gradient"):
        return 0.0
    figures = _KERNELS.get(item.variant.kernel.removeprefix("torch."))
    rows, taps = item.dims["rows"], item.dims["taps"]
    if figures is None or taps > figures.most:
        return 0.0
    each = 1.0 / figures.results + taps / figures.elements + math.log(taps) / figures.records
    return launch_s * rows * each / (device.units or 1)
