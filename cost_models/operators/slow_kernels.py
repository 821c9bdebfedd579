"""What kernels of GPUs take whose functions, not their bytes, decide.

Sweeps time some fifty maps by name, sums, pools and softmaxes of rows. Other functions are priced
as a plain map or sum of as many bytes, which many of torch's kernels are not: they compute for
long, go through an inner dimension one element after the other, or are several maps in turn. What
such a kernel takes at least was timed once; how quickly other chips issue and read gives theirs.

All figures: one H200 (132 multiprocessors, 1.755 GHz, 4.8 TB/s), torch 2.11, 2026-11-28, FP32 and
BF16, operands in L2 and out of it, geometric means (``tests/benchmarks/gpu_functions.py``). Draws
by other names, other losses of pairs and the derivative of a digamma are taken alike (assumed).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.lowering.copy_layout import ACROSS, plain_kernel
from foreplan.cost_models.lowering.gradient_maps import SCANS, WRITES
from foreplan.cost_models.operators.idle_kernel import USUAL_CLOCK_HZ
from foreplan.cost_models.operators.operator_features import USUAL_UNITS
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import Program

#: Clock cycles of a multiprocessor for an element of a map: what is computed with, drawn, or put
#: elsewhere; of windows, of each element of each; of rows that are written, of each of theirs.
_OF_MAPS = MappingProxyType(
    {"elu": 0.48, "selu": 0.5, "celu": 0.48, "mish": 0.53, "log_sigmoid": 0.42, "log": 0.4,
     "log2": 0.4, "log1p": 0.36, "expm1": 0.4, "erf": 0.37, "tan": 0.36, "atan": 0.34,
     "sinh": 0.35, "cosh": 0.35, "asin": 0.37, "acos": 0.36, "logit": 0.46, "remainder": 0.42,
     "lgamma": 0.69, "digamma": 1.95, "polygamma": 1.7, "rrelu": 1.4, "bernoulli": 1.5}
    | dict.fromkeys(("rand", "rand_like", "uniform"), 0.67)
    | dict.fromkeys(("randn", "randn_like", "normal"), 0.83)
    | dict.fromkeys(("flip", "tril", "triu"), 0.7)
    | dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), 0.82)
    | dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), 0.73)
    | {"glu": 1.04, "gather": 1.2, "gather_backward": 3.4, "index_add": 1.75, "index_copy": 0.8,
       "scatter": 0.82, "scatter_add": 0.92, "scatter_reduce": 1.8, "masked_scatter": 2.5,
       "searchsorted": 2.9, "sort": 0.95, "im2col": 0.82, "col2im": 2.1,
       "upsample_nearest2d": 0.5, "upsample_trilinear3d": 1.46, "grid_sampler_2d": 3.2,
       "grid_sampler_2d_backward": 14.6}
    | {f"adaptive_avg_pool{n}d_backward": 3.0 for n in (1, 2, 3)}
)  # fmt: skip
#: The same of an element that a sum, a scan or a choice goes through.
_OF_SUMS = MappingProxyType(
    {"max": 0.45, "min": 0.45, "var": 0.54, "std": 0.54, "topk": 12.5, "kthvalue": 9.9,
     "median": 8.4, "multinomial": 2.8}
    | dict.fromkeys(SCANS, 1.07)
)  # fmt: skip
#: The same where it is no neighbour of the next one: middles of a cube of 512, its first third.
_OF_SUMS_ACROSS = MappingProxyType(dict.fromkeys(("max", "min", "var", "std"), 0.75))
#: How often the bytes of an operand pass through memory by its published bandwidth, where eager
#: torch runs several maps and a sum.
_PASSES = MappingProxyType(
    dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"), 6.2
    )
    | {"binary_cross_entropy_with_logits": 16.5, "kl_div": 13.0, "logsumexp": 12.0}
)
#: Seconds of a step of a thread that goes through a dimension one element after the other, as a
#: softmax (three times, its gradient twice) and a scan do where neighbours lie in another, and of
#: a row of a line that is interpolated; threads that a multiprocessor holds (theory).
_STEPS_S = MappingProxyType(
    dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), 8.7e-7)
    | dict.fromkeys(("softmax_backward", "log_softmax_backward"), 4.6e-7)
    | dict.fromkeys(SCANS, 3.3e-7)
)
_ROWS_S, _THREADS = MappingProxyType({"upsample_linear1d": 3e-7}), 2048
#: The clock and bandwidth that the figures are of.
_CLOCK_HZ = 1.755e9


def slow_seconds(programs: Sequence[Program], device: Device) -> NDArray[np.float64]:
    """What each program takes at least (N,), seconds; 0 where bytes decide.

    Args:
        programs: what is asked for (N,).
        device: a GPU.
    """
    units, clock = device.units or USUAL_UNITS, device.clock_hz or USUAL_CLOCK_HZ
    return np.array([_least_s(program, device, units, clock) for program in programs])


def _least_s(program: Program, device: Device, units: float, clock: float) -> float:
    kernel = program.variant.kernel
    name = plain_kernel(kernel).removeprefix("torch.").removesuffix("_")
    d, across = program.dims, kernel.endswith(ACROSS)
    if "rows" not in d or "cols" not in d:
        return 0.0
    rows, elements = d["rows"], float(d["rows"] * d["cols"])
    if across and name in _STEPS_S:
        turns = max(1.0, rows / (_THREADS * units))
        return _STEPS_S[name] * d["cols"] * turns * _CLOCK_HZ / clock
    if name in _ROWS_S:
        return _ROWS_S[name] * rows * _CLOCK_HZ / clock
    if name in _PASSES and device.memory_bandwidth:
        return _PASSES[name] * elements * DTYPE_BYTES[program.variant.compute] / float(
            device.memory_bandwidth
        )  # fmt: skip
    cycles = 0.0
    if program.op == "elementwise":
        cycles = _OF_MAPS.get(name, 0.0)
        if name in WRITES or name == "gather_backward":
            elements *= max(1, d["inputs"] - 1)
        elif name == "col2im":
            elements *= d["inputs"]
    elif program.op == "reduction":
        cycles = (across and _OF_SUMS_ACROSS.get(name, 0.0)) or _OF_SUMS.get(name, 0.0)
    return elements * cycles / (units * clock)
