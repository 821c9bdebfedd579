"""`is_view`: which calls of a trace hand their operand on and compute nothing."""

from __future__ import annotations

from typing import Any

from foreplan.datasets.graphs._composites import aten_name

#: Views that autograd takes for none, as nobody else reads what they are of.
_UNSAFE_VIEWS = frozenset({"unsafe_split", "unsafe_split_with_sizes", "_unsafe_view"})


def is_view(node: Any) -> bool:
    """Whether a call's result is its operand's data, unchanged and in place.

    Args:
        node: of a trace, with a target of ATen.
    """
    import torch

    name = aten_name(node.target)
    if name == "dropout":
        _, probability, training = node.args
        return not training or probability == 0
    if name in _UNSAFE_VIEWS:
        return True
    if torch.Tag.inplace_view in node.target.tags:
        return True
    returns = node.target._schema.returns
    alias = returns[0].alias_info if returns else None
    if alias is None or alias.is_write:
        return False
    if name not in ("reshape", "flatten", "contiguous", "to", "view_as", "reshape_as"):
        return True
    # These copy only where they must.
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if name in ("contiguous", "to"):
        # A copy may be asked for by dtype or by layout.
        same = source.dtype == result.dtype and source.device == result.device
        return bool(same and source.stride() == result.stride())
    empty = torch.empty_strided(source.shape, source.stride(), device="meta")
    try:
        empty.view(result.shape)
    except RuntimeError:
        return False
    return True
