"""`carried`: what a convolution takes on a chip without a sweep, by what it takes on a swept one.

Bytes go by bandwidth and arithmetic by peaks, up to 0.85 of the roofline. What a swept chip takes
beside them (grouped convolutions on an H200 2 to 16 times their roofline) is instructions, and goes
by multiprocessors and their clock:

    t = roofline / 0.85 + (t' - roofline' / 0.85) * (units' * clock') / (units * clock)

with ' of the swept chip. Where caches let it beat its roofline there, it does so alike here. The
form has no fitted parameter. Fourteen passes of public networks on two boards (RTX 3090 and 4090,
16 bits) are 16.5 % off in the mean with it; with twice the roofline for convolutions of groups,
and FP32's published ones for the others, they were 32.5 (docs/results/operators.md).

Shape legend: ``N`` rows of convolutions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.idle_kernel import USUAL_CLOCK_HZ
from foreplan.cost_models.operators.operator_features import USUAL_UNITS, Features, features
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import OperatorTable, texts

Floats = NDArray[np.float64]

#: Share of the roofline that is reached, as `memory_time` has it of memory.
_REACHED = 0.85


def carried(
    table: OperatorTable, block: Features, device: Device, swept: Device, trees: TreeEnsemble
) -> Floats:
    """Logarithm of the time over the structural time on a device (N,).

    Args:
        table: the rows (N,).
        block: their features.
        device: their device.
        swept: the device that the trees were fitted on.
        trees: the correction there.
    """
    there = replace(
        table, device=texts(swept.name for _ in range(len(table))), devices={swept.name: swept}
    )
    known = features(there, "conv")
    taken = known.structural_s * np.exp(trees.predict(known.values))
    moved, here = known.roofline_s / _REACHED, block.roofline_s / _REACHED
    beside = np.maximum(taken - moved, 0.0) * _pace(swept) / _pace(device)
    seconds = here * np.minimum(taken / moved, 1.0) + beside
    return np.asarray(np.log(seconds / block.structural_s))


def _pace(device: Device) -> float:
    """Clock cycles a second of all multiprocessors."""
    return float(device.units or USUAL_UNITS) * float(device.clock_hz or USUAL_CLOCK_HZ)
