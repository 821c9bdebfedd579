"""Device: what is known of one worker, figure by figure, each with its source.

A figure that is not known is ``None``, never zero: a predictor must be able to tell "no matrix
unit for bf16 that we know of" from "slow". Peaks are *dense*; vendors print figures doubled by
2:4 sparsity beside them, which no dense kernel reaches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from foreplan.datasets.quantity import (
    Bytes,
    BytesPerSecond,
    Hertz,
    OperationsPerSecond,
    Seconds,
    Watts,
)
from foreplan.datasets.specs import StrictModel
from foreplan.errors import SpecError

DeviceKind = Literal["cuda", "rocm", "xpu", "cpu"]

PEAK_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4")
_PeakName = Literal[
    "fp64/matrix",
    "fp64/vector",
    "fp32/matrix",
    "fp32/vector",
    "tf32/matrix",
    "tf32/vector",
    "bf16/matrix",
    "bf16/vector",
    "fp16/matrix",
    "fp16/vector",
    "fp8/matrix",
    "fp8/vector",
    "int8/matrix",
    "int8/vector",
    "int4/matrix",
    "int4/vector",
]
PEAKS: tuple[_PeakName, ...] = get_args(_PeakName)
"""Names of peaks: ``matrix`` is a tensor or matrix core (a CPU's AMX), ``vector`` is the rest."""

SCALAR_FIGURES = (
    "memory_bytes",
    "memory_bandwidth",
    "l2_bytes",
    "l3_bytes",
    "units",
    "clock_hz",
    "base_clock_hz",
    "launch_overhead_s",
    "shared_memory_bytes_per_unit",
    "register_bytes_per_unit",
    "max_threads_per_unit",
    "tdp_w",
    "host_link_bandwidth",
    "peer_link_bandwidth",
)
"""Figures of one number each, in the order that `Device.vector` uses after the peaks."""

_FEATURE_PEAKS = (
    "fp64/vector",
    "fp64/matrix",
    "fp32/vector",
    "fp32/matrix",
    "tf32/matrix",
    "bf16/vector",
    "bf16/matrix",
    "fp16/vector",
    "fp16/matrix",
    "fp8/matrix",
    "int8/vector",
    "int8/matrix",
    "int4/matrix",
)

FEATURE_NAMES = tuple(f"peak_flops.{name}" for name in _FEATURE_PEAKS) + SCALAR_FIGURES
"""Names of the entries of `Device.vector`, in order. Append only: learned models rely on it."""

Positive = Annotated[int, Field(gt=0)]

#: Less than any device that runs tensor programs has: a figure below it was written in another unit
#: than its own (500 for 500 GB/s, 2500 for MHz). The unit that it takes, as people write it.
_LEAST = MappingProxyType(
    {
        "peak_flops": (1e7, "TFLOP/s"), "memory_bandwidth": (1e7, "GB/s"), "clock_hz": (1e6, "GHz"),
        "base_clock_hz": (1e6, "GHz"), "memory_bytes": (1e6, "GiB"),
    }
)  # fmt: skip


_Reread = Annotated[tuple[Bytes, BytesPerSecond], Field(strict=False)]


class DeviceVector(NamedTuple):
    """A device as numbers for a learned model.

    Attributes:
        values: one number per `FEATURE_NAMES`, SI units on a linear scale; NaN where unknown.
        known: true where ``values`` is a number.
    """

    values: NDArray[np.float64]
    known: NDArray[np.bool_]


class Device(StrictModel):
    """One worker: a GPU, one die of one, a CPU socket, or a slice of any of them.

    Equal by all fields, hashed by name and chip, so it can key a cache.
    """

    name: Annotated[str, Field(min_length=1)]
    """Canonical name, unique among the devices in use."""
    chip: Annotated[str, Field(min_length=1)]
    """The silicon, as ``gh100``. Held-out folds go by chip: slices and boards of one share it."""
    vendor: Annotated[str, Field(min_length=1)]
    kind: DeviceKind
    architecture: str | None = None
    """Generation, as ``hopper`` or ``zen5``."""
    compute_capability: str | None = None
    """CUDA's ``9.0``, ROCm's ``gfx90a``."""
    isa: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Vector and matrix extensions of a CPU, least first; empty for a GPU."""
    slice: str | None = None
    """How this device is a part of the chip ("32 of 132 SMs"); ``None`` for the whole."""
    notes: str | None = None

    peak_flops: Mapping[_PeakName, OperationsPerSecond] = Field(default_factory=dict)
    """``"<dtype>/<matrix|vector>"`` to dense FLOP/s (integer types: OP/s)."""
    memory_bytes: Bytes | None = None
    memory_bandwidth: BytesPerSecond | None = None
    """Of the device's own memory, bytes per second, reads and writes together."""
    l2_bytes: Bytes | None = None
    """Whole chip: a GPU's L2, the sum of a CPU's private L2 caches."""
    l3_bytes: Bytes | None = None
    """Whole chip: a CPU's L3, AMD's Infinity Cache."""
    reread_bandwidth: Annotated[tuple[_Reread, ...], Field(strict=False)] | None = None
    """How fast a CPU's worker reads again what it went through last: (bytes, bytes per second),
    ascending by bytes, the last from memory. What caches really hold for it: of 480 MiB that a
    virtual machine names, two of its cores may have 64."""
    units: Positive | None = None
    """Streaming multiprocessors, compute units, Xe cores or CPU cores."""
    clock_hz: Hertz | None = None
    """Boost (highest advertised) clock."""
    base_clock_hz: Hertz | None = None
    launch_overhead_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Time a call costs beside its work."""
    shared_memory_bytes_per_unit: Bytes | None = None
    """Most that the kernels resident on one unit can share (LDS on AMD)."""
    register_bytes_per_unit: Bytes | None = None
    max_threads_per_unit: Positive | None = None
    """Threads resident on one unit (a CPU core: its hardware threads)."""
    tdp_w: Watts | None = None
    host_link_bandwidth: BytesPerSecond | None = None
    """To the host (PCIe, NVLink-C2C), one direction."""
    peer_link_bandwidth: BytesPerSecond | None = None
    """To its peers together (NVLink, xGMI), one direction; ``None`` if that is an option."""
    price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """In whatever currency the user writes; the zoo gives none."""
    sources: Mapping[str, str] = Field(default_factory=dict)
    """Figure (``l2_bytes``, ``peak_flops.fp16/matrix``) to where its number comes from."""

    @model_validator(mode="after")
    def _sources_name_figures(self) -> Device:
        known = set(SCALAR_FIGURES) | {f"peak_flops.{peak}" for peak in PEAKS}
        known |= {"price_per_hour", "reread_bandwidth"}
        for figure in self.sources:
            if figure not in known:
                raise ValueError(
                    f"sources by figure, as l2_bytes or peak_flops.fp16/matrix; not {figure!r}"
                )
        if self.clock_hz and self.base_clock_hz and self.base_clock_hz > self.clock_hz:
            raise ValueError("base_clock_hz at most clock_hz")
        sizes = [size for size, _ in self.reread_bandwidth or ()]
        if self.reread_bandwidth is not None and (not sizes or sorted(set(sizes)) != sizes):
            raise ValueError("reread_bandwidth ascending by bytes, at least one pair")
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check the YAML or JSON file that describes a device.

        Raises:
            SpecError: as `StrictModel.load`; a figure of another unit, far below any device's.
        """
        device = super().load(path)
        for figure, value in device.figures():
            least, unit = _LEAST.get(figure.partition(".")[0], (0.0, ""))
            if value < least:
                raise SpecError(
                    f"{os.fspath(path)}: {figure}", got=value,
                    expected=f"at least {least:.0e} in SI units",
                    fix=f"a number may bring its unit: {value:g} {unit}",
                )  # fmt: skip
        return device

    def __hash__(self) -> int:
        return hash((self.name, self.chip, self.slice))

    def peak(self, dtype: str) -> float | None:
        """Return the best dense rate for a data type.

        Args:
            dtype: one of `PEAK_DTYPES`.

        Returns:
            FLOP/s (integers: OP/s) of the faster of matrix and vector unit, ``None`` if neither
            figure is known.

        Raises:
            SpecError: no such data type.
        """
        if dtype not in PEAK_DTYPES:
            raise SpecError("dtype", got=dtype, expected="one of " + ", ".join(PEAK_DTYPES))
        rates = [rate for name, rate in self.peak_flops.items() if name.partition("/")[0] == dtype]
        return max(rates, default=None)

    def figures(self) -> Iterator[tuple[str, float]]:
        """Yield the known figures as (name, SI number), peaks first; names as in ``sources``."""
        for peak in PEAKS:
            if (rate := self.peak_flops.get(peak)) is not None:
                yield f"peak_flops.{peak}", float(rate)
        for name in SCALAR_FIGURES:
            if (value := getattr(self, name)) is not None:
                yield name, float(value)

    def vector(self) -> DeviceVector:
        """Return the figures in the order of `FEATURE_NAMES`, NaN where unknown."""
        known = dict(self.figures())
        values = np.array([known.get(name, math.nan) for name in FEATURE_NAMES], dtype=np.float64)
        return DeviceVector(values=values, known=~np.isnan(values))
