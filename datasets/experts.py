"""`Experts`: the mixture-of-experts MLP of a decoder layer, described without its weights.

A router gives every row its ``active`` most likely experts of ``count``; each is a gated MLP of
its own. A shared expert, where there is one, takes every row.

Where nothing is known of the router, rows draw their experts uniformly and without replacement.
Then one expert is left out by a row with probability ``1 - active / count``, and by all of ``rows``
rows with that to the power ``rows`` (`touched_experts`). Routers are trained towards this (Fedus et
al., Switch Transformers, JMLR 23, 2022, section 2.2: the auxiliary loss is least for a uniform
router); one that prefers some experts touches fewer, and a price is then too high.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from foreplan.datasets.specs import StrictModel

#: What the MLP of a layer is: plain, or a mixture of experts.
LayerClass = Literal["dense", "moe"]


class Experts(StrictModel):
    """The experts that a model's MoE layers have in common.

    Attributes:
        count: routed experts of a layer.
        active: of them, those that a row goes through.
        ffn: features inside one expert.
        shared_ffn: features inside the shared expert, all of them together; 0 = there is none.
        shared_gate: the shared expert's output is scaled by ``sigmoid(gate(x))`` (Qwen2-MoE).
        normalise: the weights of a row's experts are scaled to add up to 1.
        dense_layers: layers with a plain MLP instead, ascending.
    """

    count: PositiveInt
    active: PositiveInt
    ffn: PositiveInt
    shared_ffn: int = Field(default=0, ge=0)
    shared_gate: bool = False
    normalise: bool = True
    dense_layers: tuple[int, ...] = ()

    @field_validator("active")
    @classmethod
    def _chosen_among_all(cls, value: int, info: ValidationInfo) -> int:
        count = info.data.get("count")
        if count is not None and value > count:
            raise ValueError(f"at most the {count} experts of a layer")
        return value

    @field_validator("dense_layers")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(layer < 0 for layer in value) or list(value) != sorted(set(value)):
            raise ValueError("different layers, ascending from 0")
        return value

    def class_of(self, layer: int) -> LayerClass:
        """Whether a layer has these experts."""
        return "dense" if layer in self.dense_layers else "moe"


def touched_experts(rows: float, count: int, active: int) -> float:
    """Expected number of different experts that ``rows`` rows go through under uniform routing.

    ``count * (1 - (1 - active / count) ** rows)``: ``active`` for one row, ``count`` for many.
    """
    left_out: float = (1.0 - active / count) ** rows
    return count * (1.0 - left_out)
