"""What a board's power limit leaves of its peak over the duration of a kernel.

Shape legend: ``N`` rows of an operator table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.device import Device

Floats = NDArray[np.float64]

#: Board power that does not go into arithmetic (watts), and the FP32 multiply-adds that the rest
#: pays for (FLOP/s per watt), by process generation. 16/12 nm: fitted by eye to P4 and T4 (3.0-3.7
#: TFLOP/s sustained at 75 and 70 W), the fixed part assumed; without it those two small boards say
#: that a V100 cannot hold its clock. Newer: assumed from the growth of peak per watt.
_POWER = MappingProxyType(
    {"pascal": (20.0, 6.6e10), "volta": (20.0, 6.6e10), "turing": (20.0, 6.6e10),
     "ampere": (0.0, 9e10), "ada": (0.0, 1.8e11), "hopper": (0.0, 1.8e11),
     "blackwell": (0.0, 2.2e11)}
)  # fmt: skip

#: Time after which a power limit bites: the control loop needs a few milliseconds and a label is
#: the best of some 25 calls. Fitted by eye on T4.
_THROTTLE_S = 3e-4


def paid_flops(device: Device) -> float:
    """FP32 FLOP/s that the board's power pays for, NaN where unknown."""
    fixed, rate = _POWER.get(device.architecture or "", (0.0, float("nan")))
    return max(float(device.tdp_w or "nan") - fixed, 1.0) * rate


def sustained_share(work: OperatorWork, offer: Mapping[str, Floats], power: float = 1.0) -> Floats:
    """Share of the peak that the power limit leaves over a kernel's duration, to a power (N,).

    Args:
        work: of the rows (N,).
        offer: FLOP/s that each row's board pays for (``paid``) and of its FP32 peak (``fp32``).
        power: how much of the share (as a logarithm) a kernel feels.
    """
    share = np.minimum(offer["paid"] / offer["fp32"], 1.0)
    share = np.where(np.isnan(share), 1.0, share)
    late = work.roofline_s / (work.roofline_s + _THROTTLE_S)
    # Matrix units spend less energy a FLOP (0.75, fitted by eye on L40S beside A100 and H100).
    matrix = np.where(work.peak > 1.01 * offer["fp32"], 0.75, 1.0)
    return np.asarray(np.exp(np.log(share) * late * matrix * power))
