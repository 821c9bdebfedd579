"""8-bit quantisation on CPU: largest magnitude, scale and cast in one visit of the data.

Eager torch visits the data once for each of five operators (30 times slower at 1536 x 3072, of
which most is ``torch.linalg.vector_norm``). The loops are written so that LLVM vectorises them:
magnitudes are compared as integers, whose order is that of non-negative floats and in which NaN is
the largest value, so that a NaN ends up in the scale and shows in the result.

numba compiles for the host's processor, whatever instruction set torch was confined to.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreplan._compiled import compiled
from foreplan.datasets.kernels._row_threads import in_parts

#: Numbers of a tensor with one scale that a thread takes at a time; they fit into a core's cache.
_BLOCK = 1 << 14


def quantise_rows(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Scale each row of ``factor[1, K] * x[M, K]`` to +-limit.

    Returns:
        int8 ``[M, K]`` and fp32 scales ``[M, 1]``.
    """
    plain = _plain(x)
    by = _factors(factor, plain.shape[1])
    values = torch.empty(plain.shape, dtype=dtype)
    scale = torch.empty(len(plain), 1, dtype=torch.float32)
    arrays = plain.numpy(), by, np.float32(limit), _seed(seed), values.numpy(), scale.numpy()[:, 0]
    in_parts(functools.partial(_rows, *arrays), len(plain), plain.numel())
    return values, scale


def quantise_columns(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Scale each column of ``factor[M, 1] * x[M, K]`` to +-limit.

    Returns:
        int8 ``[M, K]`` and fp32 scales ``[1, K]``.
    """
    plain = _plain(x)
    rows, columns = plain.shape
    by = _factors(factor, rows)
    values = torch.empty(plain.shape, dtype=dtype)
    scale = torch.empty(1, columns, dtype=torch.float32)
    arrays = plain.numpy(), by, np.float32(limit), _seed(seed), values.numpy(), scale.numpy()[0]
    in_parts(functools.partial(_columns, *arrays), columns, plain.numel())
    return values, scale


def quantise_tensor(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Scale all of ``factor * x[M, K]`` to +-limit; the factor is ``[M, 1]`` or ``[1, K]``.

    Returns:
        int8 ``[M, K]`` and its fp32 scale ``[1, 1]``.
    """
    plain = _plain(x if factor is None else x * factor)
    values = torch.empty(plain.shape, dtype=dtype)
    flat, blocks = plain.view(-1).numpy(), -(-plain.numel() // _BLOCK)
    largest = np.zeros(max(1, blocks), np.int32)
    in_parts(functools.partial(_largest, flat.view(np.int32), largest), blocks, len(flat))
    scale = largest.max(keepdims=True).view(np.float32) / np.float32(limit)
    arrays = flat, np.float32(limit), _seed(seed), values.view(-1).numpy(), scale[0]
    in_parts(functools.partial(_blocks, *arrays), blocks, len(flat))
    return values, torch.from_numpy(scale).view(1, 1)


def rescale(products: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """``left * products * right + bias`` in one visit.

    Args:
        products: int32 ``[M, N]``.
        left: fp32 ``[M, 1]`` or ``[1, 1]``.
        right: fp32 ``[1, N]`` or ``[1, 1]``.
        bias: fp32 ``[N]`` or ``None``.

    Returns:
        fp32 ``[M, N]``.
    """
    rows, columns = products.shape
    out = torch.empty(rows, columns, dtype=torch.float32)
    by_row = left.expand(rows, 1).contiguous().view(-1).numpy()
    by_column = right.expand(1, columns).contiguous().view(-1).numpy()
    added = torch.zeros(columns) if bias is None else bias.detach().float().contiguous()
    arrays = products.contiguous().numpy(), by_row, by_column, added.numpy(), out.numpy()
    in_parts(functools.partial(_rescale, *arrays), rows, products.numel())
    return out


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _factors(factor: Tensor | None, count: int) -> npt.NDArray[np.float32]:
    if factor is None:
        return np.ones(count, np.float32)
    found: npt.NDArray[np.float32] = factor.contiguous().view(-1).numpy()
    return found.repeat(count) if len(found) == 1 else found


def _seed(seed: int | None) -> np.int32:
    """A non-negative 31-bit number for stochastic rounding, -1 for rounding to nearest."""
    return np.int32(-1 if seed is None else seed & 0x7FFFFFFF)


@compiled
def _round(value: Any, low: Any, high: Any, seed: Any, index: Any) -> Any:
    """To nearest (ties to even), or up with the probability of what lies above the lower step."""
    if seed < 0:
        return np.int8(np.rint(value))
    # Integer hash of (index, seed) with the constants of Wellons' "lowbias32".
    # numba widens products of 32-bit integers, hence the casts.
    h = np.uint32(np.uint32(index) ^ np.uint32(np.uint32(seed) * np.uint32(0x9E3779B9)))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    share = np.float32(np.int32(h >> np.uint32(8))) * np.float32(1.0 / (1 << 24))
    # The scale is rounded, so the largest value may lie an ulp beyond the limit.
    return np.int8(min(max(np.floor(value + share), low), high))


@compiled
def _rows(
    x: Any, factor: Any, limit: Any, seed: Any, values: Any, scale: Any, begin: Any, end: Any
) -> None:
    columns = x.shape[1]
    row = np.empty(columns, np.float32)
    bits = row.view(np.int32)
    for i in range(begin, end):
        out = values[i]
        for j in range(columns):
            row[j] = x[i, j] * factor[j]
        largest = np.int32(0)
        for j in range(columns):
            magnitude = bits[j] & np.int32(0x7FFFFFFF)
            largest = magnitude if magnitude > largest else largest
        scale.view(np.int32)[i] = largest
        step = scale[i] / limit
        scale[i] = step
        inverse = np.float32(1.0) / step if step > 0 else np.float32(0.0)
        for j in range(columns):
            out[j] = _round(row[j] * inverse, -limit, limit, seed, np.uint32(i * columns + j))


@compiled
def _largest(bits: Any, largest: Any, begin: Any, end: Any) -> None:
    for block in range(begin, end):
        part = bits[block * _BLOCK : (block + 1) * _BLOCK]
        most = np.int32(0)
        for j in range(len(part)):
            magnitude = part[j] & np.int32(0x7FFFFFFF)
            most = magnitude if magnitude > most else most
        largest[block] = most


@compiled
def _blocks(x: Any, limit: Any, seed: Any, values: Any, step: Any, begin: Any, end: Any) -> None:
    inverse = np.float32(1.0) / step if step > 0 else np.float32(0.0)
    for block in range(begin, end):
        first = block * _BLOCK
        part, out = x[first : first + _BLOCK], values[first : first + _BLOCK]
        for j in range(len(part)):
            out[j] = _round(part[j] * inverse, -limit, limit, seed, np.uint32(first + j))


@compiled
def _columns(
    x: Any, factor: Any, limit: Any, seed: Any, values: Any, scale: Any, begin: Any, end: Any
) -> None:
    rows, columns = x.shape
    width = end - begin
    row = np.empty(width, np.float32)
    bits = row.view(np.int32)
    largest = np.zeros(width, np.int32)
    for i in range(rows):
        part = x[i, begin:end]
        for j in range(width):
            row[j] = part[j] * factor[i]
        for j in range(width):
            magnitude = bits[j] & np.int32(0x7FFFFFFF)
            largest[j] = magnitude if magnitude > largest[j] else largest[j]
    inverse = np.empty(width, np.float32)
    for j in range(width):
        step = largest.view(np.float32)[j] / limit
        scale[begin + j] = step
        inverse[j] = np.float32(1.0) / step if step > 0 else np.float32(0.0)
    for i in range(rows):
        part, out = x[i, begin:end], values[i, begin:end]
        index = i * columns + begin
        for j in range(width):
            value = part[j] * factor[i] * inverse[j]
            out[j] = _round(value, -limit, limit, seed, np.uint32(index + j))


@compiled
def _rescale(
    products: Any, left: Any, right: Any, bias: Any, out: Any, begin: Any, end: Any
) -> None:
    columns = products.shape[1]
    for i in range(begin, end):
        for j in range(columns):
            out[i, j] = np.float32(products[i, j]) * left[i] * right[j] + bias[j]
