"""`TensorChange`: what is done to a checkpoint's tensor so that one program computes every family.

Families differ by numbers and orders that need no operator of their own: a scaled embedding is a
scaled table, a scaled score a scaled projection of the queries, a norm by ``1 + w`` one by another
weight, and a rotation of neighbours one of halves behind other rows. They are put into the weights
when these are loaded. Scales of rows and orders of rows change nothing of how a row is quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreplan.datasets.models._family_names import EXPERT_NAMES, FAMILY_NAMES
from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.model import Model

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorChange:
    """Done in this order; the default changes nothing.

    Attributes:
        mixed: rows are stored group by group, of each its row or rows of every part; so many groups
            and parts: heads with a query, a key and a value each, or pairs of gate and up.
        offset: added to every element.
        factor: of the first ``rows`` rows; of all of them if ``None``.
        rows: see ``factor``.
        order: features of a head in the order the runtime takes them; empty as stored.
        heads: so many heads, the first ones, are put into that order.
    """

    mixed: tuple[int, int] | None = None
    offset: float = 0.0
    factor: float = 1.0
    rows: int | None = None
    order: tuple[int, ...] = ()
    heads: int = 0

    @property
    def row_wise(self) -> bool:
        """Whether slices of rows may be changed one by one."""
        return self.rows is None and not self.order and self.mixed is None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The changed tensor, fp32 where its values change; the tensor itself where nothing does.

        Args:
            tensor: ``[n, ...]``, contiguous; of the first ``heads`` heads ``len(order)`` rows each.
        """
        import torch

        if self.mixed is not None:
            groups = tensor.reshape(*self.mixed, -1, *tensor.shape[1:])
            tensor = groups.transpose(0, 1).reshape(tensor.shape)
        if self.offset or self.factor != 1.0:
            tensor = tensor.float() + self.offset
            tensor[: self.rows] *= self.factor
        if self.order:
            size, rest = len(self.order), tensor.shape[1:]
            heads = tensor[: self.heads * size].view(self.heads, size, *rest)
            ordered = heads[:, list(self.order)].view(-1, *rest)
            tensor = torch.cat((ordered, tensor[len(ordered) :]))
        return tensor


#: Changes nothing.
AS_STORED = TensorChange()


def change_of(model: Model, name: str) -> TensorChange:
    """What is done to one of our tensors.

    Args:
        model: whose.
        name: ours, without its layer: ``qkv.weight``.
    """
    part, scalars, weight = name.rpartition(".")[0], model.scalars, name.endswith(".weight")
    order = model.rotary.order(model.head_dim) if model.position == "rope" else ()
    queries = scalars.of_queries(model.head_dim)
    if part == "qkv":
        # Behind a norm of its own a query's scale is that norm's.
        factor = 1.0 if model.qk_norm else queries
        rows, heads = model.heads * model.head_dim, model.heads + model.kv_heads
        mixed = (model.heads, 3) if FAMILY_NAMES[model.family].qkv_by_head else None
        return TensorChange(mixed, factor=factor, rows=rows, order=order, heads=heads)
    if model.latent is not None and part in ("latents", "queries"):
        return _latent_change(model, model.latent, part)
    if part in ("q_norm", "k_norm"):
        q = part == "q_norm"
        heads = model.head_norm_sizes[0 if q else 1] // model.head_dim
        factor = queries if q else 1.0
        return TensorChange(offset=scalars.norm, factor=factor, order=order, heads=heads)
    if part in ("attended_norm", "fed_norm"):
        return TensorChange(offset=scalars.norm if weight else 0.0, factor=scalars.residual)
    if "norm" in part:
        return TensorChange(offset=scalars.norm if weight else 0.0)
    if model.experts is not None and part.startswith("expert.") and part.endswith(".up"):
        stacked = EXPERT_NAMES[model.family].stacked
        return TensorChange((model.experts.ffn, 2) if stacked else None)
    if part.endswith(("out", "down")) and not model.norms_behind:
        routed = model.experts is not None and part.startswith("expert.")
        scale = model.experts.routing.scale if model.experts is not None and routed else 1.0
        return TensorChange(factor=scalars.residual * scale)
    return TensorChange(factor={"embed": scalars.embedding, "head": scalars.logits}.get(part, 1.0))


def _latent_change(model: Model, latent: LatentAttention, part: str) -> TensorChange:
    """Of the turned features, which come last, the order; of queries the scale of scores."""
    kept, heads = (latent.rank, 1) if part == "latents" else (latent.plain, model.heads)
    order = model.rotary.order(latent.turned)
    if order:
        order = (*range(kept), *(kept + feature for feature in order))
    factor = 1.0 if part == "latents" else model.scalars.of_queries(latent.width)
    return TensorChange(factor=factor, order=order, heads=heads)
