"""Matrix products of 8-bit operands, found through the registry of `quantise`.

Sums of int8 products are exact in int32 for up to 2^31 / 127^2 = 133,144 terms; longer ones are
cut.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels._kernels_cpu import int8_limit, multiply_int8
from foreplan.datasets.kernels._quantise_cpu import rescale
from foreplan.datasets.kernels.quantise import Quantised

#: Terms of one sum: 2^17 products of 127 x 127 stay below 2^31.
_LONGEST = 1 << 17


def int8_on_cpu(left: Quantised, right: Quantised, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Int8 product of oneDNN, rescaled in one visit."""
    direct = int8_limit() == 127
    terms = left.values.shape[1]
    total: Tensor | None = None
    for start in range(0, terms, _LONGEST):
        end = min(start + _LONGEST, terms)
        rows, columns = left.values[:, start:end], right.values[start:end]
        part = rescale(
            multiply_int8(rows, columns.t(), direct=direct), left.scale, right.scale,
            bias if total is None else None,
        )  # fmt: skip
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("a product over no terms")
    return total.to(out)


def int8_on_cuda(
    left: Quantised, right: Quantised, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """Int8 product of cuBLASLt: more than 16 rows, else multiples of 8; zeros fill up."""
    (rows, terms), columns = left.values.shape, right.values.shape[1]
    a = F.pad(left.values, (0, -terms % 8, 0, max(17 - rows, 0)))
    b = F.pad(right.values, (0, -columns % 8, 0, -terms % 8))
    total = torch._int_mm(a.contiguous(), b.t().contiguous().t())[:rows, :columns]
    result = total.float().mul_(left.scale).mul_(right.scale)
    return (result if bias is None else result.add_(bias)).to(out)


def fp8_on_cuda(left: Quantised, right: Quantised, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """``torch._scaled_mm``: left row by row, right column by column, multiples of 16."""
    (rows, terms), columns = left.values.shape, right.values.shape[1]
    a = F.pad(left.values.view(torch.uint8), (0, -terms % 16)).contiguous()
    b = F.pad(right.values.view(torch.uint8).t(), (0, -terms % 16, 0, -columns % 16)).contiguous()
    by_row, by_column = left.scale, right.scale
    if by_row.numel() > 1 or by_column.numel() > 1:  # both by rows, or both of the tensor
        by_row = by_row.expand(rows, 1).contiguous()
        by_column = F.pad(by_column.expand(1, columns), (0, -columns % 16)).contiguous()
    # Scales of rows come with bf16 results only.
    result = torch._scaled_mm(
        a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t(), scale_a=by_row,
        scale_b=by_column, out_dtype=torch.bfloat16, use_fast_accum=False,
    )[:, :columns]  # fmt: skip
    return (result if bias is None else result + bias).to(out)
