"""Format ``aiconfigurator``: GEMM, attention, NCCL (ai-dynamo/aiconfigurator, Apache-2.0).

Upstream (``systems/data/SYSTEM/OP/BACKEND/VERSION/*_perf.{parquet,txt}``): ``framework, version,
device, op_name, kernel_source`` then ``gemm_dtype, m, n, k`` | ``batch_size, isl, num_heads,
num_key_value_heads, head_dim, window_size, attn_dtype, kv_cache_dtype, step`` | ``nccl_dtype,
num_gpus, message_size``, and ``latency`` in ms. Derived files say ``system`` and ``latency_ms``.
Its other tables (MoE, MLA, Mamba, ...) are read as operators that nobody here knows.
``int8_wo``/``int4_wo`` store weights in 8 or 4 bits and compute in bf16; ``sq`` is SmoothQuant
(8-bit weights and activations). In generation, one query sees ``isl + step`` positions of cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.importers._columns import Columns
from foreplan.datasets.sweeps.operator_table import (
    UNKNOWN,
    OperatorTable,
    Texts,
    operator_table,
    texts,
)
from foreplan.errors import SpecError

#: Collective to the number that stands for its traffic pattern in ``dims["pattern"]``.
PATTERNS = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 3, "alltoall": 4}


def convert(columns: Columns) -> OperatorTable:
    """Turn aiconfigurator's columns into a table.

    Raises:
        SpecError: none of its tables, a missing column, a row without a device, a size or latency
            that is not positive.
    """
    named = columns.has("op_name")
    if columns.has("m", "n", "k"):
        return _gemm(columns)
    # Latent attention (MLA) has the sizes, too, and another column of data types.
    if columns.has("batch_size", "isl", "num_heads") and (columns.has("attn_dtype") or not named):
        return _attention(columns)
    if columns.has("message_size", "num_gpus"):
        return _collective(columns)
    if named and columns.find("latency_ms", "latency"):
        return _unknown(columns)
    raise SpecError(
        columns.where,
        got="a table without m,n,k, without batch_size,isl,num_heads and without message_size",
        expected="aiconfigurator's gemm, attention or nccl table, or another's op_name and latency",
    )


def _device(columns: Columns) -> Texts:
    return columns.devices("system", "device")


def _library(columns: Columns) -> Texts:
    """The framework; versions of one framework share kernels far more often than not."""
    return texts(name.lower() for name in columns.texts("framework", "backend", default="trtllm"))


def _gemm(columns: Columns) -> OperatorTable:
    dtype = columns.texts("gemm_dtype", "dtype")
    return operator_table(
        op=texts(f"gemm/{name}" for name in dtype),
        kind=texts(["linear"] * len(dtype)),
        dtype=dtype,
        library=_library(columns),
        device=_device(columns),
        dims={
            "b": np.ones(len(dtype)),
            **{name: columns.sizes(name) for name in ("m", "n", "k")},
        },
        latency_s=columns.milliseconds("latency_ms", "latency"),
    )


def _attention(columns: Columns) -> OperatorTable:
    dtype, cache = columns.texts("attn_dtype"), columns.texts("kv_cache_dtype", default="bfloat16")
    step = columns.sizes("step", least=0, default=0.0)
    op = columns.texts("op_name", default="")
    if columns.has("phase"):
        phase = texts(f"{name}_attention" for name in columns.texts("phase"))
        op = texts(name or other for name, other in zip(op, phase, strict=True))
    isl = columns.sizes("isl")
    known = np.isin(op, ("context_attention", "generation_attention"))
    generation = op == "generation_attention"
    heads = columns.sizes("num_heads")
    kv = columns.sizes("num_key_value_heads", least=0, default=0.0)
    return operator_table(
        op=op,
        kind=texts(name if ok else UNKNOWN for name, ok in zip(op, known, strict=True)),
        dtype=texts(f"{a}/{c}" for a, c in zip(dtype, cache, strict=True)),
        library=_library(columns),
        device=_device(columns),
        dims={
            "b": columns.sizes("batch_size"),
            "queries": np.where(generation, 1.0, isl),
            "keys": isl + step,
            "heads": heads,
            # 0 means "as many as heads" in some versions of the table.
            "kv_heads": np.where(kv < 1, heads, kv),
            "head_dim": columns.sizes("head_dim", default=128.0),
            "window": columns.sizes("window_size", least=0, default=0.0),
        },
        latency_s=columns.milliseconds("latency_ms", "latency"),
    )


def _collective(columns: Columns) -> OperatorTable:
    op = columns.texts("op_name")
    pattern: NDArray[np.float64] = np.array([PATTERNS.get(name, 0) for name in op], dtype=float)
    element = {"half": 2.0, "int8": 1.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0}
    dtype = columns.texts("nccl_dtype", "dtype", default="half")
    width = np.array([element.get(name, 2.0) for name in dtype])
    return operator_table(
        op=op,
        kind=texts("collective" if code else UNKNOWN for code in pattern),
        dtype=dtype,
        library=texts(["nccl"] * len(op)),
        device=_device(columns),
        dims={
            # The table counts elements; their width makes them bytes.
            "message_bytes": columns.sizes("message_size") * width,
            "ranks": columns.sizes("num_gpus"),
            "pattern": pattern,
        },
        latency_s=columns.milliseconds("latency_ms", "latency"),
    )


def _unknown(columns: Columns) -> OperatorTable:
    """A table of operators without a price here: kept, so that they are counted."""
    op = columns.texts("op_name")
    return operator_table(
        op=op,
        kind=texts([UNKNOWN] * len(op)),
        dtype=texts([""] * len(op)),
        library=_library(columns),
        device=_device(columns),
        dims={},
        latency_s=columns.milliseconds("latency_ms", "latency"),
    )
