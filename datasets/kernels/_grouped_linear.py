"""Rows of several experts times the weight of each, without waiting for the host. Imports torch.

Few rows an expert are multiplied by the kernel of ``_fragment_linear.cu``, from a bf16 or fp8
weight or from the packed form; it reads the experts that have rows. Many are multiplied by
`torch._grouped_mm`, a packed weight unpacked before, every expert of it, and those of fp8 by
`torch._scaled_grouped_mm`.

Measured in ``docs/results/kernels.md``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._cuda_source import nothing
from foreplan.datasets.kernels._expert_routes import biased
from foreplan.datasets.kernels._fp8_rows import fp8_rows
from foreplan.datasets.kernels._fragment_linear import GROUP, compiled, unpacked
from foreplan.datasets.kernels.registry import FEW_ROWS, Packed

#: Rows an expert, on average, up to which a bf16 weight is multiplied as few rows are: with 32
#: torch's kernel takes 1.0-1.25 times as long, with 48 and 64 0.93 and 0.78 (``measured``,
#: kernels.md).
_FEW_PLAIN_ROWS = 32
#: The same of fp8, whose kernel has no tiles for more.
_FEW_FP8_ROWS = 16
_BITS = {"bf16": 16, "int8.fragments": 8, "int4.fragments": 4}


def run(x: Tensor, packed: Packed, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each row times the transpose of its expert's weight, and its bias.

    Args:
        x: bf16 ``[rows, K]``, those of expert 0 first.
        packed: the weights of all ``E`` experts below one another, ``[E N, K]``; N a multiple of
            16 and K one of 64 where it is not plain bf16 or fp8, else both of 8, with fp8 of 16.
        ends: int32 ``[E]``: one past the last row of each.
        bias: bf16 ``[E, N]``.

    Returns:
        bf16 ``[rows, N]``.

    Raises:
        MissingDataError: as `_fragment_linear.run`.
    """
    experts = ends.shape[0]
    n = packed.n // experts
    if packed.layout == "fp8.rows":
        return _fp8(x, packed, ends, bias, n)
    bits = _BITS[packed.layout]
    fits = n % 16 == 0 and packed.k % GROUP == 0
    if fits and x.shape[0] <= (_FEW_PLAIN_ROWS if bits == 16 else FEW_ROWS) * experts:
        return _few_rows(x, packed, ends, bias, bits, n)
    weights = packed.tensors["weight"] if bits == 16 else unpacked(packed, bits)
    weights = weights.view(experts, n, packed.k).transpose(1, 2)
    made = torch._grouped_mm(x, weights, offs=ends)
    return made if bias is None else biased(made, bias, ends)


def _fp8(x: Tensor, packed: Packed, ends: Tensor, bias: Tensor | None, n: int) -> Tensor:
    values, scale = fp8_rows(x)
    experts = ends.shape[0]
    if n % 16 == 0 and packed.k % (2 * GROUP) == 0 and x.shape[0] <= _FEW_FP8_ROWS * experts:
        return _few_rows(values, packed, ends, bias, 16, n, scale)
    made: Tensor = torch._scaled_grouped_mm(
        values, packed.tensors["weight"].view(experts, n, packed.k).transpose(1, 2),
        scale.view(-1), packed.tensors["scale"].view(experts, n), offs=ends,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return made if bias is None else biased(made, bias, ends)


def _few_rows(
    x: Tensor, packed: Packed, ends: Tensor, bias: Tensor | None, bits: int, n: int,
    rounded: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, experts = x.shape[0], ends.shape[0]
    k = packed.k if rounded is None else packed.k // 2  # in pairs, which stand for one of 16 bits
    row_tiles = _row_tiles(bits, -(-rows // min(rows, experts)))
    if rounded is not None:
        row_tiles = min(row_tiles, 2)
    tiles, warps, depth = _shape(bits, row_tiles, min(rows, experts), n, k)
    kernel, _ = compiled(
        bits, row_tiles, tiles, warps, depth, grouped=True, fp8=rounded is not None
    )
    none, scale = nothing(x.device), packed.tensors.get("scale")
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    # As many blocks of rows as they can fill, however they fall.
    blocks = min(rows, experts) + rows // (8 * row_tiles)
    args: list[Any] = [
        x, packed.tensors["weight"], scale if bits == 4 else none, scale if bits == 8 else none,
        out, none if bias is None else bias, rows, n, k,
    ]  # fmt: skip
    args += [] if rounded is None else [scale, rounded]
    args += [ends, experts]
    kernel(grid=(-(-n // (16 * tiles)), blocks, 1), block=(32 * warps, 1, 1), args=args)
    return out


def _row_tiles(bits: int, each: int) -> int:
    """Tiles of 8 rows a block, for so many rows an expert on average, of which some have more.

    The fastest of three at seven shapes and six numbers of rows, or near it
    (docs/results/kernels.md).
    """
    if bits == 4:
        return 1 if each <= 7 else 2
    return 1 if each <= 5 else 2 if each <= 12 else 4


def _shape(bits: int, row_tiles: int, experts: int, n: int, k: int) -> tuple[int, int, int]:
    """Tiles of features a warp, warps a block and groups in flight.

    Within 15 % of the fastest of 22 variants, but for a few below 10 us; measured on an H200 at
    nine shapes and four numbers of rows, with 4 bits at twelve shapes and six numbers
    (docs/results/kernels.md). Many small blocks are fastest where there are many; where there are
    few, more warps share the inputs of each.
    """
    tiles = 4 if bits == 4 else 2
    blocks, groups = -(-n // (16 * tiles)) * experts, k // GROUP
    if row_tiles == 4:
        return tiles, 2 if groups <= 64 else 4, 1
    if bits == 4 and row_tiles == 2:  # of 16 rows, whose sums leave registers for one group
        return tiles, _warps(max(groups / 32, 4096 / blocks), 8), 1
    return tiles, _warps(max(groups / 32, 2048 / blocks), 16), 2


def _warps(wanted: float, most: int) -> int:
    return next(warps for warps in (2, 4, 8, 16) if warps >= min(wanted, most))
