"""`causal_masks`: what `torch.nn.Transformer` finds out about masks, without their values.

Its layers compare a mask with the causal one, and leave it out of attention where both are equal. A
trace has no values to compare. A mask of as many rows as columns is taken to be causal, as those of
decoders and of language models are; others are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def causal_masks() -> Iterator[None]:
    """Let torch's transformers tell a causal mask by its shape for a while."""
    from torch.nn.modules import transformer

    before = transformer._detect_is_causal_mask
    try:
        transformer._detect_is_causal_mask = _detect
        yield
    finally:
        transformer._detect_is_causal_mask = before


def _detect(
    mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    if is_causal is not None or mask is None:
        return is_causal is True
    rows = mask.size(-2) if size is None else size
    return tuple(mask.shape) == (rows, rows)
