"""`QuantisedCache`: keys or values of a decoder in 8 bits, a scale a token and head. Imports torch.

Symmetric rounding to nearest, ``code = round(x / scale)`` with ``scale = max |x| / 127`` over the
features of one head of one token (llama.cpp's ``q8_0`` does the same over groups of 32). A token is
rounded once, when it is written: what is read back later does not depend on micro-batches, stages
or devices.

Shape legend: B = batch, G = key/value heads, L = positions, T = new tokens, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

#: Largest code; -128 stays unused, so that zero is in the middle.
_MOST = 127


@dataclass(frozen=True, slots=True)
class QuantisedCache:
    """Codes and scales; every method takes and gives views or writes in place.

    Attributes:
        codes: int8 ``[..., L, D]``.
        scale: bf16 ``[..., L, 1]``; codes are made with the scale as it is kept.
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, ...], device: torch.device) -> Self:
        """An empty cache of ``shape = [..., L, D]``, every page of it touched."""
        return cls(
            torch.empty(shape, dtype=torch.int8, device=device).zero_(),
            torch.empty((*shape[:-1], 1), dtype=torch.bfloat16, device=device).zero_(),
        )

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Quantise ``[..., L, D]`` of any float dtype."""
        made = cls.zeros(tuple(x.shape), x.device)
        made.write(x, 0)
        return made

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> Self:
        """The same part of codes and scales; not of the features of a head."""
        return type(self)(self.codes[index], self.scale[index])

    def write(self, x: Tensor, position: int) -> None:
        """Quantise ``x[..., T, D]`` into the positions from ``position`` on."""
        exact = x.float()
        scale = (exact.abs().amax(-1, keepdim=True) / _MOST).to(torch.bfloat16)
        # A head of zeros has the scale 0: whatever its codes are divided by, they stay 0. A scale
        # that bf16 rounded down leaves quotients up to 127.5, which are clamped.
        step = scale.float().clamp_(min=torch.finfo(torch.float32).tiny)
        end = position + x.shape[-2]
        self.codes[..., position:end, :].copy_((exact / step).round_().clamp_(-_MOST, _MOST))
        self.scale[..., position:end, :].copy_(scale)

    def read(self, keys: int, dtype: torch.dtype) -> Tensor:
        """The first ``keys`` positions in a float dtype, ``[..., keys, D]``; a new tensor."""
        return self.codes[..., :keys, :].to(dtype) * self.scale[..., :keys, :].to(dtype)

    @property
    def bytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.numel() + self.scale.numel() * self.scale.element_size()
