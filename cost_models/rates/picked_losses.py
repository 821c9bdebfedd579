"""Losses that pick one value of each row, and read no other.

Their programs have as many elements as all rows together, of which they do not say how many.
"""

from __future__ import annotations

from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Calls that one takes: 2.1-7.6 us for 100 to 4096 rows of 10 to 700 values, whatever their width
#: (one core of an EPYC, Zen 5, 1.0 us a call; ``tests/benchmarks/function_figures.py``).
_CALLS = 3.0
_KERNELS = frozenset({"torch.nll_loss", "torch.nll_loss_forward"})


def picked_loss_s(item: Program, device: Device, launch_s: float) -> float | None:
    """Seconds of such a loss; ``None`` of all other work and devices.

    Args:
        item: what is asked for.
        device: on which.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op != "reduction" or item.variant.kernel not in _KERNELS:
        return None
    return launch_s * _CALLS
