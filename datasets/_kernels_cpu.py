"""Linear kernels on CPU. Imports torch.

Every function is ``run(x, packed, bias)`` as described in `foreplan.datasets.kernels.LinearKernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets._kernel_layouts import GROUP, unpack_int4, unpack_nibbles, unpack_words
from foreplan.datasets.kernels import Packed
from foreplan.datasets.program import Variant
from foreplan.errors import MissingDataError

Run = Callable[[Tensor, Packed, Tensor | None], Tensor]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out.add_(bias)


def _linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, packed.tensors["weight"], bias)


def _fp32_linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Fp32 arithmetic on fp32 weights, or on bf16 weights cast at each call."""
    out = F.linear(x.float(), packed.tensors["weight"].float())
    return _add_bias(out, bias).to(x.dtype)


def _int8pack_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    weight, scale = packed.tensors["weight"], packed.tensors["scale"]
    return _add_bias(torch._weight_int8pack_mm(x, weight, scale), bias)


def _int8_dequant(x: Tensor, packed: Packed, bias: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    # The scale of a row multiplies the output: rows x N products instead of N x K.
    out = F.linear(x.to(dtype), packed.tensors["weight"].to(dtype))
    return _add_bias(out.mul_(packed.tensors["scale"]), bias).to(x.dtype)


def _multiply_int8(q: Tensor, weight: Tensor, *, direct: bool) -> Tensor:
    """``q[rows, K] @ weight[N, K].T`` of int8 tensors, as int32 ``[rows, N]``."""
    if direct:
        return torch._int_mm(q, weight.t())
    rows = q.shape[0]
    if rows == 1:  # a matrix-vector product takes another path, which saturates again
        q = q.repeat(2, 1)
    return torch._int_mm(weight, q.t()).t()[:rows]


@functools.cache
def int8_limit() -> int:
    """Largest magnitude an activation may be quantised to here so that int8 sums are exact.

    Without VNNI, oneDNN adds pairs of products of its left side (shifted to 0..255) and its right
    side in 16 bits, which saturates silently: 18 % error on normal data under AVX2. With the
    weights on the left and activations within 63 every pair fits (2 x 255 x 63 < 2^15). Both
    ways are tried on the worst case.

    Raises:
        MissingDataError: neither way is exact.
    """
    for limit in (127, 63):
        for rows, n, k in ((1, 64, 64), (16, 64, 64), (64, 256, 256)):
            q = torch.full((rows, k), limit, dtype=torch.int8)
            weight = torch.full((n, k), 127, dtype=torch.int8)
            weight[::2] = -127
            expected = q.double() @ weight.double().t()
            if not _multiply_int8(q, weight, direct=limit == 127).double().equal(expected):
                break
        else:
            return limit
    raise MissingDataError("int8 products saturate on this processor", fix="use another kernel")


def _int_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Int8 x int8: the input is quantised row by row at each call."""
    limit = int8_limit()
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).div_(limit).clamp_(min=1e-12)
    quantised = wide.div_(scale).round_().to(torch.int8)
    out = _multiply_int8(quantised, packed.tensors["weight"], direct=limit == 127).float()
    out.mul_(scale).mul_(packed.tensors["scale"])
    return _add_bias(out, bias).to(x.dtype)


def _int4pack_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    weight, both = packed.tensors["weight"], packed.tensors["scale_and_zero"]
    return _add_bias(torch._weight_int4pack_mm_for_cpu(x, weight, GROUP, both), bias)


@functools.cache
def _fast_transposed_bf16() -> bool:
    """Whether a bf16 product with an untransposed right side is fast here.

    Without bf16 instructions it falls to a scalar loop (75 times slower at 256 x 2048 x 2048 on
    AVX2), while the transposed form stays usable.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _int4_unpack(x: Tensor, packed: Packed, bias: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    weight = unpack_int4(packed, dtype)
    if dtype is torch.bfloat16 and not _fast_transposed_bf16():
        out = F.linear(x, weight.t().contiguous())
    else:
        out = x.to(dtype) @ weight
    return _add_bias(out, bias).to(x.dtype)


def _dequant(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    unpack: Callable[[Packed, torch.dtype], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    return _add_bias(F.linear(x.to(dtype), unpack(packed, dtype)), bias).to(x.dtype)


def _rows() -> dict[str, Run]:
    rows: dict[str, Run] = {
        "bf16/bf16/torch.linear": _linear,
        "bf16/fp32/torch.upcast_linear": _fp32_linear,
        "fp32/fp32/torch.linear": _fp32_linear,
        "int8/bf16/torch.int8pack_mm": _int8pack_mm,
        "int8/int8/torch.int_mm": _int_mm,
        "int4/bf16/torch.int4pack_mm": _int4pack_mm,
    }
    for name, dtype in _DTYPES.items():
        rows[f"int8/{name}/torch.dequant_linear"] = functools.partial(_int8_dequant, dtype=dtype)
        rows[f"int4/{name}/torch.unpack_linear"] = functools.partial(_int4_unpack, dtype=dtype)
        rows[f"int4/{name}/torch.dequant_linear"] = functools.partial(
            _dequant, unpack=unpack_nibbles, dtype=dtype
        )
        rows[f"int3/{name}/torch.dequant_linear"] = functools.partial(
            _dequant, unpack=unpack_words, dtype=dtype
        )
    return rows


#: Kernel functions by variant.
RUN: dict[Variant, Run] = {Variant.parse(text): run for text, run in _rows().items()}
