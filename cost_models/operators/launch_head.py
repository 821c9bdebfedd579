"""Launch head: what an event pair around one eager call measures, from host and device time.

The host needs o seconds until the second event is queued, and the kernel starts after a part of
it. A kernel shorter than the rest is hidden; a longer one shows in full:

    head(o, t) = (1 - B) o + ((B o)^P + t^P)^(1/P)

B = 0.45 and P = 6 are fitted: read off the elementwise rows of six GPUs (on an A100 all calls up to
23 MB take 26.7 us, and longer ones 14.5 us + their own time), 2 free parameters. Libraries timed
inside CUDA graphs have o = 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_HIDDEN, _SHARPNESS = 0.45, 6.0


def head(overhead_s: Floats, device_s: Floats) -> Floats:
    """Measured seconds (N,) from launch overhead (N,) and device time (N,)."""
    hidden = _HIDDEN * overhead_s
    top = np.maximum(hidden, device_s)
    # Scaled by the larger one, because t^6 of a long kernel overflows.
    norm = ((hidden / top) ** _SHARPNESS + (device_s / top) ** _SHARPNESS) ** (1 / _SHARPNESS)
    return np.asarray((1 - _HIDDEN) * overhead_s + top * norm)


def head_slope(overhead_s: Floats, device_s: Floats) -> Floats:
    """D head / d ln(device_s), seconds (N,)."""
    shown = head(overhead_s, device_s) - (1 - _HIDDEN) * overhead_s
    return np.asarray(shown * (device_s / shown) ** _SHARPNESS)
