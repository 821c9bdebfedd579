"""`CacheLayout`: where the rows of a cache lie on a GPU, for kernels that go by addresses.

Imports torch. Shape legend: B = batch, G = key/value heads, L = positions, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foreplan.datasets.kernels.quantised_cache import QuantisedCache


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Keys and values ``[B, G, L, D]`` that lie alike, position behind position.

    Attributes:
        values: of keys and of values, bf16 or int8.
        scales: of both, bf16 ``[B, G, L, 1]``; none of bf16.
        batch_rows: rows of D from a sequence to the next.
        head_rows: from a head to the next.
    """

    values: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor] | None
    batch_rows: int
    head_rows: int

    @classmethod
    def of(cls, k: Tensor | QuantisedCache, v: Tensor | QuantisedCache) -> CacheLayout | None:
        """``None`` of caches with gaps, that lie unlike, or are neither bf16 nor of 8 bits."""
        if isinstance(k, QuantisedCache) and isinstance(v, QuantisedCache):
            rows = _rows(k.codes, torch.int8)
            if rows is None or rows != _rows(v.codes, torch.int8):
                return None
            if any(x.scale.stride()[:3] != (*rows, 1) for x in (k, v)):
                return None
            return cls((k.codes, v.codes), (k.scale, v.scale), *rows)
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            rows = _rows(k, torch.bfloat16)
            if rows is not None and rows == _rows(v, torch.bfloat16):
                return cls((k, v), None, *rows)
        return None


def _rows(values: Tensor, dtype: torch.dtype) -> tuple[int, int] | None:
    features = values.shape[-1]
    batch, head, position, feature = values.stride()
    if feature != 1 or position != features or batch % features or head % features:
        return None
    if values.dtype is not dtype or values.data_ptr() % 16:
        return None
    return batch // features, head // features
