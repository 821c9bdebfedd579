"""`BlockFloats`: matrices that a checkpoint keeps in MXFP4, read as the bf16 they stand for.

Blocks of 32 elements of a row share a power of two, ``2^(scale - 127)``, of a byte; each element is
a float of 4 bits, a sign, two bits of exponent and one of mantissa, two in a byte with the earlier
one low (OCP Microscaling Formats 1.0, 2023; transformers, ``integrations/mxfp4.py``). Values are
ones of bf16 too, so that nothing is rounded but at the very ends of its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Elements that share a scale, and bytes that hold them.
BLOCK, BLOCK_BYTES = 32, 16
#: What four bits stand for, without their sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: What a scale's byte is more than its exponent.
_BIAS = 127


@dataclass(frozen=True, slots=True)
class BlockFloats:
    """How a stack of matrices ``[count, n, k]`` is stored.

    Attributes:
        name: that the stack would have if it were stored plainly.
        count: matrices.
        n: rows of each.
        k: columns of each.
    """

    name: str
    count: int
    n: int
    k: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that hold it: elements, then scales."""
        blocks = (self.count, self.n, self.k // BLOCK)
        return {f"{self.name}_blocks": (*blocks, BLOCK_BYTES), f"{self.name}_scales": blocks}


def matrix(blocks: Tensor, scales: Tensor) -> Tensor:
    """One matrix.

    Args:
        blocks: bytes ``[n, k / 32, 16]``.
        scales: bytes ``[n, k / 32]``.

    Returns:
        ``[n, k]`` in bf16.
    """
    import torch

    table = torch.tensor((*_MAGNITUDES, *(-each for each in _MAGNITUDES)), dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), -1).int()
    exponents = scales.int()[..., None] - _BIAS
    return torch.ldexp(table[pairs].flatten(-2), exponents).flatten(-2)
