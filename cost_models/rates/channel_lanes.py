"""Channels of a convolution that fill no vector of a processor.

oneDNN computes a convolution in fp32 with an output channel in each lane of a vector, and its
gradient by images with an input channel (``jit:avx512_core`` in 3.12, as ``ONEDNN_VERBOSE`` names
it). Channels that fill no vector take as long as if they did: 64 to 1 as long as 64 to 16. Groups
are not filled up; there a vector is as wide as the largest power of two that divides both a group's
inputs and its outputs.

Of the drawn sizes that no constant was read off (``tests/benchmarks/convolution_figures.py``, seeds
2 and 3, one core of an EPYC, Zen 5, 0.86 us a call) those of few outputs are a factor of 1.28 off
in the mean, 1.34 and 1.23 for the gradients by images and filters, and those of groups 1.12, 1.16
and 1.19; 2.13, 1.71, 1.76 and 1.55, 1.51, 1.67 by all their channels alike.
"""

from __future__ import annotations

from types import MappingProxyType

from foreplan.datasets.device import Device
from foreplan.datasets.program import (
    CHANNELS_LAST,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Program,
    program,
)

#: Values of a vector in fp32, by instruction set from the widest on.
_LANES = MappingProxyType({"avx512": 16, "avx2": 8})
#: Input channels that the gradient by filters sums up as they are; forward, all that fill less than
#: a vector.
_FEW_FILTERS = 3
#: What a convolution takes at least of the price of filled vectors (fitted to seeds 0 and 1, as the
#: next two).
_FULL = 0.85
#: What a convolution of groups takes of its price, and how many times the peak that torch's own
#: products reach those of oneDNN do.
_GROUPS, QUICKER = 0.8, 2.0
#: The most lanes that a group is asked for.
_MOST = 16
#: Lanes that such kernels have at least.
FEWEST = 4


def lanes(device: Device) -> int:
    """Values of a vector; 0 where oneDNN's kernels are others."""
    if device.kind != "cpu":
        return 0
    return next((wide for name, wide in _LANES.items() if name in device.isa), 0)


def dimensions(item: Program) -> int:
    """Of a convolution's images: 1 to 3."""
    return next((sides for sides in (1, 3) if f"conv{sides}d" in item.variant.kernel), 2)


def group_lanes(item: Program) -> int:
    """The largest power of two, up to 16, that divides the channels of a group."""
    d = item.dims
    both = d["cin"] // d["groups"] | d["cout"] // d["groups"] | _MOST
    return both & -both


def filled_up(item: Program, device: Device) -> tuple[Program, float]:
    """The convolution as its vectors are, and what it takes of its price.

    Args:
        item: a convolution in fp32 that oneDNN has a kernel for.
        device: on which.
    """
    d, wide = item.dims, lanes(device)
    if not wide:
        return item, 1.0
    if d["groups"] > 1:
        return item, _GROUPS
    cin, cout = (-(-d[name] // wide) * wide for name in ("cin", "cout"))
    few = 0 if item.variant.kernel.endswith(INPUT_GRADIENT) else wide - 1
    if item.variant.kernel.endswith(WEIGHT_GRADIENT):
        few = _FEW_FILTERS
    if d["cin"] <= few:
        cin = d["cin"]
    full = program(item.op, item.variant, **{**d, "cin": cin, "cout": cout})
    return full, max(_FULL, item.flops / full.flops)


def few_lanes_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds that groups of few lanes take beside the price of full ones; 0 of all other work.

    Args:
        item: what is asked for.
        device: on which; its peak is of all its cores.
        launch_s: likewise, of no use here.
    """
    del launch_s
    full, peak = lanes(device), device.peak("fp32")
    if item.op != "conv" or not full or not peak or item.variant.compute != "fp32":
        return 0.0
    d, wide = item.dims, group_lanes(item)
    if d["groups"] in (1, d["cin"]) or wide < FEWEST or d["taps"] == 1:
        return 0.0
    if CHANNELS_LAST in item.variant.kernel:
        return 0.0
    return max(0.0, full / wide - 1) * item.flops / (QUICKER * peak)
