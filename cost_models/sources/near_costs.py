"""`near_s`: seconds of operators on a processor that no sweep timed as they run.

Sweeps time operators behind other data, as a large network calls them. What a recurrent layer
repeats step by step finds its operands in caches, and takes

    launch + bytes / (`NEAR` x bandwidth) + FLOP / peak

from the device's figures; kernels that no vector unit of a processor has take a time for each
element instead, and a Fourier transform a share of the peak.

Every constant here was measured on one core of an EPYC (Zen 5) of 35 GB/s, 1 us a call and 93
GFLOP/s in fp32, none on another chip (``tests/benchmarks/near_figures.py``): 35 products of 1 to 64
rows with weights of 48 KiB to 16 MiB, 48 recurrent layers, 11 other kernels, 4 transforms. What
modules of other sizes take against their prices: docs/results/end_to_end.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from foreplan.cost_models.lowering.graph_whole import COMPLEX, OF_COMPLEX, OF_POWERS
from foreplan.cost_models.roofline import launch_s
from foreplan.datasets.device import PEAK_DTYPES, Device
from foreplan.datasets.program import Program

#: Bandwidth of caches over memory's: weights of 64 KiB to 4 MiB came at 62-79 GB/s (measured).
NEAR = 2.0
#: Elements in the time of a call (measured): 2.5 ns each of a hyperbolic tangent.
_FUNCTIONS = MappingProxyType({"torch.tanh": 400, "torch.tanh_": 400})
#: The same of kernels whose bytes say too little wherever they stand: the size of a complex number
#: 3 ns, other functions of one 30; a pair's distance 0.3 a dimension, 4 where its powers are none
#: of 0, 1, 2 and the largest; a comparison that sorts 4.4; an element that is interpolated 1.5 to
#: 7; a cumulative sum of exponentials 26; a complex number of its size and angle 6; a draw that
#: dropout keeps an element by 4.8; an element of a batch's mean and variance 1.2; of a softmax
#: under a mask 2.5 to 3.7.
BY_ELEMENT = MappingProxyType(
    {f"torch.{name}{OF_COMPLEX}": 30 for name in COMPLEX}
    | {f"torch.{name}{OF_COMPLEX}": 300 for name in ("abs", "angle", "sgn")}
    | {f"torch.{name}{OF_POWERS}": 240 for name in ("_cdist_forward", "_pdist_forward")}
    | dict.fromkeys(("torch._cdist_forward", "torch._pdist_forward"), 3000)
    | dict.fromkeys(("torch.sort", "torch.argsort", "torch.msort"), 230)
    | {"torch._masked_softmax": 1450, "torch.bernoulli": 200, "torch.batch_norm_statistics": 830}
    | {"torch.upsample_bilinear2d": 700, "torch.upsample_trilinear3d": 240}
    | {"torch.upsample_bilinear2d_backward": 380, "torch.upsample_bicubic2d_backward": 140}
    | {"torch.upsample_bicubic2d": 140, "torch.logcumsumexp": 40, "torch.polar": 175}
)
#: Calls that oneDNN takes to make a recurrent layer ready, and weights that it lays out in one: 75
#: us for 32,768 weights, 230 for 524,288, 2 to 3 ms for 2,097,152 (measured).
_MADE_READY, _LAID_OUT = 45, 2048
#: Share of the fp32 peak that a Fourier transform reaches, and calls that it takes to be planned
#: anew: 25-34 GFLOP/s for 1,024 to 16,384 points, 15-17 us for eight of 1,000 (measured).
_OF_PEAK, _PLANNED = 0.4, 8


def known(device: Device) -> bool:
    """Whether a device has the figures that these prices take."""
    return device.memory_bandwidth is not None and device.peak("fp32") is not None


def near_s(
    parts: Iterable[tuple[Program, int]], device: Device, *, call_s: float, own: bool = False
) -> float:
    """Seconds of operators on operands in caches.

    Args:
        parts: and how often each runs.
        device: a processor that is `known`.
        call_s: seconds of each call beside its work.
        own: oneDNN runs their products, not torch's.
    """
    return sum(count * _each_s(part, device, call_s, own=own) for part, count in parts)


def ready_s(weights: float, calls: int, device: Device) -> float:
    """Seconds that oneDNN takes to make recurrent layers ready.

    Args:
        weights: of all of them, which it lays out anew at every call.
        calls: of it, one for each layer and direction.
        device: a processor.
    """
    return launch_s(device) * (calls * (_MADE_READY + 1) + weights / _LAID_OUT)


def transform_s(item: Program, device: Device) -> float:
    """Seconds of a Fourier transform on a processor that is `known`."""
    work_s = max(item.flops / (_OF_PEAK * _peak(device, "fp32")), item.bytes / _bandwidth(device))
    return _PLANNED * launch_s(device) + work_s


def _each_s(part: Program, device: Device, call_s: float, *, own: bool) -> float:
    kernel, compute = part.variant.kernel, part.variant.compute
    by_element = _FUNCTIONS.get(kernel) or BY_ELEMENT.get(kernel)
    if by_element:
        return call_s + launch_s(device) * part.flops / by_element
    peak = _peak(device, compute if part.op in ("linear", "matmul") else "fp32")
    if own and compute == "fp32":
        peak = max(peak, _vector_peak(device))
    return call_s + part.bytes / (NEAR * _bandwidth(device)) + part.flops / peak


def _vector_peak(device: Device) -> float:
    """FLOP/s in fp32 of all of a processor's vector units, 0 where no figure says it.

    The figure of fp32 was measured with torch's products, which MKL runs on half of an AMD's units.
    Those of bf16 are oneDNN's, and take two for one of fp32 (VDPBF16PS; theory).
    """
    half = device.peak_flops.get("bf16/vector")
    matrices = any(name.startswith("amx") for name in device.isa)
    if half is None or matrices or "avx512_bf16" not in device.isa:
        return 0.0
    return float(half) / 2


def _peak(device: Device, dtype: str) -> float:
    rate = device.peak(dtype) if dtype in PEAK_DTYPES else None
    rate = rate or device.peak("fp32")
    assert rate is not None  # of a device that is `known`
    return rate


def _bandwidth(device: Device) -> float:
    assert device.memory_bandwidth is not None  # of a device that is `known`
    return device.memory_bandwidth
