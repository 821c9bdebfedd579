"""`Model`: what a decoder-only language model is made of, and how many parameters each part has.

Read from a Hugging Face folder or from the zoo with `load_model`, without loading a weight and
without importing torch or transformers. Parameter counts are exact: they equal those of the module
that transformers builds from the same configuration.

Shape legend: a linear layer's weight is ``[n, k]`` with ``n`` output and ``k`` input features, as
``torch.nn.Linear`` stores it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from foreplan.datasets.dtypes import cache_bytes
from foreplan.datasets.experts import Experts, LayerClass
from foreplan.datasets.models.families import Family
from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.linear_shape import LinearShape
from foreplan.datasets.models.rotary import RopeScaling, Rotary, RotationKind
from foreplan.datasets.models.scalars import Scalars
from foreplan.datasets.specs import StrictModel

#: Bounds of a described model (theory: far beyond any published one): products of two sizes stay
#: below the 2^63 bytes that torch counts, and a list of every layer's operators fits into memory.
MOST_LAYERS, LARGEST_SIZE = 10_000, 2**24
#: Activations of an MLP with a gate and without.
_GATED, _PLAIN = ("silu", "gelu_tanh", "clamped_silu"), ("relu", "gelu", "gelu_tanh")
#: Those of experts.
_OF_EXPERTS = ("silu", "clamped_silu")
Size = Annotated[int, Field(gt=0, le=LARGEST_SIZE)]


class Model(StrictModel):
    """A decoder-only language model, described without its weights.

    Every field is validated when the object is built; a wrong one is a pydantic error there and a
    one-line `SpecError` through `load_model`.

    Attributes:
        name: what a reader calls it.
        family: architecture, as transformers names it.
        layers: decoder layers.
        hidden: features of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: features of one head; need not be ``hidden / heads``.
        ffn: features inside the MLP of a dense layer.
        vocab: rows of the embedding and of the head.
        max_positions: longest sequence.
        norm: ``rms`` (scale only) or ``layer`` (scale and shift).
        norm_eps: what the norms add to the variance.
        norms: where a layer's norms are: ``before`` attention and MLP, ``behind`` them (what they
            add to the residual stream is normed), or on ``both`` sides.
        parallel: the MLP takes what the attention takes, the layer's input.
        gated: the MLP is ``down(act(gate(x)) * up(x))`` rather than ``down(act(up(x)))``.
        activation: of the MLP; ``gelu_tanh`` is the tanh approximation, ``clamped_silu`` that of
            gpt-oss: ``(up + 1) * gate * sigmoid(1.702 * gate)`` of values clamped at 7.
        qkv_bias: bias of the fused query, key and value projection.
        out_bias: bias of the attention's output projection.
        mlp_bias: bias of the MLP's linears.
        sinks: every head has a learned score of no key that takes part in the softmax.
        score_cap: soft-capping of attention: the products of queries and keys, scaled, become
            ``cap * tanh(score / cap)``.
        logit_cap: likewise the logits.
        qk_norm: RMS norm over each head of queries and keys, before the rotation.
        qk_norm_whole: that norm is over all heads together (OLMoE).
        tied: the head is the embedding's own matrix.
        position: rotary, or learned vectors added to the embedding.
        rope_theta: base of the rotary frequencies.
        rotary: which features of a head are turned and in which layers, where not all.
        rope_scaling: how they are stretched, if at all.
        scalars: factors of embedding, attention, residual stream and logits.
        position_offset: unused rows in front of the learned positions (OPT: 2).
        sliding_window: keys a query sees at most; ``None`` = all.
        window_layers: 0-based layers that have the window, ascending; none listed = every layer.
        latent: of an attention over latents, of which heads are made; ``head_dim`` are then the
            features that are turned; ``None`` = keys and values are cached.
        experts: of the layers whose MLP is a mixture of experts; ``None`` = every layer is dense.
        weights: ``trained`` when the folder holds safetensors, else ``random``: times are real,
            tokens mean nothing.
        dtype: dtype of the published checkpoint.
        checkpoint_bytes: bytes of all parameters as stored in the folder, or ``None``.
        path: the folder, or ``None`` for a zoo model.
    """

    name: str = Field(min_length=1)
    family: Family
    layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)]
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn: Size
    vocab: Size
    max_positions: Size
    norm: Literal["rms", "layer"]
    norm_eps: PositiveFloat
    norms: Literal["before", "behind", "both"] = "before"
    parallel: bool = False
    gated: bool
    activation: Literal["silu", "relu", "gelu", "gelu_tanh", "clamped_silu"]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    score_cap: PositiveFloat | None = None
    logit_cap: PositiveFloat | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    tied: bool
    position: Literal["rope", "learned"]
    rope_theta: PositiveFloat = 10000.0
    rotary: Rotary = Rotary()
    rope_scaling: RopeScaling | None = None
    scalars: Scalars = Scalars()
    position_offset: int = Field(default=0, ge=0)
    sliding_window: PositiveInt | None = None
    window_layers: tuple[int, ...] = ()
    latent: LatentAttention | None = None
    experts: Experts | None = None
    weights: Literal["trained", "random"] = "random"
    dtype: Literal["fp32", "fp16", "bf16"]
    checkpoint_bytes: PositiveInt | None = None
    path: str | None = None

    @field_validator("kv_heads")
    @classmethod
    def _divides_heads(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads")
        if heads is not None and heads % value:
            raise ValueError(f"a divisor of heads = {heads}")
        return value

    @field_validator("activation")
    @classmethod
    def _has_a_kernel(cls, value: str, info: ValidationInfo) -> str:
        gated = info.data.get("gated")
        if gated is not None and value not in (_GATED if gated else _PLAIN):
            raise ValueError(
                f"{', '.join(_GATED[:-1])} or {_GATED[-1]}, the activations with a gated kernel"
                if gated
                else "relu, gelu or gelu_tanh for an MLP without gate"
            )
        return value

    @field_validator("position")
    @classmethod
    def _rotates_pairs(cls, value: str, info: ValidationInfo) -> str:
        head_dim = info.data.get("head_dim", 0)
        if value == "rope" and head_dim % 2:
            raise ValueError(f"learned, because head_dim = {head_dim} is odd and rope turns pairs")
        return value

    @field_validator("rotary")
    @classmethod
    def _fits_heads(cls, value: Rotary, info: ValidationInfo) -> Rotary:
        head_dim, width = info.data.get("head_dim", 0), value.width
        if width is not None and (width % 2 or width > head_dim):
            raise ValueError(f"an even width of at most head_dim = {head_dim}")
        if bool(value.local_layers) != (value.local_theta is not None):
            raise ValueError("local_layers together with local_theta")
        return value

    @field_validator("rope_scaling")
    @classmethod
    def _fits_pairs(cls, value: RopeScaling | None, info: ValidationInfo) -> RopeScaling | None:
        rotary: Rotary | None = info.data.get("rotary")
        if value is not None and value.kind == "longrope" and rotary is not None:
            pairs = (rotary.width or info.data.get("head_dim", 0)) // 2
            if len(value.short_factors) != pairs:
                raise ValueError(f"{pairs} short_factors, one for each pair of features")
        if value is not None and value.kind == "yarn" and info.data.get("rope_theta", 2) <= 1:
            raise ValueError("another kind, because yarn counts turns by a rope_theta above 1")
        return value

    @field_validator("window_layers")
    @classmethod
    def _slide(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        layers = info.data.get("layers", MOST_LAYERS)
        inside = all(0 <= layer < layers for layer in value)
        if value and info.data.get("sliding_window") is None:
            raise ValueError("none: there is no sliding_window")
        if not inside or list(value) != sorted(set(value)):
            raise ValueError(f"different layers, ascending, of {layers}")
        return value

    @field_validator("score_cap")
    @classmethod
    def _scores_one_way(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("sinks"):
            raise ValueError("none: no kernel has both sinks and capped scores")
        return value

    @field_validator("latent")
    @classmethod
    def _turns_shared_key(
        cls, value: LatentAttention | None, info: ValidationInfo
    ) -> LatentAttention | None:
        return value if value is None else value.beside(info.data)

    @field_validator("experts")
    @classmethod
    def _has_such_layers(cls, value: Experts | None, info: ValidationInfo) -> Experts | None:
        if value is None:
            return value
        activation = info.data.get("activation", "silu")  # absent where it is wrong itself
        if not info.data.get("gated", True) or activation not in _OF_EXPERTS:
            raise ValueError(
                f"none: only experts with a gate and {' or '.join(_OF_EXPERTS)} are supported"
            )
        if info.data.get("norms", "before") != "before" or info.data.get("parallel"):
            raise ValueError("none: experts come behind the attention, with norms in front")
        layers = info.data.get("layers")
        if layers is not None and max(value.dense_layers, default=0) >= layers:
            raise ValueError(f"dense_layers below the {layers} layers")
        return value

    # Sizes ------------------------------------------------------------------------------------

    @property
    def layer_classes(self) -> tuple[LayerClass, ...]:
        """The class of every layer."""
        experts = self.experts
        return tuple(
            "dense" if experts is None else experts.class_of(layer) for layer in range(self.layers)
        )

    @property
    def attention_linears(self) -> tuple[LinearShape, ...]:
        """The fused linears that every decoder layer has: qkv, out; with latents theirs."""
        if self.latent is not None:
            return self.latent.linears(
                self.heads, self.hidden, bias=self.qkv_bias, out_bias=self.out_bias
            )
        inner = self.heads * self.head_dim
        qkv = inner + 2 * self.kv_heads * self.head_dim
        return (
            LinearShape("qkv", qkv, self.hidden, self.qkv_bias),
            LinearShape("out", self.hidden, inner, self.out_bias),
        )

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """The fused linears of one dense layer in the order they run: qkv, out, up, down.

        A gated MLP's ``up`` computes gate and up in one product, gate first: ``n = 2 * ffn``.
        """
        return (*self.attention_linears, *self._mlp("", self.ffn))

    @property
    def expert_linears(self) -> tuple[LinearShape, ...]:
        """The fused linears of one routed expert: up, down; none without experts."""
        return () if self.experts is None else self._mlp("", self.experts.ffn)

    def linears_of(self, layer_class: LayerClass) -> tuple[LinearShape, ...]:
        """The fused linears that every row goes through in a layer of a class.

        Dense: `linears`. MoE: qkv, out and, with a shared expert, shared_up, shared_down; those of
        the routed experts are `expert_linears`, ``experts.count`` times.
        """
        if layer_class == "dense" or self.experts is None:
            return self.linears
        shared = self.experts.shared_ffn
        return (*self.attention_linears, *(self._mlp("shared_", shared) if shared else ()))

    @property
    def every_linear(self) -> tuple[LinearShape, ...]:
        """One of each fused linear that a layer of any class of this model has."""
        found = [s for c in sorted(set(self.layer_classes)) for s in self.linears_of(c)]
        return tuple(dict.fromkeys([*found, *self.expert_linears]))

    def _mlp(self, prefix: str, ffn: int) -> tuple[LinearShape, ...]:
        up = 2 * ffn if self.gated else ffn
        return (
            LinearShape(f"{prefix}up", up, self.hidden, self.mlp_bias),
            LinearShape(f"{prefix}down", self.hidden, ffn, self.mlp_bias),
        )

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the residual stream."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def norms_before(self) -> bool:
        """Whether attention and MLP have norms before them."""
        return self.norms != "behind"

    @property
    def norms_behind(self) -> bool:
        """Whether attention and MLP have norms behind them."""
        return self.norms != "before"

    @property
    def linear_parameters(self) -> int:
        """Weights and biases of one dense layer's linears: what its precision applies to."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one dense layer."""
        return self.parameters_of("dense")

    def parameters_of(self, layer_class: LayerClass, *, active: bool = False) -> int:
        """Parameters of one layer of a class.

        Args:
            layer_class: of the layer.
            active: count only the experts that a row goes through.
        """
        always = sum(linear.parameters for linear in self.linears_of(layer_class))
        always += (2 * self.norms_before + 2 * self.norms_behind) * self.norm_parameters
        if self.qk_norm:
            always += sum(self.head_norm_sizes)
        if self.latent is not None:
            always += self.latent.beside_linears(self.heads)
        if self.sinks:
            always += self.heads
        if layer_class == "dense" or self.experts is None:
            return always
        each = sum(linear.parameters for linear in self.expert_linears)
        router = self.experts.count + (1 if self.experts.shared_gate else 0)
        used = self.experts.active if active else self.experts.count
        if self.experts.routing.biased:
            always += self.experts.count
        return always + router * self.hidden + used * each

    @property
    def head_norm_sizes(self) -> tuple[int, int]:
        """Weights of the norms over queries and over keys, where there are such norms."""
        if self.qk_norm_whole:
            return self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.head_dim, self.head_dim

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table, 0 with rotary positions."""
        return self.max_positions + self.position_offset if self.position == "learned" else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of learned positions."""
        return (self.vocab + self.position_rows) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters that the last stage holds after its layers: final norm and head.

        A tied head counts in full, because the stage needs the matrix whoever else has it.
        """
        return self.norm_parameters + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Distinct parameters of the whole model; a tied head counts once."""
        return self._total(active=False)

    @property
    def active_parameters(self) -> int:
        """Those of `parameters` that one token goes through: of the experts, the active ones."""
        return self._total(active=True)

    def _total(self, *, active: bool) -> int:
        shared = self.vocab * self.hidden if self.tied else 0
        layers = sum(self.parameters_of(c, active=active) for c in self.layer_classes)
        return layers + self.embedding_parameters + self.head_parameters - shared

    def rotations_of(self, start: int, end: int) -> tuple[RotationKind, ...]:
        """Kinds of rotation that layers ``[start, end)`` have; none with learned positions."""
        if self.position != "rope":
            return ()
        return tuple(dict.fromkeys(self.rotary.kind_of(layer) for layer in range(start, end)))

    def kv_bytes_per_token(self, storage: str) -> float:
        """Bytes that one layer's KV cache keeps for one token as ``storage``, with scales."""
        parts, heads, features = self.cache_shape
        return parts * heads * cache_bytes(features, storage)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """What a layer's cache keeps of a token: tensors, heads of each, features of a head."""
        if self.latent is not None:
            return 1, 1, self.latent.cached
        return 2, self.kv_heads, self.head_dim

    @property
    def max_sequence(self) -> int:
        """Longest sequence that the runtime computes as the model does.

        Planners stop where ``longrope`` takes other frequencies.
        """
        most, scaling = self.max_positions, self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            most = min(most, scaling.original_max_positions)
        return most
