"""`idle_kernel_s`: seconds of a kernel that does next to nothing, inside a CUDA graph."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Clock of a large GPU that is not published. Assumed.
USUAL_CLOCK_HZ = 1.8e9

#: Clock cycles of such a kernel: 2.1, 2.8 and 3.7 us on L40S, H100 and A100. Fitted, one parameter.
_CYCLES = 5400.0


def idle_kernel_s(clock_hz: Floats) -> Floats:
    """Seconds at a clock (N,), NaN where it is unknown."""
    return np.asarray(_CYCLES / np.nan_to_num(clock_hz, nan=USUAL_CLOCK_HZ))
