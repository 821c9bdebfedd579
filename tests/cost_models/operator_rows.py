"""Rows of an operator table whose law is known."""

from __future__ import annotations

import numpy as np

from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.datasets.sweeps.operator_table import (
    OperatorTable,
    operator_table,
    texts,
)


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
