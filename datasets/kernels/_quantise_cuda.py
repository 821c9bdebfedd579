"""8-bit quantisation on a GPU: fused Triton kernels, or eager torch where Triton is not installed.

Column-wise results are stored column by column, which is how the products want them.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

_FUSED = importlib.util.find_spec("triton") is not None


def quantise_rows(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Scale each row of ``factor[1, K] * x[M, K]`` to +-limit.

    Returns:
        8-bit ``[M, K]`` and fp32 scales ``[M, 1]``.
    """
    if not _FUSED:
        return _eager(x, factor, 1, limit, dtype, seed)
    from foreplan.datasets.kernels._quantise_triton import rows

    return rows(x, factor, limit, dtype, seed)


def quantise_columns(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Scale each column of ``factor[M, 1] * x[M, K]`` to +-limit.

    Returns:
        8-bit ``[M, K]``, stored column by column, and fp32 scales ``[1, K]``.
    """
    if not _FUSED:
        values, scale = _eager(x, factor, 0, limit, dtype, seed)
        return values.t().contiguous().t(), scale
    from foreplan.datasets.kernels._quantise_triton import columns

    return columns(x, factor, limit, dtype, seed)


def quantise_tensor(
    x: Tensor, factor: Tensor | None, limit: int, dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Scale all of ``factor * x[M, K]`` to +-limit; the factor is ``[M, 1]`` or ``[1, K]``.

    Returns:
        8-bit ``[M, K]`` and its fp32 scale ``[1, 1]``.
    """
    if not _FUSED:
        return _eager(x, factor, None, limit, dtype, seed)
    # A reduction over everything is fast in torch; what is fused is scaling and rounding.
    wide = x if factor is None else x * factor
    largest = torch.linalg.vector_norm(wide, torch.inf, dtype=torch.float32).view(1, 1)
    from foreplan.datasets.kernels._quantise_triton import scaled

    return scaled(wide, largest, limit, dtype, seed)


def _eager(
    x: Tensor, factor: Tensor | None, dim: int | None, limit: int, dtype: torch.dtype,
    seed: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = x.float() if factor is None else x.float() * factor
    largest = torch.linalg.vector_norm(wide, torch.inf, dim=dim, keepdim=True)
    scale = (largest / limit).view(1, 1) if dim is None else largest / limit
    scaled = wide / scale.clamp(min=torch.finfo(torch.float32).tiny)
    if dtype is torch.int8:
        if seed is None:
            scaled = scaled.round_()
        else:
            random = torch.Generator(x.device).manual_seed(seed)
            noise = torch.rand(scaled.shape, generator=random, device=x.device)
            scaled = scaled.add_(noise).floor_().clamp_(-limit, limit)
    return scaled.to(dtype), scale
