"""What a decoder does to rows beside its products, each in one launch of ``_row_maps.cu``.

torch's operators need three to twelve for each, most of them over strides, which hold a GPU up far
longer than the bytes do (docs/results/kernels.md). Each function here returns ``None`` (or False)
for what it does not take: processors, other data types than bf16, rows that do not lie in groups of
eight values. Imports torch.

Shape legend: B = batch, T = tokens of a call, H = heads, G = key/value heads, L = positions of the
cache, D = head_dim.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._cache_layout import CacheLayout
from foreplan.datasets.kernels._cuda_source import cuda_kernel
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.token_shapes import takes_rows

#: Values that a thread takes, and threads of a block.
_GROUP, _THREADS = 8, 256
#: Groups of a norm's row that a thread keeps, columns of a row at most, and up to how many rows
#: every group has a thread (``measured``, docs/results/kernels.md).
_KEPT, _FEW_ROWS = 4, 1024
_MOST_COLUMNS = _KEPT * 1024 * _GROUP


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """``x[B, T, H, D]`` or ``[T, H, D]`` turned by angles of ``cos[T, D]`` and ``sin``."""
    *batch, tokens, heads, features = x.shape
    if features % (2 * _GROUP) or not _taken(x, cos, sin) or cos.stride(0) != sin.stride(0):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = features // (2 * _GROUP)
    count = x.numel() // (2 * _GROUP)
    steps = x.stride() if batch else (0, *x.stride())
    _launch(
        "rotated", count,
        [x, cos, sin, out, count, tokens, heads, half, *steps[:3], cos.stride(0)],
    )  # fmt: skip
    return out


def gated(name: str, gate: Tensor, up: Tensor, limit: float = 0.0, steepness: float = 0.0) -> (
    Tensor | None
):  # fmt: skip
    """The activation of ``gate[rows, cols]`` times ``up``.

    Args:
        name: ``silu_gated``, ``gelu_gated`` (by tanh) or ``clamped_gated``.
        gate: halves of one tensor, or any.
        up: likewise.
        limit: that the clamped one clamps to.
        steepness: of its sigmoid.
    """
    if gate.dim() != 2 or gate.shape[1] % _GROUP or not _taken(gate, up):
        return None
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    columns = gate.shape[1] // _GROUP
    count = gate.shape[0] * columns
    _launch(
        name, count,
        [gate, up, out, count, columns, gate.stride(0), up.stride(0), limit, steepness],
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """``x[..., cols]`` over the root of its mean square, times ``weight[cols]``."""
    columns = x.shape[-1]
    if columns % _GROUP or columns > _MOST_COLUMNS or not 2 <= x.dim() <= 4:
        return None
    if not _taken(x, weight):
        return None
    *outer, inner, _ = (1, *x.shape)
    steps = (0, *x.stride())
    if len(outer) > 2 and outer[-2] > 1 and steps[-4] != outer[-1] * steps[-3]:
        return None  # no one step leads through them
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows := x.numel() // columns:
        # Few rows want a thread for each group, many fewer threads with more to read, so that more
        # rows are on their way.
        groups, each = columns // _GROUP, 1 if rows <= _FEW_ROWS else _KEPT
        threads = min(1024, -(-groups // (32 * each)) * 32)
        together = _THREADS // 32 if threads == 32 else 1
        _compiled("rms_rows")(
            grid=(-(-rows // together), 1, 1), block=(threads, together, 1),
            args=[x, weight, out, rows, columns, inner, steps[-3], steps[-2], float(eps)],
        )  # fmt: skip
    return out


def written(
    cache_k: Tensor | QuantisedCache, cache_v: Tensor | QuantisedCache, k: Tensor, v: Tensor,
    position: int,
) -> bool:  # fmt: skip
    """Write ``k[B, T, G, D]`` and ``v`` into caches ``[B, G, L, D]`` from a position on."""
    batch, tokens, groups, features = k.shape
    if features % _GROUP or not _taken(k, v):
        return False
    cache = CacheLayout.of(cache_k, cache_v)
    if cache is None:
        return False
    rows = batch * tokens * groups
    lanes = min(32, 1 << (features // _GROUP - 1).bit_length())
    sizes = [lanes, rows, tokens, groups, features, *k.stride()[:3], *v.stride()[:3]]
    place = [cache.batch_rows, cache.head_rows, position]
    name = "copied_rows" if cache.scales is None else "quantised_rows"
    _launch(name, lanes * rows, [k, v, *cache.values, *(cache.scales or ()), *sizes, *place], 2)
    return True


@functools.cache
def _runs_on(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return takes_rows(".".join(map(str, torch.cuda.get_device_capability(device))))


def _taken(*tensors: Tensor) -> bool:
    return all(
        _runs_on(x.device)
        and x.dtype is torch.bfloat16
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and not any(step % _GROUP for step in x.stride()[:-1])
        for x in tensors
    )


def _launch(name: str, threads: int, args: list[Any], layers: int = 1) -> None:
    if threads:
        grid = (-(-threads // _THREADS), layers, 1)
        _compiled(name)(grid=grid, block=(_THREADS, 1, 1), args=args)


@functools.cache
def _compiled(name: str) -> Any:
    return cuda_kernel(Path(__file__).with_suffix(".cu"), name, {})
