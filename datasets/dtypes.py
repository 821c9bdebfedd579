"""Data types and their sizes: of one element, of a packed weight with its scales, of a cache.

Shape legend: ``n`` = output features, ``k`` = input features, ``head_dim`` = features of one head.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foreplan.errors import SpecError

#: Bytes of one element. ``int4`` and ``int3`` count packed storage without scales.
DTYPE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "fp64": 8.0,
        "fp32": 4.0,
        "tf32": 4.0,
        "bf16": 2.0,
        "fp16": 2.0,
        "fp8": 1.0,
        "int8": 1.0,
        "int4": 0.5,
        "int3": 0.4,  # ten values in one 32-bit word
        "int64": 8.0,
        "int32": 4.0,
    }
)

#: Weights that share one scale (and zero) in the packed formats; 0 = one scale an output row.
GROUP_SIZE: Mapping[str, int] = MappingProxyType({"int8": 0, "int4": 64, "int3": 64})

#: Bytes of scale and zero per group: int8 has a bf16 scale, int4 and int3 a bf16 scale and zero.
_GROUP_BYTES: Mapping[str, float] = MappingProxyType({"int8": 2.0, "int4": 4.0, "int3": 4.0})


def weight_bytes(n: int, k: int, storage: str) -> int:
    """Bytes of an ``n`` x ``k`` weight stored as ``storage``, scales and zeros included.

    Raises:
        SpecError: unknown storage dtype.
    """
    if storage not in DTYPE_BYTES:
        raise SpecError("variant.storage", got=storage, expected=f"one of {sorted(DTYPE_BYTES)}")
    payload = n * k * DTYPE_BYTES[storage]
    if storage not in _GROUP_BYTES:
        return round(payload)
    group = GROUP_SIZE[storage] or k
    return round(payload + n * -(-k // group) * _GROUP_BYTES[storage])


def cache_bytes(head_dim: int, storage: str) -> float:
    """Bytes of one head's keys, or values, of one token, with the bf16 scale of an int8 one."""
    return head_dim * DTYPE_BYTES[storage] + (2.0 if storage == "int8" else 0.0)
