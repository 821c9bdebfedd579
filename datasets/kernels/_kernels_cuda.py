"""Linear kernels on CUDA. Imports torch; needs no GPU to be imported.

Stock weight-only kernels are slower than bf16 on an H200 at every size (``_weight_int4pack_mm``
37 ms against 1.5 ms at 8192^3). Ours (`_fragment_linear`) takes 0.4-0.5 of its time for int4 at up
to 16 rows; where shapes do not fit it, and for int3, weights are dequantised and multiplied in
bf16, which saves memory and no time. fp8 is the fast 8-bit format at many rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels import _fp8_linear, _fragment_linear
from foreplan.datasets.kernels._kernel_layouts import unpack_nibbles, unpack_words
from foreplan.datasets.kernels.registry import Packed
from foreplan.datasets.program import Variant

Run = Callable[[Tensor, Packed, Tensor | None], Tensor]


def _linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, packed.tensors["weight"], bias)


def _fp32_linear(x: Tensor, packed: Packed, bias: Tensor | None, *, precision: str) -> Tensor:
    # The switch belongs to the process; it is put back because other kernels read it too.
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        wide = None if bias is None else bias.float()
        return F.linear(x.float(), packed.tensors["weight"], wide).to(x.dtype)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _int8_dequant(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    out = F.linear(x, packed.tensors["weight"].to(x.dtype)).mul_(packed.tensors["scale"])
    return out if bias is None else out.add_(bias)


def _dequant(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    unpack: Callable[[Packed, torch.dtype], Tensor],
) -> Tensor:
    return F.linear(x, unpack(packed, x.dtype), bias)


_ROWS: dict[str, Run] = {
    "bf16/bf16/torch.linear": _linear,
    "fp32/fp32/torch.linear": functools.partial(_fp32_linear, precision="ieee"),
    "fp32/tf32/torch.linear": functools.partial(_fp32_linear, precision="tf32"),
    "fp8/fp8/torch.scaled_mm": _fp8_linear.run,
    "int8/bf16/foreplan.fragment_linear": _fragment_linear.run,
    "int4/bf16/foreplan.fragment_linear": _fragment_linear.run,
    "int8/bf16/torch.dequant_linear": _int8_dequant,
    "int4/bf16/torch.dequant_linear": functools.partial(_dequant, unpack=unpack_nibbles),
    "int3/bf16/torch.dequant_linear": functools.partial(_dequant, unpack=unpack_words),
}

#: Kernel functions by variant.
RUN: dict[Variant, Run] = {Variant.parse(text): run for text, run in _ROWS.items()}
