"""Weight layouts: how an fp32 weight is quantised, packed and read back. Imports torch.

Rounding is to nearest. ``int8.rows``: symmetric, one bf16 scale a row. ``int4.*`` and
``int3.words``: groups of 64 inputs with a bf16 scale and zero, ``w = (q - offset) * scale + zero``
with ``offset`` = 8 or 4, so that the zero is the middle of the group's range. ``fp8.rows``: e4m3
with one fp32 scale a row. ``*.fragments`` hold the same values in the order of tensor cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.dtypes import GROUP_SIZE
from foreplan.datasets.kernels._fragment_linear import from_fragments, to_fragments
from foreplan.datasets.kernels.registry import Packed

GROUP = GROUP_SIZE["int4"]
BLOCK_ROWS = 64  # a multiple of every int4.pack block
VALUES_A_WORD = 10  # int3: 30 of a word's 32 bits
FP8_MAX = 448.0  # largest finite e4m3 value


@dataclass(frozen=True, slots=True)
class Layout:
    """A pair of inverse functions (up to rounding) between fp32 ``[N, K]`` and packed bytes."""

    pack: Callable[[Tensor], Packed]
    dequantise: Callable[[Packed], Tensor]


def _packed(layout: str, weight: Tensor, tensors: dict[str, Tensor]) -> Packed:
    n, k = weight.shape
    return Packed(layout, n, k, tensors)


def _pack_plain(layout: str, dtype: torch.dtype) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        # A copy, so that the packed weight never shares memory with the checkpoint.
        copy = weight.detach().to(dtype, copy=True).contiguous()
        return _packed(layout, weight, {"weight": copy})

    return pack


def _pack_int8_rows(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).to(torch.bfloat16)
    quantised = (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return _packed("int8.rows", weight, {"weight": quantised, "scale": scale})


def _pack_fp8_rows(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1) / FP8_MAX).clamp(min=1e-12).float()
    quantised = (weight / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return _packed("fp8.rows", weight, {"weight": quantised, "scale": scale})


def _dequantise_rows(packed: Packed) -> Tensor:
    return packed.tensors["weight"].float() * packed.tensors["scale"].float()[:, None]


def _quantise_groups(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise in groups of `GROUP` inputs, the last group padded.

    Returns:
        ``q`` uint8 ``[N, groups, GROUP]`` in ``0 .. 2^bits - 1``, and bf16 ``scale`` and ``zero``
        ``[N, groups]``.
    """
    n, k = weight.shape
    grouped = F.pad(weight.float(), (0, -k % GROUP)).view(n, -1, GROUP)
    real = torch.ones(k, dtype=torch.bool, device=weight.device)
    real = F.pad(real, (0, -k % GROUP)).view(1, -1, GROUP)
    high = grouped.masked_fill(~real, -torch.inf).amax(2)
    low = grouped.masked_fill(~real, torch.inf).amin(2)
    levels, offset = 2**bits - 1, 2 ** (bits - 1)
    scale = ((high - low) / levels).clamp(min=1e-12).to(torch.bfloat16)
    zero = (low + offset * scale.float()).to(torch.bfloat16)
    q = (grouped - zero.float()[..., None]) / scale.float()[..., None] + offset
    return q.round().clamp(0, levels).to(torch.uint8), scale, zero


def dequantise_groups(q: Tensor, scale: Tensor, zero: Tensor, offset: int, k: int) -> Tensor:
    """Weight ``[N, k]`` in the dtype of ``scale`` from ``q[N, groups, GROUP]``."""
    # uint8 wraps below zero and reads back right as int8: exact, and a fifth of a float's bytes.
    centred = (q - offset).view(torch.int8).to(scale.dtype)
    centred *= scale[..., None]
    centred += zero[..., None]
    return centred.view(q.shape[0], -1)[:, :k]


def _pack_int4_nibbles(weight: Tensor) -> Packed:
    q, scale, zero = _quantise_groups(weight, 4)
    low, high = q.chunk(2, dim=2)
    tensors = {"weight": low | (high << 4), "scale": scale, "zero": zero}
    return _packed("int4.nibbles", weight, tensors)


def unpack_nibbles(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Weight ``[N, K]`` in ``dtype`` from the layout ``int4.nibbles``."""
    byte = packed.tensors["weight"]
    q = torch.cat([byte & 15, byte >> 4], dim=2)
    scale, zero = packed.tensors["scale"].to(dtype), packed.tensors["zero"].to(dtype)
    return dequantise_groups(q, scale, zero, 8, packed.k)


# --- fragments: operands of a GPU's tensor cores, see `_fragment_linear` ------------------------


def _pack_int4_fragments(weight: Tensor) -> Packed:
    n, k = weight.shape
    q, scale, zero = _quantise_groups(weight, 4)
    both = torch.stack([scale, zero], dim=2).view(n // 16, 2, 8, k // GROUP, 2)
    # One lane needs scale and zero of features r and r + 8: [N/16, K/64, r, 2, (scale, zero)].
    scales = both.permute(0, 3, 2, 1, 4).contiguous()
    tensors = {"weight": to_fragments(q.view(n, k), 4), "scale": scales}
    return _packed("int4.fragments", weight, tensors)


def _dequantise_int4_fragments(packed: Packed) -> Tensor:
    n, k = packed.n, packed.k
    both = packed.tensors["scale"].float().permute(0, 3, 2, 1, 4).reshape(n, k // GROUP, 2)
    q = from_fragments(packed.tensors["weight"]).view(n, k // GROUP, GROUP)
    return ((q.float() - 8) * both[..., :1] + both[..., 1:]).view(n, k)


def _pack_int8_fragments(weight: Tensor) -> Packed:
    plain = _pack_int8_rows(weight)
    tensors = {
        "weight": to_fragments(plain.tensors["weight"], 8),
        "scale": plain.tensors["scale"],
    }
    return _packed("int8.fragments", weight, tensors)


def _dequantise_int8_fragments(packed: Packed) -> Tensor:
    values = from_fragments(packed.tensors["weight"]).view(torch.int8)
    return values.float() * packed.tensors["scale"].float()[:, None]


def _pack_int3_words(weight: Tensor) -> Packed:
    q, scale, zero = _quantise_groups(weight, 3)
    flat = q.view(q.shape[0], -1)
    flat = F.pad(flat, (0, -flat.shape[1] % VALUES_A_WORD)).to(torch.int32)
    # Value i of word w is input i * words + w, so that unpacking writes contiguous slabs.
    slabs = flat.view(flat.shape[0], VALUES_A_WORD, -1)
    words = torch.zeros_like(slabs[:, 0])
    for i in range(VALUES_A_WORD):
        words |= slabs[:, i] << (3 * i)
    return _packed("int3.words", weight, {"weight": words, "scale": scale, "zero": zero})


def unpack_words(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Weight ``[N, K]`` in ``dtype`` from the layout ``int3.words``."""
    words = packed.tensors["weight"]
    groups = packed.tensors["scale"].shape[1]
    slabs = torch.stack([(words >> (3 * i)).to(torch.uint8) for i in range(VALUES_A_WORD)], dim=1)
    slabs &= 7
    q = slabs.view(packed.n, -1)[:, : groups * GROUP].reshape(packed.n, groups, GROUP)
    scale, zero = packed.tensors["scale"].to(dtype), packed.tensors["zero"].to(dtype)
    return dequantise_groups(q, scale, zero, 4, packed.k)


def rows_of(packed: Packed, start: int, end: int) -> Packed:
    """The packed output features ``start .. end``, sharing memory.

    ``start`` must be a multiple of `BLOCK_ROWS` in the layout ``int4.pack``.
    """
    tensors = {
        name: t[:, start:end] if name == "scale_and_zero" else t[start:end]
        for name, t in packed.tensors.items()
    }
    return Packed(packed.layout, end - start, packed.k, tensors)


# --- int4.pack: torch's packed CPU layout -------------------------------------------------------


def _pack_int4_pack(weight: Tensor) -> Packed:
    q, scale, zero = _quantise_groups(weight, 4)
    flat = q.view(weight.shape).to(torch.int32)
    bytes_ = torch._convert_weight_to_int4pack_for_cpu(flat, 1)
    # The kernel wants [K / GROUP, N, 2].
    scale_and_zero = torch.stack([scale.t(), zero.t()], dim=2).contiguous()
    return _packed("int4.pack", weight, {"weight": bytes_, "scale_and_zero": scale_and_zero})


def _unpack_blocks(bytes_: Tensor, n: int, k: int, block: int) -> Tensor:
    """Values ``[K, N]`` (uint8) of packed bytes whose full blocks hold ``block`` rows.

    A block of rows is stored input by input; the low nibbles are its first half of the rows, the
    high nibbles its second half. The rows after the last full block form a block of their own
    whose bytes hold neighbouring rows.
    """
    flat, full = bytes_.reshape(-1), n - n % block
    body = flat[: full * k // 2].view(full // block, k, block // 2)
    parts = [torch.cat([body & 15, body >> 4], dim=2).permute(1, 0, 2).reshape(k, full)]
    if full < n:
        tail = flat[full * k // 2 :].view(k, (n - full) // 2)
        parts.append(torch.stack([tail & 15, tail >> 4], dim=2).view(k, n - full))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


@functools.cache
def int4_block() -> int | None:
    """Rows of a block in this process's int4 layout, found by packing a known matrix.

    Torch packs 64 rows a block with AVX512, 32 with AVX2 and 16 elsewhere; ``None`` means that this
    build does something else, and callers read the weight through the kernel instead.
    """
    n, k = 144, 2
    known = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(0)).int()
    bytes_ = torch._convert_weight_to_int4pack_for_cpu(known, 1)
    for block in (64, 32, 16):
        if torch.equal(_unpack_blocks(bytes_, n, k, block).t().int(), known):
            return block
    return None


def unpack_int4(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Transposed weight ``[K, N]`` in ``dtype`` from the layout ``int4.pack``."""
    n, k, bytes_ = packed.n, packed.k, packed.tensors["weight"]
    both = packed.tensors["scale_and_zero"]
    block = int4_block()
    if block is None:
        # Unknown packing: the rows of W.T are what the kernel makes of the identity matrix.
        eye = torch.eye(k, dtype=torch.bfloat16)
        return torch._weight_int4pack_mm_for_cpu(eye, bytes_, GROUP, both).to(dtype)
    q = (_unpack_blocks(bytes_, n, k, block) - 8).view(torch.int8)
    weight = q.to(dtype).view(-1, GROUP, n)
    # Contiguous, because a strided bf16 factor takes a scalar loop (ten times slower).
    weight *= both[:, None, :, 0].to(dtype).contiguous()
    weight += both[:, None, :, 1].to(dtype).contiguous()
    return weight.view(k, n)


LAYOUTS: dict[str, Layout] = {
    "bf16": Layout(_pack_plain("bf16", torch.bfloat16), lambda p: p.tensors["weight"].float()),
    "fp32": Layout(_pack_plain("fp32", torch.float32), lambda p: p.tensors["weight"].clone()),
    "fp8.rows": Layout(_pack_fp8_rows, _dequantise_rows),
    "int8.rows": Layout(_pack_int8_rows, _dequantise_rows),
    "int4.pack": Layout(_pack_int4_pack, lambda p: unpack_int4(p, torch.float32).t().contiguous()),
    "int4.nibbles": Layout(_pack_int4_nibbles, lambda p: unpack_nibbles(p, torch.float32)),
    "int4.fragments": Layout(_pack_int4_fragments, _dequantise_int4_fragments),
    "int8.fragments": Layout(_pack_int8_fragments, _dequantise_int8_fragments),
    "int3.words": Layout(_pack_int3_words, lambda p: unpack_words(p, torch.float32)),
}
