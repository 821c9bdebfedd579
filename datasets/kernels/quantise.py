"""`Quantised`: a matrix in 8 bits with its scales, and the registry of functions that make one.

Scales are symmetric, largest magnitude over limit: 127 for int8, for a left operand less where a
processor's sums would saturate (`limit_of`); 448 for fp8 (e4m3, OCP 8-bit floating point 1.0, table
2). The error of rounding to nearest is at most scale / 2 for int8, 2^-4 of the value for fp8.
Stochastic rounding (a seed is given; int8 only) makes the error's expectation 0 at twice the
variance.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from foreplan.datasets.kernels._kernels_cpu import int8_limit
from foreplan.errors import SpecError

Along = Literal["row", "column", "tensor"]

FP8_LIMIT, INT8_LIMIT = 448, 127
_QUANTISERS: Mapping[Along, str] = MappingProxyType(
    {"row": "quantise_rows", "column": "quantise_columns", "tensor": "quantise_tensor"}
)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "int8": torch.int8,
        "fp8": torch.float8_e4m3fn,
    }
)
EIGHT_BITS = ("int8", "fp8")

#: What implements an operation, by (operation, dtype, kind of device): ``module:function``.
_REGISTRY: Mapping[tuple[str, str, str], str] = MappingProxyType(
    {
        ("quantise_rows", "int8", "cpu"): "_quantise_cpu:quantise_rows",
        ("quantise_columns", "int8", "cpu"): "_quantise_cpu:quantise_columns",
        ("quantise_tensor", "int8", "cpu"): "_quantise_cpu:quantise_tensor",
        ("quantise_rows", "int8", "cuda"): "_quantise_cuda:quantise_rows",
        ("quantise_columns", "int8", "cuda"): "_quantise_cuda:quantise_columns",
        ("quantise_tensor", "int8", "cuda"): "_quantise_cuda:quantise_tensor",
        ("quantise_rows", "fp8", "cuda"): "_quantise_cuda:quantise_rows",
        ("quantise_columns", "fp8", "cuda"): "_quantise_cuda:quantise_columns",
        ("quantise_tensor", "fp8", "cuda"): "_quantise_cuda:quantise_tensor",
        ("product", "int8", "cpu"): "_eight_bit_products:int8_on_cpu",
        ("product", "int8", "cuda"): "_eight_bit_products:int8_on_cuda",
        ("product", "fp8", "cuda"): "_eight_bit_products:fp8_on_cuda",
    }
)


@dataclass(frozen=True, slots=True)
class Quantised:
    """``scale * values`` stands for a matrix ``[M, K]``.

    Attributes:
        values: int8 or fp8 ``[M, K]``; may be stored column by column.
        scale: fp32 ``[M, 1]``, ``[1, K]`` or ``[1, 1]``.
    """

    values: Tensor
    scale: Tensor

    def transposed(self) -> Quantised:
        """The transposed matrix; a view."""
        return Quantised(self.values.t(), self.scale.t())

    def dequantised(self) -> Tensor:
        """The matrix it stands for, fp32."""
        return self.values.float() * self.scale


def implementation(operation: str, dtype: str, kind: str) -> Callable[..., Any]:
    """Look up what implements an operation.

    Raises:
        SpecError: nothing does on this kind of device.
    """
    where = _REGISTRY.get((operation, dtype, kind))
    if where is None:
        kinds = sorted(k for op, d, k in _REGISTRY if (op, d) == (operation, dtype))
        raise SpecError(
            f"{operation} in {dtype}", got=kind, expected=f"one of {', '.join(kinds) or 'none'}"
        )
    module, _, name = where.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


def limit_of(dtype: str, kind: str) -> int:
    """Largest magnitude of a left operand in ``dtype`` whose sums are exact there."""
    if dtype == "fp8":
        return FP8_LIMIT
    return int8_limit() if kind == "cpu" else INT8_LIMIT


def quantise(
    x: Tensor,
    dtype: str,
    along: Along = "row",
    *,
    factor: Tensor | None = None,
    limit: int | None = None,
    seed: int | None = None,
) -> Quantised:
    """Quantise a matrix.

    Args:
        x: ``[M, K]`` of any float dtype.
        dtype: ``int8`` or ``fp8``.
        along: one scale a row, a column, or one in all.
        factor: fp32 that multiplies first: ``[1, K]`` with ``row``, ``[M, 1]`` with ``column``,
            either with ``tensor``.
        limit: largest magnitude of the values; `limit_of` if ``None``.
        seed: round stochastically, with this seed; to nearest if ``None``.

    Raises:
        SpecError: no such quantiser on the tensor's kind of device.
    """
    kind = x.device.type
    run = implementation(_QUANTISERS[along], dtype, kind)
    limit = limit_of(dtype, kind) if limit is None else limit
    return Quantised(*run(x, factor, limit, DTYPES[dtype], seed))


def product(left: Quantised, right: Quantised, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """``left[M, K] @ right[K, N] + bias[N]`` of 8-bit operands of one dtype.

    Args:
        left: scales ``[M, 1]`` or ``[1, 1]``; int8 within `limit_of`.
        right: scales ``[1, N]`` or ``[1, 1]``.
        bias: any float dtype, or ``None``.
        out: dtype of the result.

    Raises:
        SpecError: no product of this dtype on this kind of device.
    """
    dtype = "int8" if left.values.dtype is torch.int8 else "fp8"
    run = implementation("product", dtype, left.values.device.type)
    result: Tensor = run(left, right, bias, out)
    return result
