"""`Tower`: one transformer of a multimodal model with its sizes resolved, and what it weighs.

Every linear is described as in `foreplan.datasets.models.model`: weight ``[n, k]``. Norms and
biases are left out of the counts (below 0.1 % of the sizes that matter here).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreplan.datasets.models.attention_window import refuse_windows
from foreplan.datasets.models.encoders import load_encoder
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.model_limits import refuse_experts
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.spec import BubblesWorkload, Encoder, TransformerDims


@dataclass(frozen=True, slots=True)
class Tower:
    """A stack of equal transformer layers and what stands in front of and behind it.

    Attributes:
        name: what a reader calls it.
        layers, hidden, heads, kv_heads, head_dim, ffn: sizes.
        gated: the MLP has a gate.
        causal: attention looks back only.
        entry: ``(n, k)`` of the matrix in front of the first layer, or ``None``; an embedding is
            no product.
        exits: ``(n, k)`` of the matrices behind the last layer: head, or projector.
        vocab: rows of the embedding; 0 for none.
        forward_s, backward_s: seconds of one layer, where given.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    causal: bool
    entry: tuple[int, int] | None
    exits: tuple[tuple[int, int], ...]
    vocab: int
    forward_s: float | None = None
    backward_s: float | None = None

    @property
    def attention_linears(self) -> tuple[tuple[str, int, int], ...]:
        """``(name, n, k)`` of the attention block's matrices."""
        inner = self.heads * self.head_dim
        qkv = inner + 2 * self.kv_heads * self.head_dim
        return (("qkv", qkv, self.hidden), ("out", self.hidden, inner))

    @property
    def mlp_linears(self) -> tuple[tuple[str, int, int], ...]:
        """``(name, n, k)`` of the MLP block's matrices."""
        up = 2 * self.ffn if self.gated else self.ffn
        return (("up", up, self.hidden), ("down", self.hidden, self.ffn))

    @property
    def half_parameters(self) -> tuple[int, int]:
        """Weights of an attention block and of an MLP block."""
        attention = sum(n * k for _, n, k in self.attention_linears)
        return attention, sum(n * k for _, n, k in self.mlp_linears)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        return sum(self.half_parameters)

    @property
    def entry_parameters(self) -> int:
        """Weights in front of the first layer: embedding or patch matrix."""
        matrix = 0 if self.entry is None else self.entry[0] * self.entry[1]
        return self.vocab * self.hidden + matrix

    @property
    def exit_parameters(self) -> int:
        """Weights behind the last layer: head or projector."""
        return sum(n * k for n, k in self.exits)

    @property
    def parameters(self) -> int:
        """Weights of the whole tower."""
        return self.layers * self.layer_parameters + self.entry_parameters + self.exit_parameters

    def range_parameters(self, start: int, end: int) -> int:
        """Weights of layers ``[start, end)`` with what stands before the first, behind the last."""
        total = (end - start) * self.layer_parameters
        total += self.entry_parameters if start == 0 else 0
        return total + (self.exit_parameters if end == self.layers else 0)

    def half_range_parameters(self, begin: int, end: int) -> int:
        """Weights of halves ``[begin, end)`` with what stands before the first, behind the last."""
        total = sum(self.half_parameters[half % 2] for half in range(begin, end))
        total += self.entry_parameters if begin == 0 else 0
        return total + (self.exit_parameters if end == 2 * self.layers else 0)

    def takes_tp(self, tp: int) -> bool:
        """Whether ``tp`` devices can share a layer by heads and MLP features."""
        return self.heads % tp == 0 and self.ffn % tp == 0


def backbone_tower(problem: Problem[BubblesWorkload]) -> Tower:
    """The language model of a problem: ``--model``, or the workload's own sizes.

    Raises:
        SpecError: neither or both, or a model with a window that a sequence is longer than.
    """
    model, dims = problem.model, problem.workload.backbone
    if (model is None) == (dims is None):
        raise SpecError(
            "backbone", got="both a model and sizes" if model else "neither a model nor sizes",
            expected="--model, or backbone in the workload",
        )  # fmt: skip
    if model is not None:
        asked = problem.workload.sequence_length
        refuse_windows(model, asked, "workload.sequence_length", "training plans know no windows")
        return _of_model(model)
    assert dims is not None
    if not dims.vocab:
        raise SpecError(
            "backbone.vocab", got=dims.vocab, expected="the rows of the embedding",
            fix="give it: left out, it is 0",
        )  # fmt: skip
    head = ((dims.vocab, dims.hidden),)
    return _of_dims("backbone", dims, causal=True, entry=None, exits=head)


def encoder_towers(problem: Problem[BubblesWorkload]) -> tuple[Tower, ...]:
    """The encoders of a problem, with patch matrix and projector.

    Raises:
        SpecError: an encoder that is neither in the zoo nor a folder.
    """
    width = backbone_tower(problem).hidden
    return tuple(_encoder(encoder, width) for encoder in problem.workload.encoders)


def _encoder(encoder: Encoder, width: int) -> Tower:
    dims = encoder.dims
    patch = encoder.patch_features
    if dims is None:
        found = load_encoder(encoder.model or "")
        patch = patch or found.patch_features
        dims = TransformerDims(
            layers=found.layers, hidden=found.hidden, heads=found.heads, head_dim=found.head_dim,
            ffn=found.ffn,
        )  # fmt: skip
    taken = dims.hidden * encoder.merged
    between = taken if encoder.projector == "merger" else width
    exits: tuple[tuple[int, int], ...] = ((between, taken), (width, between))
    if encoder.projector == "linear":
        exits = ((width, taken),)
    return _of_dims(
        encoder.name, dims, causal=False, entry=(dims.hidden, patch or dims.hidden), exits=exits
    )


def _of_dims(name: str, dims: TransformerDims, **rest: Any) -> Tower:
    return Tower(
        name=name,
        layers=dims.layers,
        hidden=dims.hidden,
        heads=dims.heads,
        kv_heads=dims.kv_heads or dims.heads,
        head_dim=dims.head_dim or dims.hidden // dims.heads,
        ffn=dims.ffn or 4 * dims.hidden,
        gated=dims.gated,
        vocab=dims.vocab,
        forward_s=dims.layer_forward_s,
        backward_s=dims.layer_backward_s,
        **rest,
    )


#: Norm and positions of the two layers that towers have: Llama's and, without a gate, GPT-2's.
_LAYERS = {True: ("rms", "rope"), False: ("layer", "learned")}


def _refuse_other_layers(model: Model) -> None:
    """Refuse layers whose work is another than a tower's.

    Raises:
        SpecError: names them.
    """
    others = model.norms_behind or model.parallel or model.latent is not None
    if (model.norm, model.position) != _LAYERS[model.gated] or others:
        raise SpecError(
            f"model {model.name}", got=f"layers of the {model.family} family",
            expected="layers like Llama's or GPT-2's, which training plans know",
        )  # fmt: skip


def _of_model(model: Model) -> Tower:
    refuse_experts(model, "training plans know no layers of experts")
    _refuse_other_layers(model)
    return Tower(
        name=model.name,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        gated=model.gated,
        causal=True,
        entry=None,
        exits=((model.vocab, model.hidden),),
        vocab=model.vocab,
    )
