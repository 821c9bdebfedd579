"""`fp8_rows`: rounds rows of activations to fp8 (e4m3) in one launch of ``_fp8_rows.cu``.

In torch's operators it is five launches and four passes over memory, which made a product of fp8
slower than one of bf16 below some 2,000 rows (docs/results/kernels.md). Imports torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._cuda_source import cuda_kernel

#: Values that a thread reads at a time, 16 bytes, and how often, keeping what it has read; twice as
#: often where rows are long: the fastest of 1, 2, 4 and 8 at many rows (docs/results/kernels.md).
_VECTOR, _KEPT = 8, 4


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row of bf16 ``x[rows, K]`` to +-448 and round it; K is a multiple of 8.

    Returns:
        fp8 ``[rows, K]`` and fp32 scales ``[rows, 1]`` of 1e-12 at least; that of a row with a NaN
        is infinite.

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    rows, k = x.shape
    if x.stride(1) != 1 or x.stride(0) % _VECTOR or x.data_ptr() % 16:
        x = x.contiguous()
    values = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        vectors = k // _VECTOR
        kept = _KEPT if vectors <= 1024 else 2 * _KEPT
        threads = min(1024, -(-vectors // (32 * kept)) * 32)
        _compiled(kept)(
            grid=(rows, 1, 1), block=(threads, 1, 1),
            args=[x, values, scale, vectors, x.stride(0) // _VECTOR],
        )  # fmt: skip
    return values, scale


@functools.cache
def _compiled(kept: int) -> Any:
    name = f"fp8_rows_{kept}"
    return cuda_kernel(Path(__file__).with_suffix(".cu"), name, {"KEPT": kept, "NAME": name})
