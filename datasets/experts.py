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

import math
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from foreplan.datasets.specs import StrictModel

#: Up to so many rows an expert computes every number of rows as it is; so many may be added.
MOST_PADDING = 8
#: Operators that are all experts of a layer: of SiLU, and as gpt-oss has them, with biases and a
#: clamped activation.
EXPERT_OPERATORS = frozenset({"experts", "biased_experts"})
#: What the MLP of a layer is: plain, or a mixture of experts.
LayerClass = Literal["dense", "moe"]


class Routing(StrictModel):
    """How a router scores experts and chooses among them; the default is Mixtral's.

    Attributes:
        scores: ``softmax`` over all experts, or the ``sigmoid`` of each. With the latter a stored
            correction is added where experts are chosen, not where they are weighted (DeepSeek-V3,
            2024, section 2.1.2).
        groups: of consecutive experts, equally many in each.
        kept_groups: a row's experts are of so many groups: those with the best expert (softmax), or
            with the best two together (sigmoid).
        biased: scores have a bias, which takes part in choice and weights.
        scale: factor of the chosen experts' weights. Loading puts it into their MLPs.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: PositiveInt = 1
    kept_groups: PositiveInt = 1
    biased: bool = False
    scale: PositiveFloat = 1.0

    @field_validator("kept_groups")
    @classmethod
    def _of_all_groups(cls, value: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups")
        if groups is not None and value > groups:
            raise ValueError(f"at most the {groups} groups")
        return value

    @property
    def corrected(self) -> bool:
        """Whether a stored correction of each expert's score takes part in the choice."""
        return self.scores == "sigmoid"

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.kept_groups < self.groups


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
        routing: how a row's experts are chosen.
    """

    count: PositiveInt
    active: PositiveInt
    ffn: PositiveInt
    shared_ffn: int = Field(default=0, ge=0)
    shared_gate: bool = False
    normalise: bool = True
    dense_layers: tuple[int, ...] = ()
    routing: Routing = Routing()

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

    @field_validator("routing")
    @classmethod
    def _splits_experts(cls, value: Routing, info: ValidationInfo) -> Routing:
        count, active = info.data.get("count", 0), info.data.get("active", 0)
        each, left_over = divmod(count, value.groups)
        if left_over or each * value.kept_groups < active or (value.grouped and each < 2):
            raise ValueError(
                f"groups that {count} experts split into evenly, in twos at least, of which as "
                f"many are kept as {active} experts need"
            )
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


def padded_rows(count: int) -> int:
    """Rows that an expert with ``count`` of them computes: at most an eighth more, or 7.

    Each pass has other counts, and a library prepares a kernel for each: oneDNN takes 0.9 ms and
    1.1 MiB for a bf16 product of a shape that it has not seen (``measured``: 64 shapes of 1024 x
    512 on an EPYC), and keeps up to 1024 of them.
    """
    if count <= MOST_PADDING:
        return count
    step = max(MOST_PADDING, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


def computed_sizes(rows: int, count: int, active: int) -> int:
    """How many different `padded_rows` the experts of passes of ``rows`` rows come to compute.

    Those within three deviations of the mean under uniform routing (a binomial law).
    """
    share = active / count
    mean, deviation = rows * share, math.sqrt(rows * share * (1.0 - share))
    least, most = max(1, math.floor(mean - 3 * deviation)), math.ceil(mean + 3 * deviation)
    return len({padded_rows(n) for n in range(least, max(1, min(rows, most)) + 1)})
