"""`BagsOfRows`: bags of embeddings out of operators that can be differentiated twice.

torch's own ``embedding_bag`` has no second derivative, which effects on gradients need. While the
mode is active, a bag is a look-up of its rows and their sum, mean or maximum. Imports torch.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import Tensor


class BagsOfRows(TorchFunctionMode):
    """Replaces ``torch.nn.functional.embedding_bag`` while it is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.embedding_bag:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(F.embedding_bag).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        return _bags(given.arguments)


def _bags(given: dict[str, Any]) -> Tensor:
    """Results ``(bags, width)`` of the arguments of a call, by name."""
    ids, starts, weights = given["input"], given["offsets"], given["per_sample_weights"]
    if ids.dim() == 2:
        count = ids.shape[0]
        bag = torch.arange(count, device=ids.device).repeat_interleave(ids.shape[1])
    else:
        starts = starts[:-1] if given["include_last_offset"] else starts
        count = starts.shape[0]
        places = torch.arange(ids.shape[0], device=ids.device)
        bag = torch.searchsorted(starts.long(), places, right=True) - 1
    kept = torch.ones_like(bag, dtype=torch.bool)
    if given["padding_idx"] is not None:
        table = given["weight"].shape[0]
        kept = ids.flatten() != given["padding_idx"] % table
    bag = bag[kept]
    rows = F.embedding(
        ids.flatten()[kept], given["weight"], max_norm=given["max_norm"],
        norm_type=given["norm_type"], scale_grad_by_freq=given["scale_grad_by_freq"],
    )  # fmt: skip
    if weights is not None:
        rows = rows * weights.flatten()[kept, None]
    empty = rows.new_zeros(count, rows.shape[1])
    if given["mode"] == "max":  # of nothing it is 0, as torch has it
        places = bag[:, None].expand_as(rows)
        return empty.scatter_reduce(0, places, rows, "amax", include_self=False)
    summed = empty.index_add(0, bag, rows)
    if given["mode"] == "sum":
        return summed
    return summed / bag.bincount(minlength=count).clamp(min=1)[:, None]
