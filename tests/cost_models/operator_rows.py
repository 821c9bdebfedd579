"""Rows of an operator table whose law is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork, operator_work
from foreplan.cost_models.operators.power_limit import paid_flops
from foreplan.datasets import device_zoo
from foreplan.datasets.sweeps.operator_table import (
    OperatorTable,
    operator_table,
    texts,
)

#: Figures of a device by name, (1,) each.
Offer = dict[str, NDArray[np.float64]]


def attention(
    b: int, keys: int, heads: int, kv_heads: int, *, device: str = "a100_sxm",
    cache: str = "bfloat16", queries: int = 1, window: int = 0, head_dim: int = 128,
    products: str = "bfloat16",
) -> tuple[OperatorTable, OperatorWork, Offer]:  # fmt: skip
    """One row of TensorRT-LLM's attention, what it has to do and what its device offers."""
    size = {
        "b": b, "queries": queries, "keys": keys, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "window": window,
    }  # fmt: skip
    kind = "generation_attention" if queries == 1 else "context_attention"
    table = operator_table(
        op=texts([kind]), kind=texts([kind]), dtype=texts([f"{products}/{cache}"]),
        library=texts(["trtllm"]), device=texts([device]),
        dims={name: np.array([float(value)]) for name, value in size.items()},
        latency_s=np.array([np.nan]),
    )  # fmt: skip
    found, nan = device_zoo.device(device), float("nan")
    offer = {
        "l2": float(found.l2_bytes or nan), "clock": float(found.clock_hz or nan),
        "capability": float(found.compute_capability or nan), "paid": paid_flops(found),
        "fp32": float(found.peak("fp32") or nan),
    }  # fmt: skip
    return table, operator_work(table), {name: np.array([v]) for name, v in offer.items()}


def synthetic(
    devices: tuple[str, ...] = ("t4", "l4", "a100_sxm_80gb"), rows: int = 200
) -> OperatorTable:
    """Products that take twice their roofline and 5 us."""
    rng = np.random.default_rng(0)
    count = rows * len(devices)
    dims = {name: np.round(2 ** rng.uniform(4, 12, count)) for name in ("m", "n", "k")}
    table = operator_table(
        op=texts(["gemm/bfloat16"] * count),
        kind=texts(["linear"] * count),
        dtype=texts(["bfloat16"] * count),
        library=texts(["trtllm"] * count),
        device=texts(np.repeat(devices, rows)),
        dims={"b": np.ones(count), **dims},
        latency_s=np.ones(count),
    )
    latency = 5e-6 + 2 * operator_work(table).roofline_s
    return operator_table(
        op=table.op, kind=table.kind, dtype=table.dtype, library=table.library,
        device=table.device, dims=table.dims, latency_s=latency,
    )  # fmt: skip
