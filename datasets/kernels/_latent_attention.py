"""Functions of attention over latents, shared by profile and runtime. Imports torch.

See `foreplan.datasets.models.latent_programs`. Shape legend: B = batch, T = tokens of a call, H =
heads, L = positions of the cache, R = features of a latent, P = a head's features that are not
turned, E = those that are, V = of its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x[0], weight[0])[None]


def _product_transposed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _expand_heads(
    q: Tensor, turned_q: Tensor, turned_key: Tensor, wide: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    plain, turned = q.shape[-1] - turned_q.shape[-1], turned_q.shape[-1]
    q[..., plain:].copy_(turned_q)
    k = wide.new_empty(*wide.shape[:-1], plain + turned)
    k[..., :plain].copy_(wide[..., :plain])
    k[..., plain:].copy_(turned_key)
    v = F.pad(wide[..., plain:], (0, 2 * plain + turned - wide.shape[-1]))
    return q, k.transpose(1, 2), v.transpose(1, 2)


def _query_and_known(
    latent_q: Tensor, turned_q: Tensor, cache: Tensor, keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H, R + E]`` and what they attend to, ``[B, keys, R + E]``."""
    query = torch.cat((latent_q.transpose(0, 1), turned_q[:, 0]), -1)
    return query.to(dtype), cache[:, 0, :keys].to(dtype)


def _by_products(
    latent_q: Tensor, turned_q: Tensor, cache: Tensor, keys: int, scale: float
) -> Tensor:
    """Scores, a softmax in fp32, and their product with the latents, one after another."""
    query, known = _query_and_known(latent_q, turned_q, cache, keys, latent_q.dtype)
    scores = torch.bmm(query * scale, known.transpose(1, 2))
    share = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(share, known[..., : latent_q.shape[-1]]).transpose(0, 1)


def _by_sdpa(
    latent_q: Tensor, turned_q: Tensor, cache: Tensor, keys: int, scale: float,
    *, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """One head's keys are all heads' keys and values, of which turned features are left out."""
    query, known = _query_and_known(latent_q, turned_q, cache, keys, dtype)
    known = known[:, None]
    out = F.scaled_dot_product_attention(query[:, None], known, known, scale=scale)
    return out[:, 0, :, : latent_q.shape[-1]].transpose(0, 1).to(latent_q.dtype)


#: Functions by operator and variant.
ROWS: dict[tuple[str, str], Callable[..., Any]] = {
    ("matmul", "bf16/bf16/torch.linear"): _linear,
    ("matmul", "bf16/bf16/torch.bmm"): torch.bmm,
    ("matmul", "bf16/bf16/torch.bmm_transposed"): _product_transposed,
    ("expand_heads", "bf16/bf16/torch.expand_heads"): _expand_heads,
    ("latent_attention", "bf16/bf16/torch.latent_bmm"): _by_products,
    ("latent_attention", "bf16/bf16/torch.latent_sdpa"): functools.partial(
        _by_sdpa, dtype=torch.bfloat16
    ),
    ("latent_attention", "bf16/fp32/torch.latent_sdpa"): functools.partial(
        _by_sdpa, dtype=torch.float32
    ),
}
