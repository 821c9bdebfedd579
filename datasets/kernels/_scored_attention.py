"""Attention whose scores are more than products of queries and keys: with sinks, or capped.

A sink is a learned score of a head that takes part in the softmax and has no value (Xiao et al.,
StreamingLLM, 2023; gpt-oss). With ``s`` for the logarithm of a query's sum of exponentials, which
fused attention computes beside its result, a result with a sink is the result without one times
``sigmoid(s - sink)``: exact, whatever kernel made both. A capped score is ``cap * tanh(score /
cap)`` (soft-capping; Gemma 2), which no fused kernel of torch knows: products one after another
compute it. One new token's attention is one launch on a GPU, which knows both: `_token_attention`.

Imports torch. Shape legend: B = batch, T = tokens of a call, H = heads, G = key/value heads, L =
positions of the cache, D = head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._attention_mask import seen_keys
from foreplan.datasets.kernels._token_attention import token_attention
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import SCORED_ROWS

_Cache = Tensor | QuantisedCache

#: Fused attention that hands out sums, for GPUs: from which compute capability on, and of what
#: multiple of features (torch, ``sdp_utils.cpp``).
_FUSED_FROM, _FUSED_FEATURES = (8, 0), 8


def _sink_attention(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, keys: int, window: int | None = None, *,
    sinks: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `registry.function`; ``sinks[H]`` in fp32."""
    made = _at_once(q, cache_k, cache_v, keys, window, dtype, sinks=sinks)
    if made is not None:
        return made
    batch, queries, heads, head_dim = q.shape
    k, v = cache_k[:, :, :keys].to(dtype), cache_v[:, :, :keys].to(dtype)
    query = q.transpose(1, 2).to(dtype)  # [B, H, T, D]
    if not _fused(query, masked=1 < queries < keys):
        return _by_products(query, k, v, window, sinks=sinks).to(q.dtype)
    if queries == keys > 1:
        out, sums = _with_sums(query, k, v, causal=True)
    else:
        # Heads that share keys become queries of one head, as in attention without sinks.
        folded = query.reshape(batch, k.shape[1], -1, head_dim)
        mask = None
        if queries > 1:
            hidden = ~seen_keys(queries, keys, window, q.device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=q.device)
            mask = mask.masked_fill_(hidden, -torch.inf).repeat(heads // k.shape[1], 1)
        out, sums = _with_sums(folded, k, v, mask=mask)
        out, sums = out.reshape(query.shape), sums.reshape(batch, heads, queries)
    left = torch.sigmoid(sums - sinks[:, None]).unsqueeze(-1)
    return (out * left.to(dtype)).transpose(1, 2).to(q.dtype)


def _fused(query: Tensor, *, masked: bool) -> bool:
    """Whether fused attention that hands out sums takes these queries; a processor's takes all."""
    if query.device.type == "cpu":
        return True
    return (
        not masked
        and query.dtype is torch.bfloat16
        and query.shape[-1] % _FUSED_FEATURES == 0
        and torch.cuda.get_device_capability(query.device) >= _FUSED_FROM
    )


def _with_sums(
    query: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention ``[B, H, T, D]`` and the logarithm of each query's sum, fp32 ``[B, H, T]``."""
    run = torch.ops.aten
    if query.device.type == "cpu":
        out, sums = run._scaled_dot_product_flash_attention_for_cpu(
            query, k, v, 0.0, causal, attn_mask=mask
        )
    else:
        out, sums, *_ = run._scaled_dot_product_flash_attention(query, k, v, 0.0, causal)
    return out, sums


def _capped_attention(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, keys: int, window: int | None = None, *,
    cap: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `registry.function`."""
    made = _at_once(q, cache_k, cache_v, keys, window, dtype, cap=cap)
    if made is not None:
        return made
    k, v = cache_k[:, :, :keys].to(dtype), cache_v[:, :, :keys].to(dtype)
    return _by_products(q.transpose(1, 2).to(dtype), k, v, window, cap=cap).to(q.dtype)


def _at_once(
    q: Tensor, cache_k: _Cache, cache_v: _Cache, keys: int, window: int | None,
    dtype: torch.dtype, **own: Any,
) -> Tensor | None:  # fmt: skip
    """A token's attention to the keys of its window in one launch; ``None`` if that cannot be."""
    if dtype is not torch.bfloat16 or q.shape[1] != 1:
        return None
    first = 0 if window is None else max(0, keys - window)
    seen = slice(None), slice(None), slice(first, keys)
    return token_attention(q, cache_k[seen], cache_v[seen], keys - first, **own)


def _by_products(
    query: Tensor, k: Tensor, v: Tensor, window: int | None, *, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention by scores, softmax and sum, `SCORED_ROWS` queries at a time.

    Args:
        query: ``[B, H, T, D]``.
        k: ``[B, G, L, D]``; the last query sees the last of them.
        v: likewise.
        window: keys that a query sees at most; ``None`` = all.
        cap: of scores, if they have one.
        sinks: ``[H]`` in fp32, if there are such.

    Returns:
        ``[B, T, H, D]``.
    """
    (batch, heads, queries, head_dim), groups = query.shape, k.shape[1]
    keys, scale = k.shape[2], head_dim**-0.5
    rows = SCORED_ROWS[query.device.type]
    out = query.new_empty(batch, queries, heads, head_dim)
    for begin in range(0, queries, rows):
        count = min(rows, queries - begin)
        stop = keys - queries + begin + count  # keys up to that of the block's last query
        first = 0 if window is None else max(0, stop - count - window + 1)
        folded = query[:, :, begin : begin + count].reshape(batch, groups, -1, head_dim)
        known = k[:, :, first:stop]
        if count == 1:
            # oneDNN's product of few rows by turned keys takes eight times as long as this one.
            scores = torch.matmul(known, folded.transpose(2, 3)).transpose(2, 3).contiguous()
        else:
            scores = torch.matmul(folded, known.transpose(2, 3))
        if cap is None:
            scores.mul_(scale)
        else:
            scores.mul_(scale / cap).tanh_().mul_(cap)
        if count > 1:
            hidden = ~seen_keys(count, stop - first, window, query.device)
            scores.view(batch, heads, count, -1).masked_fill_(hidden, -torch.inf)
        if sinks is None:
            share = scores.softmax(-1, dtype=torch.float32)
        else:
            wide = scores.float().view(batch, heads, count, -1)
            sums = torch.logaddexp(wide.logsumexp(-1, keepdim=True), sinks[:, None, None])
            share = (wide - sums).exp_().view(scores.shape)
        made = torch.matmul(share.to(query.dtype), v[:, :, first:stop])
        out[:, begin : begin + count] = made.view(batch, heads, count, head_dim).transpose(1, 2)
    return out


def _dequantised(
    q: Tensor, cache_k: QuantisedCache, cache_v: QuantisedCache, keys: int,
    window: int | None = None, *, attend: Callable[..., Tensor], dtype: torch.dtype, **own: Any,
) -> Tensor:  # fmt: skip
    """The same over a cache that is read into ``dtype`` first, if no kernel reads it as it is."""
    made = _at_once(q, cache_k, cache_v, keys, window, dtype, **own)
    if made is not None:
        return made
    k, v = cache_k.read(keys, dtype), cache_v.read(keys, dtype)
    return attend(q, k, v, keys, window, dtype=dtype, **own)


def _variants(
    op: str, kernel: str, attend: Callable[..., Tensor]
) -> dict[tuple[str, str], Callable[..., Any]]:
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    for text, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found[op, f"bf16/{text}/torch.{kernel}"] = functools.partial(attend, dtype=dtype)
        found[op, f"int8/{text}/torch.dequant_{kernel}"] = functools.partial(
            _dequantised, attend=attend, dtype=dtype
        )
    return found


#: Functions by operator and variant.
FUNCTIONS = _variants("sink_attention", "sink_sdpa", _sink_attention) | _variants(
    "capped_attention", "capped_bmm", _capped_attention
)
