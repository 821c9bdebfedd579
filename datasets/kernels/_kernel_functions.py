"""Functions of the operators without weights, shared by profile and runtime. Imports torch.

Signatures and the shape legend stand in `foreplan.datasets.kernels.registry.function`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels import _row_maps
from foreplan.datasets.kernels._attention_mask import seen_keys
from foreplan.datasets.kernels._latent_attention import ROWS as _LATENT_ROWS
from foreplan.datasets.kernels._scored_attention import FUNCTIONS as _SCORED_ROWS
from foreplan.datasets.kernels._token_attention import token_attention
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.program import Variant

#: Of the clamped activation (transformers, ``configuration_gpt_oss.py``, ``swiglu_limit`` and
#: ``swiglu_alpha``).
_CLAMP, _STEEPNESS = 7.0, 1.702


def _rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None and (made := _row_maps.rms_norm(x, weight, eps)) is not None:
        return made
    out = F.rms_norm(x, (x.shape[-1],), weight, eps)
    return out if bias is None else out + bias


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form that Llama checkpoints use."""
    if (made := _row_maps.rotated(x, cos, sin)) is not None:
        return made
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None, :] + turned * sin[:, None, :]


def _cache_write(
    cache_k: Tensor, cache_v: Tensor, k: Tensor, v: Tensor, position: int | Tensor
) -> None:
    if isinstance(position, Tensor):  # one new token of each request, at a position of its own
        rows = torch.arange(len(position), device=position.device)
        cache_k[rows, :, position] = k[:, 0]
        cache_v[rows, :, position] = v[:, 0]
        return
    if _row_maps.written(cache_k, cache_v, k, v, position):
        return
    end = position + k.shape[1]
    cache_k[:, :, position:end].copy_(k.transpose(1, 2))
    cache_v[:, :, position:end].copy_(v.transpose(1, 2))


def _attention(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, keys: int, window: int | None = None, *,
    dtype: torch.dtype, seen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if dtype is torch.bfloat16 and seen is None:
        made = token_attention(q, cache_k, cache_v, keys)
        if made is not None:
            return made
    batch, queries, heads, head_dim = q.shape
    kv_heads = cache_k.shape[1]
    k, v = cache_k[:, :, :keys].to(dtype), cache_v[:, :, :keys].to(dtype)
    query = q.transpose(1, 2).to(dtype)  # [B, H, T, D]
    if queries == 1:
        # The heads that share keys become queries of one head: no mask is needed, the keys are
        # read once, and GQA avoids a copy of the cache (13 times faster at 32 over 8 heads).
        folded = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        if heads == kv_heads and q.device.type == "cpu" and dtype is torch.bfloat16:
            # One bf16 query takes a slow path of the CPU kernel; two equal ones take a third of
            # its time.
            folded = folded.expand(batch, kv_heads, 2, head_dim)
        mask = None if seen is None else seen[:, None, None]
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        if heads == kv_heads:
            out = out[:, :, :1]
        return out.reshape(batch, 1, heads, head_dim).to(q.dtype)
    if queries == keys:
        shared = heads != kv_heads
        out = F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=shared)
    else:
        # `is_causal` aligns the first query with the first key; here the last ones meet.
        mask = seen_keys(queries, keys, window, q.device)
        # No fused kernel of a GPU takes a mask and heads that share keys (torch, documentation of
        # `enable_gqa`), so that these become queries of one head here too.
        folded = query.reshape(batch, kv_heads, -1, head_dim)
        mask = mask.repeat(heads // kv_heads, 1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        out = out.reshape(batch, heads, queries, head_dim)
    return out.transpose(1, 2).to(q.dtype)


def _quantise_copy(
    cache_k: QuantisedCache, cache_v: QuantisedCache, k: Tensor, v: Tensor, position: int
) -> None:
    if _row_maps.written(cache_k, cache_v, k, v, position):
        return
    cache_k.write(k.transpose(1, 2), position)
    cache_v.write(v.transpose(1, 2), position)


def _dequant_attention(
    q: Tensor, cache_k: QuantisedCache, cache_v: QuantisedCache, keys: int,
    window: int | None = None, *, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if dtype is torch.bfloat16:
        made = token_attention(q, cache_k, cache_v, keys)
        if made is not None:
            return made
    k, v = cache_k.read(keys, dtype), cache_v.read(keys, dtype)
    return _attention(q, k, v, keys, window, dtype=dtype)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    if (made := _row_maps.gated("silu_gated", gate, up)) is not None:
        return made
    return F.silu(gate) * up


def _clamped_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: ``(up + 1) * gate * sigmoid(1.702 * gate)`` of clamped values."""
    made = _row_maps.gated("clamped_gated", gate, up, _CLAMP, _STEEPNESS)
    if made is not None:
        return made
    wide = F.silu(gate.clamp(max=_CLAMP).mul_(_STEEPNESS), inplace=True)
    return up.clamp(-_CLAMP, _CLAMP).add_(1.0).mul_(1 / _STEEPNESS).mul_(wide)


def _gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    if (made := _row_maps.gated("gelu_gated", gate, up)) is not None:
        return made
    return F.gelu(gate, approximate="tanh") * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _argmax(logits: Tensor) -> Tensor:
    # `argmax` has no vector loop on CPU and takes five times as long.
    return logits.max(-1).indices


def _embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _router(
    x: Tensor,
    weight: Tensor,
    active: int,
    normalise: bool,
    correction: Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best experts by their scores in fp32 (transformers, ``TopkRouter`` of each family).

    With a correction scores are sigmoids, and groups are judged by their best two experts
    (DeepSeek-V3); without one a softmax, and groups by their best (DeepSeek-V2).
    """
    logits = F.linear(x, weight, bias)
    if correction is None:
        scores = logits.softmax(-1, dtype=torch.float32)
        ranked = scores
    else:
        scores = logits.float().sigmoid()
        ranked = scores + correction
    if kept_groups < groups:
        by_group = ranked.view(len(x), groups, -1)
        best = by_group.amax(-1) if correction is None else by_group.topk(2, -1).values.sum(-1)
        lost = best.topk(groups - kept_groups, -1, largest=False).indices
        left_out = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, lost, True)
        ranked = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    share, chosen = torch.topk(ranked, active, -1)
    if correction is not None:
        share = scores.gather(-1, chosen)
    return chosen, share / share.sum(-1, keepdim=True) if normalise else share


def _sigmoid_mul(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return x * torch.sigmoid(F.linear(y, weight))


def _to_fp32(x: Tensor) -> Tensor:
    return x.float()


def _to_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


_ROWS: dict[tuple[str, str], Callable[..., Any]] = {
    ("norm", "bf16/bf16/torch.rms_norm"): _rms_norm,
    ("norm", "bf16/bf16/torch.layer_norm"): _layer_norm,
    ("rope", "bf16/bf16/torch.rope"): _rope,
    ("cache_write", "bf16/bf16/torch.copy"): _cache_write,
    ("attention", "bf16/bf16/torch.sdpa"): functools.partial(_attention, dtype=torch.bfloat16),
    ("attention", "bf16/fp32/torch.sdpa"): functools.partial(_attention, dtype=torch.float32),
    ("cache_write", "int8/bf16/torch.quantise_copy"): _quantise_copy,
    ("attention", "int8/bf16/torch.dequant_sdpa"): functools.partial(
        _dequant_attention, dtype=torch.bfloat16
    ),
    ("attention", "int8/fp32/torch.dequant_sdpa"): functools.partial(
        _dequant_attention, dtype=torch.float32
    ),
    ("activation", "bf16/bf16/torch.silu_mul"): _silu_mul,
    ("activation", "bf16/bf16/torch.clamped_silu_mul"): _clamped_silu_mul,
    ("activation", "bf16/bf16/torch.gelu_tanh_mul"): _gelu_tanh_mul,
    ("activation", "bf16/bf16/torch.gelu_tanh"): _gelu_tanh,
    ("activation", "bf16/bf16/torch.gelu"): F.gelu,
    ("activation", "bf16/bf16/torch.relu"): F.relu,
    ("add", "bf16/bf16/torch.add"): torch.add,
    ("embedding", "bf16/bf16/torch.embedding"): _embedding,
    ("argmax", "bf16/bf16/torch.argmax"): _argmax,
    ("router", "bf16/bf16/torch.topk"): _router,
    ("router", "bf16/bf16/torch.sigmoid_topk"): _router,
    ("router", "bf16/bf16/torch.grouped_topk"): _router,
    ("router", "bf16/bf16/torch.sigmoid_grouped_topk"): _router,
    ("shared_gate", "bf16/bf16/torch.sigmoid_mul"): _sigmoid_mul,
    ("cast", "bf16/fp32/torch.to"): _to_fp32,
    ("cast", "fp32/bf16/torch.to"): _to_bf16,
    **_LATENT_ROWS,
    **_SCORED_ROWS,
}

#: Functions by operator and variant.
FUNCTIONS: dict[tuple[str, Variant], Callable[..., Any]] = {
    (op, Variant.parse(text)): run for (op, text), run in _ROWS.items()
}
