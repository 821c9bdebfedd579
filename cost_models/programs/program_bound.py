"""ProgramBound: what no device can beat, and the scale a prediction is made on.

For a program with F floating operations on A distinct bytes of arguments, in k launches,

    bound     = max(F / peak, (A - last cache) / bandwidth)
    reference = F / peak + A / bandwidth + 1e-7 s
    launch    = k * overhead

``peak`` is that of the vector units at the program's main data type: sampled programs use no
matrix units. Arguments stay in place from call to call, so what fits the last cache may never come
from memory again. Theory, except for the device's own figures.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets.device import Device
from foreplan.errors import MissingDataError

Floats = NDArray[np.float64]

#: What a call costs beside its work, which keeps the scale off zero: assumed. The shortest of the
#: measured programs (``datasets/measured/epyc_programs``) take 1e-8 to 1e-7 s a call.
_TINY_S = 1e-7
_NAMES = {(8, 1): "fp64", (4, 1): "fp32", (2, 1): "fp16", (2, 2): "bf16", (1, 0): "int8"}


class ProgramBound(NamedTuple):
    """Seconds of N programs on their devices.

    Attributes:
        bound_s: lower bound (N).
        reference_s: scale (N), positive.
        launch_s: host's overhead of the launches (N).
    """

    bound_s: Floats
    reference_s: Floats
    launch_s: Floats


def program_bound(table: ProgramTable) -> ProgramBound:
    """Return bound, scale and launch overhead of every program.

    Raises:
        MissingDataError: a device without peak or bandwidth.
    """
    peak, bandwidth, cache, overhead = (np.zeros(len(table)) for _ in range(4))
    for number, device in enumerate(table.devices):
        rows = table.device == number
        if not rows.any():
            continue
        if device.memory_bandwidth is None:
            raise MissingDataError(
                f"no memory bandwidth of {device.name}",
                fix="add memory_bandwidth to its description",
            )
        bandwidth[rows] = device.memory_bandwidth
        cache[rows] = device.l3_bytes or device.l2_bytes or 0
        overhead[rows] = device.launch_overhead_s or 0.0
        sizes, kinds = table.total("main_dtype_bytes"), table.total("main_dtype_floating")
        for size, kind in {(int(s), int(k)) for s, k in zip(sizes[rows], kinds[rows], strict=True)}:
            same = rows & (sizes == size) & (kinds == kind)
            peak[same] = _peak(device, _NAMES.get((size, kind), "fp32"))
    flops, moved = table.total("flops"), table.total("argument_bytes")
    compute = flops / peak
    return ProgramBound(
        bound_s=np.maximum(compute, np.maximum(0.0, moved - cache) / bandwidth),
        reference_s=compute + moved / bandwidth + _TINY_S,
        launch_s=overhead * table.total("kernels"),
    )


def _peak(device: Device, dtype: str) -> float:
    """Peak of the vector units; of fp32 where the type's own is not known."""
    rates = dict(device.peak_flops)
    for name in (f"{dtype}/vector", "fp32/vector"):
        for peak, rate in rates.items():
            if peak == name:
                return float(rate)
    known = device.peak("fp32")
    if known is None:
        raise MissingDataError(
            f"no arithmetic peak of {device.name}", fix="add peak_flops to its description"
        )
    return known
