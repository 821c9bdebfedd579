"""`in_fp32`: what a network returns, as its loss takes it."""

from __future__ import annotations

from typing import Any


def in_fp32(output: Any) -> Any:
    """A tensor, or tensors in tuples, lists, mappings and outputs of transformers, in fp32.

    Whole numbers stay what they are. Imports torch.
    """
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, output
    )
