"""Operator table: latencies of library operators from any source, in one form.

One row is one measurement: the operator as its source names it, what it is (`KINDS`), its
dimensions, the data types, the library that ran it, the device as its source names it, and the
time. Names stay as they are in the file so that a result can be laid beside its source; `device_of`
says which zoo device (and so which chip) a name means.

Shape legend: ``N`` rows of the table; ``b`` batch, ``m`` x ``n`` output, ``k`` contracted size of a
matrix product; ``rows`` x ``cols`` of an elementwise or normalising operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.errors import SpecError

#: Sizes of a convolution. ``groups`` of 0 are one; 1 or 0: ``channels_last``, and ``line`` where
#: images and windows have one dimension, not two of the same size.
_CONV = (
    "b", "cin", "cout", "window", "size", "stride", "padding", "groups", "channels_last", "bias",
    "line",
)  # fmt: skip
_PRODUCT = ("b", "m", "n", "k", "turned")
_BATCH_NORM = ("rows", "cols", "channels", "training", "channels_last")
_ATTENTION = (
    "b", "queries", "keys", "heads", "kv_heads", "head_dim", "window", "masks", "strided",
    "training", "converts", "broadcast",
)  # fmt: skip

#: Kind of operator to the names of its dimensions. ``strided`` (1 or 0): elements that are no
#: neighbours in memory are read, as a transposed copy or a sum over columns does (2: a sum over all
#: but a middle size, or a roll; 3: parts that lie apart are read, or put together; 4: operands of a
#: map lie in different orders; 5: one lies across, so that its neighbours are none of the
#: result's). ``turned``: 0 operands lie along ``k``, 1 the second along ``n``, 2 also the first
#: along ``m``. ``broadcast``: an operand has one value a row (1), a column (2), a block of rows
#: (3). ``converts``: operands are of another data type than what is written (1; 2: of a map of two
#: data types not the larger one, or one of two as large; 0: none). Of an attention ``masks`` counts
#: the sequences and heads that have values of their own to add to their scores (0: nothing is
#: added); of these, 1 or 0: ``strided`` where keys are no neighbours in memory, ``training`` where
#: they are learned, ``converts`` where they are truth values, ``broadcast`` where all queries share
#: one row. ``values`` are the rows of the table that a gradient by an embedding is added up in;
#: ``strided`` (1 or 0): of an index, here and forward. ``kernels`` and ``longest`` of an update:
#: `update_packing`. ``function`` of a map: a number of `MAP_FUNCTIONS`, 0 where it is not known.
#: ``rows`` of a pool are outputs, of ``cols`` inputs each; ``average``: a mean (1) or interpolated
#: (2), not the largest (0). ``channels`` of a norm of rows: of images of which a row is a group's;
#: 0 of others.
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bmm": _PRODUCT,
        "linear": _PRODUCT,
        "conv": _CONV,
        "conv_input_gradient": _CONV,
        "conv_weight_gradient": _CONV,
        "elementwise": (
            "rows",
            "cols",
            "inputs",
            "cost",
            "strided",
            "broadcast",
            "converts",
            "kernels",
            "longest",
            "function",
        ),
        "softmax": ("rows", "cols"),
        "layernorm": ("rows", "cols", "rms", "channels", "channels_last"),
        "layernorm_gradient": ("rows", "cols", "channels", "channels_last"),
        "batchnorm": _BATCH_NORM,
        "batchnorm_gradient": _BATCH_NORM,
        "reduction": ("rows", "cols", "strided"),
        **dict.fromkeys(
            ("pool", "pool_gradient"),
            ("rows", "cols", "window", "channels_last", "average", "side"),
        ),
        "embedding": ("rows", "cols", "strided"),
        "embedding_gradient": ("rows", "cols", "values", "strided"),
        "context_attention": _ATTENTION,
        "context_attention_gradient": _ATTENTION,
        "generation_attention": _ATTENTION,
        "collective": ("message_bytes", "ranks", "pattern"),
        "decoder_layer": ("tokens", "context", "hidden", "intermediate", "heads", "shards"),
    }
)

#: Kind of a row that names an operator this project does not know; it is kept, never predicted.
UNKNOWN = "unknown"

#: Every dimension any kind has, in the order of the file's columns.
DIMS: tuple[str, ...] = tuple(dict.fromkeys(name for dims in KINDS.values() for name in dims))

Texts = NDArray[np.object_]


def includes_launch(library: str) -> bool:
    """Whether a library's times hold the launch by the host; all others are of CUDA graphs."""
    return library.startswith("torch") and not library.startswith(RECORDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """Measured operators, column by column; every column has N entries.

    Attributes:
        op: name as in the source (GEMM tables: ``gemm/<dtype>``).
        kind: one of `KINDS`, or `UNKNOWN`.
        dtype: what is computed, as the source says it, in words that `operator_work` knows:
            ``fp32``, ``bfloat16``, ``fp8``, ``int8_wo``, ``bfloat16/fp8`` (attention/cache).
        library: who computed it (``torch-2.1-cuda``, ``trtllm``): part of a kernel's identity.
        device: name as in the source.
        dims: dimension name to sizes, 0 where a kind does not have it.
        latency_s: measured time in seconds; NaN in a table that only asks.
        source_row: row of the source file, counted from 0.
        kernel: name of the kernel that a profiler saw, empty where none did. It is a label, known
            after the run alone: predictors may learn to foretell it, never read it.
        devices: figures of devices the zoo does not have, by the name in ``device``.
    """

    op: Texts
    kind: Texts
    dtype: Texts
    library: Texts
    device: Texts
    dims: Mapping[str, NDArray[np.float64]]
    latency_s: NDArray[np.float64]
    source_row: NDArray[np.int64]
    kernel: Texts
    devices: Mapping[str, Device] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows, N."""
        return len(self.op)

    def device_of(self, name: str) -> Device | None:
        """The figures of a device, or ``None`` for one that neither table nor zoo knows."""
        if name in self.devices:
            return self.devices[name]
        return device_zoo.device(name) if device_zoo.is_known(name) else None

    def chip_of(self, name: str) -> str:
        """The silicon behind a device name; an unknown device is a chip of its own."""
        device = self.device_of(name)
        return name if device is None else device.chip

    @property
    def chips(self) -> Texts:
        """The chip of every row (N,)."""
        chip = {name: self.chip_of(name) for name in set(self.device)}
        return texts(chip[name] for name in self.device)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> OperatorTable:
        """The chosen rows, by mask or by index."""
        return OperatorTable(
            op=self.op[rows],
            kind=self.kind[rows],
            dtype=self.dtype[rows],
            library=self.library[rows],
            device=self.device[rows],
            dims={name: column[rows] for name, column in self.dims.items()},
            latency_s=self.latency_s[rows],
            source_row=self.source_row[rows],
            kernel=self.kernel[rows],
            devices=self.devices,
        )

    @staticmethod
    def concat(tables: Iterable[OperatorTable]) -> OperatorTable:
        """All rows of several tables, in order.

        Raises:
            SpecError: no table at all.
        """
        parts = list(tables)
        if not parts:
            raise SpecError("operator tables", got="none", expected="at least one")
        devices: dict[str, Device] = {}
        for part in parts:
            devices.update(part.devices)
        return OperatorTable(
            op=np.concatenate([part.op for part in parts]),
            kind=np.concatenate([part.kind for part in parts]),
            dtype=np.concatenate([part.dtype for part in parts]),
            library=np.concatenate([part.library for part in parts]),
            device=np.concatenate([part.device for part in parts]),
            dims={name: np.concatenate([part.dims[name] for part in parts]) for name in DIMS},
            latency_s=np.concatenate([part.latency_s for part in parts]),
            source_row=np.concatenate([part.source_row for part in parts]),
            kernel=np.concatenate([part.kernel for part in parts]),
            devices=devices,
        )


def texts(values: Iterable[str]) -> Texts:
    """A column of texts."""
    items = list(values)
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def operator_table(
    *,
    op: Texts,
    kind: Texts,
    dtype: Texts,
    library: Texts,
    device: Texts,
    dims: Mapping[str, NDArray[np.float64]],
    latency_s: NDArray[np.float64],
    source_row: NDArray[np.int64] | None = None,
    kernel: Texts | None = None,
    devices: Mapping[str, Device] | None = None,
) -> OperatorTable:
    """Build a table; dimensions that are not given are 0.

    Raises:
        SpecError: columns of unlike length.
    """
    count = len(op)
    full = {name: np.asarray(dims.get(name, np.zeros(count)), dtype=np.float64) for name in DIMS}
    rows = np.arange(count, dtype=np.int64) if source_row is None else source_row
    names = texts([""] * count) if kernel is None else kernel
    columns = {
        "kind": kind, "dtype": dtype, "library": library, "device": device, "kernel": names,
    }  # fmt: skip
    for name, column in {**columns, **full, "latency_s": latency_s}.items():
        if len(column) != count:
            raise SpecError(f"operator table.{name}", got=len(column), expected=f"{count} rows")
    return OperatorTable(
        op=op, kind=kind, dtype=dtype, library=library, device=device, dims=full,
        latency_s=np.asarray(latency_s, dtype=np.float64), source_row=rows,
        kernel=names, devices=dict(devices or {}),
    )  # fmt: skip


def write_operators(table: OperatorTable, path: str | os.PathLike[str]) -> None:
    """Write a table as Parquet, the format ``foreplan`` of `importers.read_operators`.

    Raises:
        SpecError: the path cannot be written.
    """
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

    from foreplan.datasets.storage import write_atomically

    columns = {
        "op": table.op, "kind": table.kind, "dtype": table.dtype, "library": table.library,
        "device": table.device,
    }  # fmt: skip
    if np.any(table.kernel != ""):
        columns["kernel"] = table.kernel
    arrays = {name: pa.array(list(column), pa.string()) for name, column in columns.items()}
    arrays |= {
        name: pa.array(column, pa.float64())
        for name, column in table.dims.items()
        if np.any(column != 0)
    }
    arrays["latency_s"] = pa.array(table.latency_s, pa.float64())
    arrays["source_row"] = pa.array(table.source_row, pa.int64())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), sink, compression="zstd")
    write_atomically(path, sink.getvalue().to_pybytes())
