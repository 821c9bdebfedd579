# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `_quantise_cuda`: largest magnitude, scale, rounding and cast in one pass.

Imports triton, so that only `_quantise_cuda` imports it, on machines that have it. A NaN counts as
infinitely large: it ends up in the scale and shows in the result. Triton reads the annotations of
its functions, so that they have none but its own.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_TILE = 64


@triton.jit
def _magnitude(x):
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _rounded(v, limit, seed, index, noisy: tl.constexpr, whole: tl.constexpr):
    """To integers if ``whole``: to nearest, or up with the probability of what lies above."""
    if whole:
        v = tl.floor(v + (tl.rand(seed, index) if noisy else 0.5))
        v = tl.minimum(tl.maximum(v, -limit), limit)
    return v


@triton.jit
def _rows_kernel(
    x, factor, values, scales, columns, stride, limit, seed,
    has_factor: tl.constexpr, noisy: tl.constexpr, whole: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([block], tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        v = tl.load(x + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if has_factor:
            v *= tl.load(factor + at, mask=at < columns, other=0.0)
        largest = tl.maximum(largest, _magnitude(v))
    scale = tl.max(largest, 0) / limit
    tl.store(scales + row, scale)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        v = tl.load(x + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if has_factor:
            v *= tl.load(factor + at, mask=at < columns, other=0.0)
        v = _rounded(v * inverse, limit, seed, row * columns + at, noisy, whole)
        tl.store(values + row * columns + at, v.to(values.dtype.element_ty), mask=at < columns)


@triton.jit
def _largest_kernel(
    x, factor, largest, rows, columns, stride,
    has_factor: tl.constexpr, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    found = tl.zeros([tile], tl.float32)
    for k in range(tiles):
        row = (tl.program_id(1) * tiles + k) * tile + tl.arange(0, tile).to(tl.int64)
        mask = (row < rows)[:, None] & (at < columns)[None, :]
        v = tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        if has_factor:
            v *= tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
        found = tl.maximum(found, tl.max(_magnitude(v), 0))
    # Non-negative floats are ordered as their bits are.
    tl.atomic_max(largest + at, found.to(tl.int32, bitcast=True), mask=at < columns)


@triton.jit
def _cast_kernel(
    x, factor, largest, values, rows, columns, stride,
    limit, seed, per_column: tl.constexpr, has_factor: tl.constexpr, noisy: tl.constexpr,
    whole: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile + tl.arange(0, tile).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = (row < rows)[:, None] & (at < columns)[None, :]
    v = tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_factor:
        v *= tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
    if per_column:
        scale = tl.load(largest + at, mask=at < columns, other=0.0) / limit
        inverse = tl.where(scale > 0, 1.0 / scale, 0.0)[None, :]
        index = at[None, :] * rows + row[:, None]
    else:
        scale = tl.load(largest) / limit
        inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
        index = row[:, None] * columns + at[None, :]
    v = _rounded(v * inverse, limit, seed, index, noisy, whole)
    tl.store(values + index, v.to(values.dtype.element_ty), mask=mask)


def rows(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """As `foreplan.datasets.kernels._quantise_cuda.quantise_rows`."""
    x = _by_rows(x)
    count, columns = x.shape
    values = torch.empty(count, columns, dtype=dtype, device=x.device)
    scale = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    by = None if factor is None else factor.expand(1, columns).contiguous()
    _rows_kernel[(count,)](
        x, by if by is not None else x, values, scale, columns, x.stride(0), float(limit),
        seed or 0, has_factor=by is not None, noisy=seed is not None, whole=dtype is torch.int8,
        block=min(4096, triton.next_power_of_2(columns)),
    )  # fmt: skip
    return values, scale


def columns(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """As `foreplan.datasets.kernels._quantise_cuda.quantise_columns`."""
    x = _by_rows(x)
    count, width = x.shape
    largest = torch.zeros(1, width, dtype=torch.float32, device=x.device)
    values = torch.empty(width, count, dtype=dtype, device=x.device)
    by = None if factor is None else factor.expand(count, 1).contiguous()
    tiles = 4
    _largest_kernel[(triton.cdiv(width, _TILE), triton.cdiv(count, _TILE * tiles))](
        x, by if by is not None else x, largest.view(torch.int32), count, width, x.stride(0),
        has_factor=by is not None, tile=_TILE, tiles=tiles,
    )  # fmt: skip
    _cast(x, by, largest, values, limit, seed, per_column=True)
    return values.t(), largest / limit


def scaled(
    x: Tensor, largest: Tensor, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """``x[M, K]`` with one scale, for a known largest magnitude ``[1, 1]``."""
    x = _by_rows(x)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    _cast(x, None, largest, values, limit, seed, per_column=False)
    return values, largest / limit


def _cast(
    x: Tensor, factor: Tensor | None, largest: Tensor, values: Tensor, limit: int, seed: int | None,
    *, per_column: bool,
) -> None:  # fmt: skip
    count, width = x.shape
    _cast_kernel[(triton.cdiv(count, _TILE), triton.cdiv(width, _TILE))](
        x, factor if factor is not None else x, largest, values, count, width, x.stride(0),
        float(limit), seed or 0, per_column=per_column, has_factor=factor is not None,
        noisy=seed is not None, whole=values.dtype is torch.int8, tile=_TILE,
    )  # fmt: skip


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
