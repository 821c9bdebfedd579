"""What an operator has to do on a device, in seconds at full rate, and what it shares with others.

The physics under `rate_model`: four terms a program, each the seconds that one part of the work
takes where nothing is lost,

=========  ===================================================================================
launch     the host's time of one call
compute    FLOP over the peak of the compute dtype (memory-bound operators: the fp32 peak)
memory     bytes that move once, over the memory's bandwidth
unpack     bytes of a weight written out in fp32 by kernels that dequantise before they multiply;
           of a convolution on a processor the host's time of a call for every `_LAID_OUT` weights
=========  ===================================================================================

from figures that are measured or published, and the groups in which programs lose alike (the same
family, operator, dtype, kernel, variant).

A convolution on a processor lays its weight out anew at every call, element by element and far
below the bandwidth (4 MiB of weights in 1.2 to 3 ms on one core of an EPYC, 1.4 to 3.5 GB/s), so
that how quickly a core issues a call says more of it than how much its memory moves; see
docs/results/onboarding_history.md.

Shape legend: ``N`` programs, ``T`` = `TERMS`, ``L`` = `LEVELS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.roofline import ARITHMETIC, launch_s
from foreplan.cost_models.unpacking import unpacked_weights
from foreplan.datasets.device import PEAK_DTYPES, Device
from foreplan.datasets.dtypes import DTYPE_BYTES, weight_bytes
from foreplan.datasets.program import Program
from foreplan.errors import MissingDataError

Floats = NDArray[np.float64]

TERMS = ("launch", "compute", "memory", "unpack")

#: Groups of programs from the widest to the narrowest.
LEVELS = ("all", "family", "layer", "operator", "dtype", "function", "kernel", "variant")

#: Weights of a convolution that are laid out in the time of a call (assumed: 4 KiB of fp32 at 3
#: GB/s; rates are fitted on top).
_LAID_OUT = 1024

_BACK = ("_backward", "_gradient")
_PASSES = ("_forward", "_backward", "_weight_gradient")


def family(program: Program) -> str:
    """``product``, ``attention``, ``optimizer``, ``cast`` or ``wide`` (all other)."""
    if program.op in ARITHMETIC:
        return "attention" if "attention" in program.op else "product"
    if program.op in ("optimizer_step", "adamw"):
        return "optimizer"
    return "cast" if program.op == "cast" else "wide"


def groups(program: Program) -> tuple[str, ...]:
    """The group of a program at each of `LEVELS`."""
    variant, kind = program.variant, family(program)
    layer = program.op
    for ending in _PASSES:
        layer = layer.removesuffix(ending)
    # Attention of one new token takes another path through the kernel.
    operator = program.op + (" of one query" if program.dims.get("queries") == 1 else "")
    operator += " by channel" if by_channel(program) else ""
    kernel = variant.kernel.removesuffix("_cold")
    return (
        "", kind, layer, operator, f"{kind} {variant.compute}", f"{operator} {kernel}",
        f"{kind} {variant.storage}/{variant.compute}/{kernel}", f"{operator} {variant}",
    )  # fmt: skip


def by_channel(program: Program) -> bool:
    """Whether a convolution has a filter a channel, which is no matrix product."""
    d = program.dims
    return d.get("groups", 1) > 1 and d["groups"] == d.get("channels", d.get("cin"))


def code_kind(program: Program) -> str:
    """What products, convolutions or attentions run the same code of a library as this one."""
    kind = "convolution" if program.op.startswith("conv") else family(program)
    back = program.variant.kernel.endswith("_gradient") or program.op.endswith(_BACK)
    return f"{kind} backward" if back and kind != "product" else kind


def rate_terms(programs: Sequence[Program], device: Device) -> Floats:
    """Seconds of each term at full rate (N, T).

    Raises:
        MissingDataError: the device's bandwidth or its fp32 peak is not known.
    """
    if device.memory_bandwidth is None or device.peak("fp32") is None:
        raise MissingDataError(
            f"{device.name}: no memory bandwidth or no fp32 peak",
            fix="measure them with 'foreplan profile', or write them into the device's file",
        )
    launch = launch_s(device)
    return np.array([
        (
            launch,
            program.flops / _peak(device, program),
            program.bytes / device.memory_bandwidth,
            4.0 * unpacked_weights(program) / device.memory_bandwidth
            + (launch * _laid_out(program) / _LAID_OUT if device.kind == "cpu" else 0.0),
        )
        for program in programs
    ]).reshape(len(programs), len(TERMS))  # fmt: skip


def arithmetic_s(programs: Sequence[Program], device: Device) -> Floats:
    """Seconds (N,) of products at the published peak of their own data type, 0 where none is."""

    def peak(item: Program) -> float | None:
        dtype = item.variant.compute
        return device.peak(dtype) if item.op in ARITHMETIC and dtype in PEAK_DTYPES else None

    return np.array([item.flops / rate if (rate := peak(item)) else 0.0 for item in programs])


def streamed_s(programs: Sequence[Program], device: Device) -> Floats:
    """Seconds (N,) of the bytes that no cache can hold, at the published bandwidth.

    0 where no cache is known or the bandwidth was measured: a copy's is no bound of what reads
    more than it writes (an update of AdamW went up to 2.2 times as fast on cores of EPYCs).
    """
    bandwidth, cache = device.memory_bandwidth, (device.l2_bytes or 0) + (device.l3_bytes or 0)
    if not bandwidth or not cache or device.sources.get("memory_bandwidth") == "measured":
        return np.zeros(len(programs))
    return np.array([max(0.0, item.bytes - cache) / bandwidth for item in programs])


def roofline(terms: Floats, programs: Sequence[Program]) -> Floats:
    """Seconds beside the launch that no kernel beats (N,), from `rate_terms`."""
    products = np.array([program.op in ARITHMETIC for program in programs])
    return np.asarray(np.maximum(np.where(products, terms[:, 1], 0.0), terms[:, 2]))


def weight_of(program: Program) -> float:
    """Bytes of the weight that a linear or a convolution reads, 0 of others."""
    d, storage = program.dims, program.variant.storage
    if program.op.startswith("linear"):
        return float(weight_bytes(d["n"], d["k"], storage))
    if program.op == "conv" or program.op.startswith("conv2d_"):
        once = _laid_out(program) / (2 if program.op == "conv2d_backward" else 1)
        return once * DTYPE_BYTES[storage]
    return 0.0


def weight_share(program: Program) -> float:
    """Share of a program's bytes that are its weight's."""
    return min(1.0, weight_of(program) / program.bytes)


def _laid_out(program: Program) -> float:
    """Weights of a convolution; twice in a backward pass, which is of input and weights."""
    d = program.dims
    if program.op == "conv":
        return d["cin"] / d["groups"] * d["cout"] * d["taps"]
    if not program.op.startswith("conv2d_"):
        return 0.0
    weights = d["channels"] / d["groups"] * d["filters"] * d["kernel_height"] * d["kernel_width"]
    return weights * (2 if program.op == "conv2d_backward" else 1)


def _peak(device: Device, program: Program) -> float:
    wanted = program.variant.compute if program.op in ARITHMETIC else "fp32"
    for name in (wanted, "fp32"):
        peak = device.peak(name) if name in PEAK_DTYPES else None
        if peak is not None:
            return peak
    raise AssertionError("checked by rate_terms")
