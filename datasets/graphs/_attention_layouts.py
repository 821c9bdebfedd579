"""`AttentionLayouts`: in a trace without data, fused attention leaves its result as its query lies.

Flash and memory-efficient kernels do, on processors and GPUs, so that a decoder whose query is a
view of ``[B, T, H, D]`` gathers its heads without a copy. On the meta device torch chooses no
kernel and goes by products, whose result has its heads apart: each layer would copy it. With
dropout inside, or a mask that is trained, processors do go by products; there a trace stays as
it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

#: Places of the mask and the probability of dropout among the arguments.
_MASK, _DROPOUT = 3, 4


class AttentionLayouts(TorchFunctionMode):
    """A context for a trace; `settle` belongs behind it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if _undecided(query, result, args, kwargs):
                with disable_proxy_modes_tracing(), torch.no_grad():
                    # In place, because a trace knows its tensors by identity.
                    result.as_strided_(result.shape, torch.empty_like(query).stride())
        return result

    @staticmethod
    def settle(program: torch.export.ExportedProgram) -> None:
        """Have the calls themselves say so, which were noted before their result was laid out."""
        attention = torch.ops.aten.scaled_dot_product_attention.default
        for node in program.graph_module.graph.find_nodes(op="call_function", target=attention):
            query, result = node.args[0].meta["val"], node.meta["val"]
            given = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            if _undecided(query, result, *given):
                strides = torch.empty_like(query).stride()
                node.meta["val"] = result.new_empty_strided(result.shape, strides)


def _undecided(
    query: torch.Tensor, result: torch.Tensor, args: Sequence[Any], named: Mapping[str, Any]
) -> bool:
    """Whether torch has not asked a kernel where the result of a call lies."""
    mask = args[_MASK] if len(args) > _MASK else named.get("attn_mask")
    dropout = args[_DROPOUT] if len(args) > _DROPOUT else named.get("dropout_p", 0.0)
    if dropout or getattr(mask, "requires_grad", False):
        return False
    return query.device.type == "meta" and query.shape == result.shape
