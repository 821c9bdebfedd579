"""`TensorSource`: which tensors of a checkpoint make up one of ours, family by family.

The runtime knows every decoder by the same few names (``qkv.weight``, ``norm1.bias``, ...) with
fused linears. This table says where they come from: which tensors, stacked along the output
features, and whether they are stored transposed, as GPT-2's ``Conv1D`` does (transformers,
``models/<family>/modeling_*.py`` and ``pytorch_utils.Conv1D``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from foreplan.datasets.models.checkpoint import Checkpoint
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one of our tensors comes from.

    Attributes:
        names: tensors of the checkpoint, stacked along dimension 0 (after transposing).
        rows: extent of each of them along dimension 0.
        shape: of the result.
        transposed: stored as ``[k, n]`` rather than ``[n, k]``.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    def stored_shape(self, index: int) -> tuple[int, ...]:
        """Shape of ``names[index]`` in the checkpoint."""
        shape = (self.rows[index], *self.shape[1:])
        return shape[::-1] if self.transposed else shape


_LLAMA_LAYER = {
    "norm1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_OPT_LAYER = {
    "norm1": ("self_attn_layer_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.out_proj",),
    "norm2": ("final_layer_norm",),
    "up": ("fc1",),
    "down": ("fc2",),
}
_GPT2_LAYER = {
    "norm1": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "out": ("attn.c_proj",),
    "norm2": ("ln_2",),
    "up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
}


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of a family: ``prefix`` of the base model, then these parts."""

    prefix: str
    layers: str
    layer: Mapping[str, tuple[str, ...]]
    embed: str
    positions: str
    final_norm: str


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """Names within a MoE layer; ``mlp`` are gate, up and down of one expert."""

    router: str
    expert: str
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = ""
    shared_gate: str = ""


_EXPERTS: Mapping[str, _ExpertNames] = MappingProxyType(
    {
        "mixtral": _ExpertNames(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")
        ),
        "qwen2_moe": _ExpertNames(
            "mlp.gate", "mlp.experts.{}.", shared="mlp.shared_expert.",
            shared_gate="mlp.shared_expert_gate",
        ),
        "qwen3_moe": _ExpertNames("mlp.gate", "mlp.experts.{}."),
        "olmoe": _ExpertNames("mlp.gate", "mlp.experts.{}."),
        "deepseek": _ExpertNames("mlp.gate", "mlp.experts.{}.", shared="mlp.shared_experts."),
    }
)  # fmt: skip

_LLAMA = _Names("model.", "layers", _LLAMA_LAYER, "embed_tokens", "", "norm")
_FAMILIES: Mapping[str, _Names] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        **dict.fromkeys(_EXPERTS, _LLAMA),
        "opt": _Names(
            "model.",
            "decoder.layers",
            _OPT_LAYER,
            "decoder.embed_tokens",
            "decoder.embed_positions",
            "decoder.final_layer_norm",
        ),
        "gpt2": _Names("transformer.", "h", _GPT2_LAYER, "wte", "wpe", "ln_f"),
    }
)


def layer_sources(model: Model, layer: int, prefix: str | None = None) -> dict[str, TensorSource]:
    """Where the tensors of decoder layer ``layer`` come from, by our name, in the order they run.

    Args:
        model: the model.
        layer: 0-based.
        prefix: of the base model's names; the family's own if ``None`` (see `find_prefix`).
    """
    names = _FAMILIES[model.family]
    base = f"{names.prefix if prefix is None else prefix}{names.layers}.{layer}."
    layer_class = model.layer_classes[layer]
    linears = {linear.name: linear for linear in model.linears_of(layer_class)}
    sources: dict[str, TensorSource] = {}
    for part, parts in names.layer.items():
        full = tuple(base + name for name in parts)
        if part in ("up", "down") and layer_class == "moe":
            continue
        if part in linears:
            linear = linears[part]
            rows = _split(model, part, len(parts), linear.n)
            stored = tuple(f"{name}.weight" for name in full)
            sources[f"{part}.weight"] = TensorSource(
                stored, rows, (linear.n, linear.k), transposed=model.family == "gpt2"
            )
            if linear.bias:
                biases = tuple(f"{name}.bias" for name in full)
                sources[f"{part}.bias"] = TensorSource(biases, rows, (linear.n,))
        elif part in ("q_norm", "k_norm"):
            if model.qk_norm:
                size = model.head_norm_sizes[0 if part == "q_norm" else 1]
                sources[f"{part}.weight"] = _vector(f"{full[0]}.weight", size)
        else:
            sources.update(_norm(model, part, full[0]))
    return sources if layer_class == "dense" else sources | _expert_sources(model, base)


def _expert_sources(model: Model, base: str) -> dict[str, TensorSource]:
    """``router``, ``expert.0.up``, ``expert.0.down``, ..., and those of a shared expert."""
    experts, names = model.experts, _EXPERTS[model.family]
    assert experts is not None  # the layer is a MoE layer
    hidden = model.hidden
    sources = {"router.weight": _matrix(f"{base}{names.router}.weight", experts.count, hidden)}
    places = [(f"expert.{e}.", base + names.expert.format(e)) for e in range(experts.count)]
    widths = [experts.ffn] * experts.count
    if experts.shared_ffn:
        places.append(("shared_", base + names.shared))
        widths.append(experts.shared_ffn)
    for (ours, theirs), ffn in zip(places, widths, strict=True):
        gate, up, down = (f"{theirs}{name}.weight" for name in names.mlp)
        sources[f"{ours}up.weight"] = TensorSource((gate, up), (ffn, ffn), (2 * ffn, hidden))
        sources[f"{ours}down.weight"] = _matrix(down, hidden, ffn)
    if experts.shared_gate:
        gate = f"{base}{names.shared_gate}.weight"
        sources["shared_gate.weight"] = _matrix(gate, 1, hidden)
    return sources


def embedding_sources(model: Model, prefix: str | None = None) -> dict[str, TensorSource]:
    """Where the token embedding and learned positions come from."""
    names = _FAMILIES[model.family]
    base = names.prefix if prefix is None else prefix
    sources = {"embed.weight": _matrix(f"{base}{names.embed}.weight", model.vocab, model.hidden)}
    if model.position == "learned":
        sources["positions.weight"] = _matrix(
            f"{base}{names.positions}.weight", model.position_rows, model.hidden
        )
    return sources


def head_sources(model: Model, prefix: str | None = None) -> dict[str, TensorSource]:
    """Where the final norm and the head come from; a tied head is the embedding's tensor."""
    names = _FAMILIES[model.family]
    base = names.prefix if prefix is None else prefix
    head = f"{base}{names.embed}.weight" if model.tied else "lm_head.weight"
    return {
        **_norm(model, "final_norm", f"{base}{names.final_norm}"),
        "head.weight": _matrix(head, model.vocab, model.hidden),
    }


def find_prefix(model: Model, checkpoint: Checkpoint) -> str:
    """Prefix of the checkpoint's names: a base model saved alone has none (``h.0...`` in GPT-2).

    Raises:
        SpecError: the embedding is there under neither name.
    """
    own = _FAMILIES[model.family].prefix
    bare = embedding_sources(model, "")["embed.weight"].names[0]
    if own + bare not in checkpoint.tensors and bare in checkpoint.tensors:
        return ""
    checkpoint.tensor(own + bare)
    return own


def check_tensors(model: Model, checkpoint: Checkpoint) -> int:
    """Check that every tensor of the model is there, in its shape and not quantised.

    Returns:
        Bytes of all of them as stored, a tied head once; buffers that a checkpoint may also hold
        are not counted.

    Raises:
        SpecError: one is missing, has another shape, or is stored in another dtype than fp32,
            fp16 or bf16.
    """
    prefix = find_prefix(model, checkpoint)
    groups = [embedding_sources(model, prefix), head_sources(model, prefix)]
    groups += [layer_sources(model, layer, prefix) for layer in range(model.layers)]
    total: dict[str, int] = {}
    for source in (source for group in groups for source in group.values()):
        for index, name in enumerate(source.names):
            stored = checkpoint.tensor(name)
            expected = source.stored_shape(index)
            if stored.shape != expected:
                raise SpecError(
                    f"{stored.file}: {name}.shape",
                    got=list(stored.shape),
                    expected=f"{list(expected)}, as config.json implies",
                )
            if stored.dtype not in ("fp32", "fp16", "bf16"):
                raise SpecError(
                    f"{stored.file}: {name}.dtype",
                    got=stored.dtype,
                    expected="F32, F16 or BF16: Foreplan quantises the weights itself",
                )
            total[name] = stored.bytes
    return sum(total.values())


def _split(model: Model, part: str, parts: int, n: int) -> tuple[int, ...]:
    """Output features of each of the ``parts`` tensors that make up a fused linear."""
    if parts == 1:
        return (n,)
    if part == "qkv":
        kv = model.kv_heads * model.head_dim
        return (model.heads * model.head_dim, kv, kv)
    return (n // parts,) * parts


def _vector(name: str, size: int) -> TensorSource:
    return TensorSource((name,), (size,), (size,))


def _matrix(name: str, n: int, k: int) -> TensorSource:
    return TensorSource((name,), (n,), (n, k))


def _norm(model: Model, ours: str, name: str) -> dict[str, TensorSource]:
    sources = {f"{ours}.weight": _vector(f"{name}.weight", model.hidden)}
    if model.norm == "layer":
        sources[f"{ours}.bias"] = _vector(f"{name}.bias", model.hidden)
    return sources
