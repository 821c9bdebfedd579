"""Linears of fp8 whose inputs are rounded to fp8 at each call, row by row. Imports torch.

Three ways, by rows. Up to 16 the kernel of ``_fragment_linear.cu`` reads the weight at the speed of
memory. Up to some hundred cuBLAS multiplies as if all scales were one, and ``_fp8_scales.cu``
scales the sums: torch's product with scales of rows is slow there with long rows. Beyond, that one.

Measured in ``docs/results/kernels.md``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._cuda_source import cuda_kernel, nothing
from foreplan.datasets.kernels._fp8_rows import fp8_rows
from foreplan.datasets.kernels._fragment_linear import compiled
from foreplan.datasets.kernels.registry import Packed

#: Rows up to which the first way is the fastest of three, and sums (rows times features) up to
#: which the second is, within 9 % at eight shapes (docs/results/kernels.md): scaling costs by sums.
_FRAGMENT_ROWS, _SCALED_SUMS = 16, 3 << 19
#: Bytes of a row that the kernel for few rows takes at a time, and features of a tile.
_GROUP, _TILE = 128, 16
#: Warps that keep an H200 reading; fewer blocks of features get more warps each.
_WARPS = 2048


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Bf16 ``x[rows, K]`` times the transpose of an fp8 weight with one scale a feature.

    Tensor cores add up as they please: up to 0.7 of the time at few rows on an H200, and the error
    stays that of fp8, 0.0265 to 0.0272 (docs/results/kernels.md).

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    rows = x.shape[0]
    if not rows:
        return x.new_empty(0, packed.n)
    values, scale = fp8_rows(x)
    if rows <= _FRAGMENT_ROWS and packed.k % _GROUP == 0 and packed.n % _TILE == 0:
        return _few_rows(values, scale, packed, bias)
    if rows * packed.n <= _SCALED_SUMS:
        return _scaled_afterwards(values, scale, packed, bias)
    return _product(values, scale, packed.tensors["scale"][None, :], packed, bias)


def _few_rows(values: Tensor, scale: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    rows, blocks = values.shape[0], packed.n // _TILE
    warps = next((w for w in (4, 8) if blocks * w >= _WARPS), 16)
    depth = 1 if blocks * warps >= 1.5 * _WARPS else 2
    kernel, _ = compiled(16, 1 if rows <= 8 else 2, 1, warps, depth, fp8=True)
    none = nothing(values.device)
    out = torch.empty(rows, packed.n, dtype=torch.bfloat16, device=values.device)
    kernel(
        grid=(blocks, 1, 1), block=(32 * warps, 1, 1),
        args=[
            values, packed.tensors["weight"], none, none, out, none if bias is None else bias,
            rows, packed.n, packed.k // 2, packed.tensors["scale"], scale,
        ],
    )  # fmt: skip
    return out


def _scaled_afterwards(
    values: Tensor, scale: Tensor, packed: Packed, bias: Tensor | None
) -> Tensor:
    one = _one(values.device)
    out = _product(values, one, one, packed, None)
    parts = packed.n // 8
    _scales()(
        grid=(-(-parts // 256), out.shape[0], 1), block=(256, 1, 1),
        args=[
            out, scale, packed.tensors["scale"], nothing(out.device) if bias is None else bias,
            out.shape[0], parts,
        ],
    )  # fmt: skip
    return out


def _product(
    values: Tensor, scale: Tensor, features: Tensor, packed: Packed, bias: Tensor | None
) -> Tensor:
    return torch._scaled_mm(
        values, packed.tensors["weight"].t(), scale_a=scale, scale_b=features,
        bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


@functools.cache
def _scales() -> Any:
    return cuda_kernel(Path(__file__).with_name("_fp8_scales.cu"), "fp8_scales", {})
