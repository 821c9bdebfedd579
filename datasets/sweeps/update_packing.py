"""`packed_update`: the kernels that torch makes of one fused update of many tensors.

A kernel takes so many tensors, or so many blocks, whichever is full first; a block goes through one
chunk of one tensor (torch 2.11, ``MultiTensorApply.cuh``, four lists of tensors: parameters,
gradients and two moments). A kernel ends with the longest chunk it has, so that many small tensors
take longer than one of as many elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: Elements of a chunk; tensors and blocks of a kernel at most.
_CHUNK, _TENSORS, _BLOCKS = 65536, 36, 320


class PackedUpdate(NamedTuple):
    """One fused update.

    Attributes:
        kernels: launched one after another.
        longest: elements of each kernel's longest chunk, added up over kernels.
    """

    kernels: int
    longest: int


def packed_update(sizes: Iterable[int]) -> PackedUpdate:
    """Kernels of an update.

    Args:
        sizes: elements of each tensor, in the optimizer's order.
    """
    kernels = longest = tensors = blocks = widest = 0
    for size in sizes:
        chunks = -(-size // _CHUNK)
        tensors += chunks > 0
        for chunk in range(chunks):
            blocks += 1
            widest = max(widest, min(_CHUNK, size - chunk * _CHUNK))
            ends = chunk == chunks - 1
            if blocks == _BLOCKS or (ends and tensors == _TENSORS):
                kernels, longest = kernels + 1, longest + widest
                blocks = widest = 0
                tensors = 0 if ends else 1  # the rest of this one is in the next
    if blocks:
        kernels, longest = kernels + 1, longest + widest
    return PackedUpdate(kernels, longest)
