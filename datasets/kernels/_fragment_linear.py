"""Weight-only int4 and int8 linears for CUDA that read packed weights at memory speed.

A weight ``[N, K]`` is cut into tiles of 16 features x 64 inputs, and each tile is stored as the
operand fragments of the tensor cores' ``mma.m16n8k16``: 512 bytes of 4-bit values or twice 512 of
8-bit ones, in the order in which lanes take them (`to_fragments`). At few rows the kernel of
``_fragment_linear.cu`` multiplies from that form, at tens to hundreds `_fragment_rows`, where the
GPU can; at many rows the weight is unpacked to bf16 once and multiplied by cuBLAS. Compiled on
first use by NVRTC, which torch brings along.

Measured in ``docs/results/kernels.md``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels import _fragment_rows
from foreplan.datasets.kernels._cuda_source import cuda_kernel, nothing
from foreplan.datasets.kernels.registry import ROWS_A_CALL, Packed, writes_weight

GROUP = 64


def to_fragments(values: Tensor, bits: int) -> Tensor:
    """The low ``bits`` of integers ``[N, K]`` as int32 words ``[N/16, K/64, bits/4, 32, 4]``.

    Lane 4r + t holds features r and r + 8 of the tile and its inputs 16t .. 16t + 15. Its 16 inputs
    are four steps, each of one word (4 bits) or two (8 bits): value j of a step is feature
    r + 8 * (j % 2) at the inputs 16t + 4 * step + 2 * (j // 2) and one more, which lie 16 bits
    apart. Four words of every lane follow each other, then the next four.
    """
    n, k = values.shape
    words_a_step = bits // 4
    parts = values.view(n // 16, 2, 8, k // GROUP, 4, 4, 2, 2).to(torch.int32) & (2**bits - 1)
    words = torch.zeros(
        n // 16, 8, k // GROUP, 4, 4, words_a_step, dtype=torch.int32, device=values.device
    )
    for j in range(4):
        pair = parts[:, j % 2, :, :, :, :, j // 2]
        word, place = divmod(bits * j, 16)
        words[..., word] |= (pair[..., 0] << place) | (pair[..., 1] << (place + 16))
    by_lane = words.permute(0, 2, 1, 3, 4, 5).reshape(n // 16, k // GROUP, 32, words_a_step, 4)
    return by_lane.transpose(2, 3).contiguous()


def from_fragments(words: Tensor) -> Tensor:
    """The inverse of `to_fragments`, as uint8 ``[N, K]``."""
    tiles, groups, words_a_step = words.shape[:3]
    bits = 4 * words_a_step
    by_lane = words.transpose(2, 3).reshape(tiles, groups, 8, 4, 4, words_a_step)
    values = torch.empty(tiles, 2, 8, groups, 4, 4, 2, 2, dtype=torch.uint8, device=words.device)
    for j in range(4):
        word, place = divmod(bits * j, 16)
        for one in range(2):
            part = (by_lane[..., word] >> (place + 16 * one)) & (2**bits - 1)
            values[:, j % 2, :, :, :, :, j // 2, one] = part.permute(0, 2, 1, 3, 4).to(torch.uint8)
    return values.view(tiles * 16, groups * GROUP)


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Bf16 ``x[rows, K]`` times the weight's transpose.

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    bits = 4 if packed.layout.startswith("int4") else 8
    if x.shape[0] > ROWS_A_CALL and _fragment_rows.fits(x):
        return _fragment_rows.run(x.contiguous(), packed, bias, bits)
    if writes_weight(x.shape[0]):  # of what has no such blocks, or too many rows for them
        return F.linear(x, unpacked(packed, bits), bias)
    x = x.contiguous()
    out = torch.empty(x.shape[0], packed.n, dtype=torch.bfloat16, device=x.device)
    for start in range(0, x.shape[0], ROWS_A_CALL):
        part = slice(start, start + ROWS_A_CALL)
        _few_rows(x[part], packed, bias, out[part], bits)
    return out


def _few_rows(x: Tensor, packed: Packed, bias: Tensor | None, out: Tensor, bits: int) -> None:
    rows, n = x.shape[0], packed.n
    none, scale = nothing(x.device), packed.tensors["scale"]
    row_tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    tiles, warps, depth = _shape(bits, row_tiles, n)
    kernel, _ = compiled(bits, row_tiles, tiles, warps, depth)
    kernel(
        grid=(-(-n // (16 * tiles)), 1, 1), block=(32 * warps, 1, 1),
        args=[
            x, packed.tensors["weight"], scale if bits == 4 else none,
            none if bits == 4 else scale, out, none if bias is None else bias,
            rows, n, packed.k,
        ],
    )  # fmt: skip


def unpacked(packed: Packed, bits: int) -> Tensor:
    """The weight in bf16 ``[N, K]``."""
    weight = packed.tensors["weight"]
    out = torch.empty(packed.n, packed.k, dtype=torch.bfloat16, device=weight.device)
    scale, none = packed.tensors["scale"], nothing(weight.device)
    _, unpack = compiled(bits, 1, 1, 8, 2)
    unpack(
        grid=(-(-packed.n * packed.k // 8 // 256), 1, 1), block=(256, 1, 1),
        args=[
            weight, scale if bits == 4 else none, none if bits == 4 else scale, out,
            packed.n, packed.k,
        ],
    )  # fmt: skip
    return out


def _shape(bits: int, row_tiles: int, n: int) -> tuple[int, int, int]:
    """Tiles of features a warp, warps a block and groups in flight: the fastest of 217 variants.

    Measured on an H200 at seven shapes (docs/results/kernels.md).
    """
    few = n <= 4096
    if bits == 4:
        if row_tiles == 1 and n > 6144:
            return (4, 16, 2) if n <= 8192 else (4, 8, 1)
        if row_tiles == 1:
            return (1, 16, 2) if few else (1, 8, 2)
        return (2, {2: 16, 4: 8}[row_tiles] if few else {2: 8, 4: 4}[row_tiles], 2)
    return {
        1: (1, 16, 2) if few else (1, 8, 2),
        2: (1, 16, 1) if few else (2, 8, 2),
        4: (1, 8, 2) if few else (2, 8, 1),
    }[row_tiles]


@functools.cache
def compiled(
    bits: int,
    row_tiles: int,
    feature_tiles: int,
    warps: int,
    depth: int,
    *,
    grouped: bool = False,
    fp8: bool = False,
) -> tuple[Any, Any]:
    """The kernel for few rows, of one weight or of several experts', and the one that unpacks.

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    shape = f"{bits}_{row_tiles}_{feature_tiles}_{warps}_{depth}"
    name = f"{'grouped' if grouped else 'fragment'}_linear{'_fp8' * fp8}_{shape}"
    macros = {
        "BITS": bits, "FP8": int(fp8), "NT": row_tiles, "MT": feature_tiles, "KW": warps,
        "DEPTH": depth, "GROUPED": int(grouped),
        "NAME": name, "UNPACK": f"{name}_unpack",
    }  # fmt: skip
    file = Path(__file__).with_suffix(".cu")
    return cuda_kernel(file, name, macros), cuda_kernel(file, f"{name}_unpack", macros)
