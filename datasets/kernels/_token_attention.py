"""Attention of one new token a sequence in one launch of ``_token_attention.cu``, for GPUs.

Keys and values are read once, as they lie in the cache, in 16 bits or in the 8 of a
`QuantisedCache`, which need not be written out in 16 first; scores may be capped and heads may have
sinks. Measured in ``docs/results/kernels.md``. Imports torch.

Shape legend: B = batch, H = heads, G = key/value heads, L = positions of the cache, D = head_dim.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._cache_layout import CacheLayout
from foreplan.datasets.kernels._cuda_source import cuda_kernel, nothing
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.token_shapes import (
    HEADS,
    MOST_PARTS,
    attends_at_once,
    token_shape,
)


def token_attention(
    q: Tensor, cache_k: Tensor | QuantisedCache, cache_v: Tensor | QuantisedCache, keys: int, *,
    cap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Attention of bf16 ``q[B, 1, H, D]`` to the first ``keys`` positions.

    Args:
        q: queries.
        cache_k: ``[B, G, L, D]`` in bf16 or 8 bits.
        cache_v: likewise.
        keys: positions that are seen.
        cap: of scores; 0 = none.
        sinks: fp32 ``[H]``, if there are such.

    Returns:
        bf16 ``[B, 1, H, D]``; ``None`` of more queries and of what else it does not take.

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    batch, queries, heads, features = q.shape
    if q.device.type != "cuda" or q.dtype is not torch.bfloat16:
        return None
    if not attends_at_once(queries, features, "bf16", _capability(q.device)):
        return None
    cache = CacheLayout.of(cache_k, cache_v)
    if cache is None:
        return None
    if q.stride(3) != 1 or q.stride(0) % 8 or q.stride(2) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    none = nothing(q.device)
    groups = cache.values[0].shape[1]
    shared = heads // groups
    tiles = -(-shared // HEADS)
    _, parts, warps = token_shape(batch, heads, groups, features, keys)
    out = torch.empty(batch, 1, heads, features, dtype=q.dtype, device=q.device)
    sums, norms = none, none
    if parts > 1:
        sums = torch.empty(parts, batch * heads, features, dtype=torch.float32, device=q.device)
        norms = torch.empty(parts, batch * heads, 2, dtype=torch.float32, device=q.device)
    run, combine = _compiled(features, 16 if cache.scales is None else 8, warps)
    sink = none if sinks is None else sinks
    run(
        grid=(parts, groups * tiles, batch), block=(32 * warps, 1, 1),
        args=[
            q, *cache.values, *(cache.scales or (none, none)), sink, out, sums, norms, shared,
            keys, parts, q.stride(0), q.stride(2), cache.batch_rows, cache.head_rows,
            features**-0.5, float(cap),
        ],
    )  # fmt: skip
    if parts > 1:
        combine(
            grid=(batch * heads, 1, 1), block=(features // 2, 1, 1),
            args=[sums, norms, sink, out, heads, batch * heads, parts],
        )  # fmt: skip
    return out


@functools.cache
def _capability(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


@functools.cache
def _compiled(features: int, bits: int, warps: int) -> tuple[Any, Any]:
    name = f"token_attention_{features}_{bits}_{warps}"
    macros = {
        "D": features, "BITS": bits, "WARPS": warps, "SHARES": MOST_PARTS, "NAME": name,
        "COMBINE": f"{name}_combine",
    }  # fmt: skip
    file = Path(__file__).with_suffix(".cu")
    return cuda_kernel(file, name, macros), cuda_kernel(file, f"{name}_combine", macros)
