"""Linear kernels on CPU. Imports torch.

Every function is ``run(x, packed, bias)`` as described in
`foreplan.datasets.kernels.registry.LinearKernel`.

Kernels that dequantise do so block by block of output features, some MiB at a time: the block is
multiplied while it is in the cache, the workspace stays small however large the weight is, and no
call pays for the page faults of a large temporary (12 against 3 ms for 5632 x 2048 in fp32).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels._kernel_layouts import (
    BLOCK_ROWS,
    GROUP,
    rows_of,
    unpack_int4,
    unpack_nibbles,
    unpack_words,
)
from foreplan.datasets.kernels.registry import Packed
from foreplan.datasets.program import Variant
from foreplan.errors import MissingDataError

Run = Callable[[Tensor, Packed, Tensor | None], Tensor]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WORKSPACE_BYTES = 4 << 20  # of a block dequantised to fp32


def _add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out.add_(bias)


def _by_blocks(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    multiply: Callable[[Tensor, Packed], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Fill the output with ``multiply(x in dtype, some rows of the packed weight)``."""
    wide, out = x.to(dtype), x.new_empty(x.shape[0], packed.n)
    step = _WORKSPACE_BYTES // (4 * packed.k) // BLOCK_ROWS * BLOCK_ROWS
    step = max(step, BLOCK_ROWS)
    for start in range(0, packed.n, step):
        end = min(start + step, packed.n)
        part = multiply(wide, rows_of(packed, start, end))
        out[:, start:end] = part if bias is None else part.add_(bias[start:end])
    return out


def _linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, packed.tensors["weight"], bias)


def _fp32_linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return _add_bias(F.linear(x.float(), packed.tensors["weight"]), bias).to(x.dtype)


def _upcast(x: Tensor, part: Packed) -> Tensor:
    return F.linear(x, part.tensors["weight"].to(x.dtype))


def _int8pack_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    weight, scale = packed.tensors["weight"], packed.tensors["scale"]
    return _add_bias(torch._weight_int8pack_mm(x, weight, scale), bias)


def _int8_dequant(x: Tensor, part: Packed) -> Tensor:
    # The scale of a row multiplies the output: rows x N products instead of N x K.
    return F.linear(x, part.tensors["weight"].to(x.dtype)).mul_(part.tensors["scale"])


def multiply_int8(q: Tensor, weight: Tensor, *, direct: bool) -> Tensor:
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
            if not multiply_int8(q, weight, direct=limit == 127).double().equal(expected):
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
    out = multiply_int8(quantised, packed.tensors["weight"], direct=limit == 127).float()
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


def _int4_unpack(x: Tensor, part: Packed) -> Tensor:
    # Dequantised in fp32 even for a bf16 product: bf16 arithmetic on CPU is the slower one.
    weight = unpack_int4(part, torch.float32).to(x.dtype)
    if x.dtype is torch.bfloat16 and not _fast_transposed_bf16():
        return F.linear(x, weight.t().contiguous())
    return x @ weight


def _int4_dequant(x: Tensor, part: Packed) -> Tensor:
    return F.linear(x, unpack_nibbles(part, torch.float32).to(x.dtype))


def _int3_dequant(x: Tensor, part: Packed) -> Tensor:
    return F.linear(x, unpack_words(part, torch.float32).to(x.dtype))


_ROWS: dict[str, Run] = {
    "bf16/bf16/torch.linear": _linear,
    "fp32/fp32/torch.linear": _fp32_linear,
    "int8/bf16/torch.int8pack_mm": _int8pack_mm,
    "int8/int8/torch.int_mm": _int_mm,
    "int4/bf16/torch.int4pack_mm": _int4pack_mm,
}

#: Storage, compute dtype, kernel: what multiplies one block of a weight.
_BLOCKWISE: dict[str, Callable[[Tensor, Packed], Tensor]] = {
    "bf16/fp32/torch.upcast_linear": _upcast,
    "int8/bf16/torch.dequant_linear": _int8_dequant,
    "int8/fp32/torch.dequant_linear": _int8_dequant,
    "int4/bf16/torch.unpack_linear": _int4_unpack,
    "int4/fp32/torch.unpack_linear": _int4_unpack,
    "int4/bf16/torch.dequant_linear": _int4_dequant,
    "int4/fp32/torch.dequant_linear": _int4_dequant,
    "int3/bf16/torch.dequant_linear": _int3_dequant,
    "int3/fp32/torch.dequant_linear": _int3_dequant,
}


def _runs() -> dict[Variant, Run]:
    runs = {Variant.parse(text): run for text, run in _ROWS.items()}
    for text, multiply in _BLOCKWISE.items():
        variant = Variant.parse(text)
        dtype = _DTYPES[variant.compute]
        runs[variant] = functools.partial(_by_blocks, multiply=multiply, dtype=dtype)
    return runs


#: Kernel functions by variant.
RUN: dict[Variant, Run] = _runs()
