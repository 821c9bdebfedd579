"""What the ``config.json`` of each family says of a model, in the words of `Model`.

Follows transformers 5 (``models/<family>/configuration_*.py``): also where a file leaves a field
out and the class has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from foreplan.datasets.models._config_fields import ConfigFields
from foreplan.datasets.models._expert_config import EXPERT_READERS
from foreplan.datasets.models._latent_config import latent_facts
from foreplan.datasets.models._rotary_config import (
    alternating_facts,
    enlarged_scores,
    rotation_facts,
)
from foreplan.datasets.models._window_config import window_facts
from foreplan.datasets.models.families import SAME_FAMILY

_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "relu": "relu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
)


#: The first files of Gemma name another activation than the models have (transformers,
#: ``configuration_gemma.py``).
_GEMMA_ACTIVATIONS = MappingProxyType({"gelu": "gelu_tanh"})
#: transformers, ``configuration_gpt_oss.py``.
_GPT_OSS_YARN: Mapping[str, object] = MappingProxyType(
    {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
     "original_max_position_embeddings": 4096}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Words:
    """Fields of Llama's likes, and what transformers takes where a file has none.

    Attributes:
        biases: by our name the field that says whether there are such, and its default; norms of
            heads too, where a field says so.
        kv_heads: key and value heads; as many as query heads if ``None``.
        head_dim: features of a head whatever ``hidden_size`` is; its share if ``None``.
        eps: field of what norms add to the variance.
        eps_default: its default.
        activation: default of the MLP's.
        activation_field: which field names it.
        renamed: activations that the family's files name otherwise.
        tied: the head is the embedding's matrix.
        theta: base of the rotation.
        partial: see `rotation_facts`.
        longrope: likewise.
        neighbours: likewise.
    """

    biases: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    kv_heads: int | None = None
    head_dim: int | None = None
    eps: str = "rms_norm_eps"
    eps_default: float = 1e-6
    activation: str = "silu"
    activation_field: str = "hidden_act"
    renamed: Mapping[str, str] = field(default_factory=dict)
    tied: bool = False
    theta: float = 1e4
    partial: float | None = None
    longrope: bool = False
    neighbours: bool = False


def _biases(attention: str, mlp: str = "", *, default: bool = False) -> dict[str, tuple[str, bool]]:
    """Fields of the biases of a layer's attention and, where it can have such, of its MLP."""
    found = {"qkv_bias": (attention, default), "out_bias": (attention, default)}
    return found | ({"mlp_bias": (mlp, default)} if mlp else {})


_GLM = _Words(
    {"qkv_bias": ("attention_bias", True)}, kv_heads=2, head_dim=128, eps_default=0.00000015625,
    partial=0.5, neighbours=True,
)  # fmt: skip
_WORDS: Mapping[str, _Words] = MappingProxyType(
    {
        "llama": _Words(_biases("attention_bias", "mlp_bias")),
        "mistral": _Words(kv_heads=8),
        "qwen2": _Words(kv_heads=32),
        "qwen3": _Words(_biases("attention_bias"), kv_heads=32, head_dim=128),
        "mixtral": _Words(kv_heads=8, eps_default=1e-5, theta=1e6),
        "qwen2_moe": _Words({"qkv_bias": ("qkv_bias", True)}, kv_heads=16),
        "qwen3_moe": _Words(_biases("attention_bias"), kv_heads=4),
        "olmoe": _Words(_biases("attention_bias"), eps_default=1e-5),
        "deepseek": _Words(),
        "deepseek_v2": _Words(_biases("attention_bias"), neighbours=True),
        "deepseek_v3": _Words(_biases("attention_bias"), neighbours=True),
        "gpt_oss": _Words(
            _biases("attention_bias", default=True), kv_heads=8, head_dim=64, eps_default=1e-5,
            renamed=MappingProxyType({"silu": "clamped_silu"}), theta=1.5e5,
        ),
        "phi3": _Words(eps_default=1e-5, partial=1.0, longrope=True),
        "seed_oss": _Words(
            {"qkv_bias": ("attention_bias", True), "out_bias": ("attention_out_bias", False),
             "mlp_bias": ("mlp_bias", False)},
            kv_heads=8, head_dim=128,
        ),
        "smollm3": _Words(
            _biases("attention_bias", "mlp_bias"), kv_heads=4, tied=True, theta=2e6
        ),
        "ernie4_5": _Words(
            _biases("use_bias", "use_bias"), kv_heads=2, head_dim=128, eps_default=1e-5, tied=True,
            theta=5e5, neighbours=True,
        ),
        "glm": _GLM,
        "glm4": _GLM,
        "glm4_moe": _Words(
            {"qkv_bias": ("attention_bias", False), "qk_norm": ("use_qk_norm", False)}, kv_heads=8,
            eps_default=1e-5, partial=0.5,
        ),
        "granite": _Words(_biases("attention_bias", "mlp_bias")),
        "gemma": _Words(
            _biases("attention_bias"), kv_heads=16, head_dim=256, activation="gelu_pytorch_tanh",
            renamed=_GEMMA_ACTIVATIONS, tied=True,
        ),
        "gemma2": _Words(
            _biases("attention_bias"), kv_heads=4, head_dim=256, activation="gelu_pytorch_tanh",
            activation_field="hidden_activation", tied=True,
        ),
        "gemma3_text": _Words(
            _biases("attention_bias"), kv_heads=4, head_dim=256, activation="gelu_pytorch_tanh",
            activation_field="hidden_activation", tied=True,
        ),
        "olmo2": _Words(_biases("attention_bias"), eps_default=1e-5),
        "starcoder2": _Words(
            _biases("use_bias", "use_bias", default=True), kv_heads=2, eps="norm_epsilon",
            eps_default=1e-5, activation="gelu_pytorch_tanh", tied=True,
        ),
    }
)  # fmt: skip


def _llama(config: ConfigFields) -> dict[str, object]:
    """Llama and its likes: the same fields but for `_WORDS`, window and experts."""
    family = str(config.fields["model_type"])
    words = _WORDS[family]
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    # A null is no default where a class has one: it means what the field does without it.
    share, stated = max(hidden // heads, 1), config.fields.get("head_dim", words.head_dim)
    head_dim = config.size("head_dim", share if stated is None else words.head_dim)
    if stated is None and hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    facts: dict[str, object] = {
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _kv_heads(config, heads, words.kv_heads),
        "head_dim": head_dim,
        "ffn": config.size("intermediate_size"),
        "vocab": config.size("vocab_size"),
        "max_positions": config.size("max_position_embeddings"),
        "norm_eps": config.fields.get(words.eps, words.eps_default),
        "activation": config.choice(
            words.activation_field, words.activation, {**_ACTIVATIONS, **words.renamed}
        ),
        "tied": config.flag("tie_word_embeddings", words.tied),
        **window_facts(config, family),
        **_rotation(config, family, head_dim),
        **{ours: config.flag(*asked) for ours, asked in words.biases.items()},
    }
    if scalars := _scalars(config, family, hidden):
        facts["scalars"] = scalars
    if family in EXPERT_READERS:
        facts["experts"] = EXPERT_READERS[family](config)
    return facts


def _kv_heads(config: ConfigFields, heads: int, default: int | None) -> int:
    """Key and value heads: of a null as many as query heads, of no field the family's default."""
    field = "num_key_value_heads"
    if field in config.fields or default is None:
        return config.size(field, heads)
    if heads % default:
        raise config.error(
            field, f"a divisor of num_attention_heads = {heads}",
            fix=f"state it: without it transformers takes {default}",
        )  # fmt: skip
    return default


def _deepseek(config: ConfigFields) -> dict[str, object]:
    """DeepSeek-V2 and V3: Llama's likes but for their attention."""
    stated = str(config.fields["model_type"])
    family, found = SAME_FAMILY.get(stated, stated), latent_facts(config, enlarged_scores(config))
    like = {"model_type": family, "head_dim": found["head_dim"]}
    facts = _llama(ConfigFields(config.where, {**config.fields, **like})) | found
    if family == "deepseek_v3" and not config.flag("rope_interleave", True):
        facts["rotary"] = {}
    return facts


def _gpt_oss(config: ConfigFields) -> dict[str, object]:
    """Llama's likes, whose rotation is stretched where the file says nothing of it."""
    fields = dict(config.fields)
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields["rope_scaling"] = dict(_GPT_OSS_YARN)
    return _llama(ConfigFields(config.where, fields))


def _gemma2(config: ConfigFields) -> dict[str, object]:
    """Llama's likes, whose scores and logits are capped; a null caps nothing."""
    asked = {
        "score_cap": ("attn_logit_softcapping", 50.0),
        "logit_cap": ("final_logit_softcapping", 30.0),
    }
    caps = {
        ours: config.factor(field, default)
        for ours, (field, default) in asked.items()
        if config.fields.get(field, default) is not None
    }
    return _llama(config) | caps


def _rotation(config: ConfigFields, family: str, head_dim: int) -> dict[str, object]:
    words = _WORDS[family]
    if family == "gemma3_text":
        return alternating_facts(config, head_dim)
    return rotation_facts(
        config, words.theta, head_dim, partial=words.partial, longrope=words.longrope,
        neighbours=words.neighbours,
    )  # fmt: skip


def _scalars(config: ConfigFields, family: str, hidden: int) -> dict[str, float]:
    """See `Scalars`; none of a family without such."""
    if family in ("gemma", "gemma2", "gemma3_text"):
        found = {"embedding": hidden**0.5, "norm": 1.0}
        if family != "gemma":
            found["attention"] = config.factor("query_pre_attn_scalar", 256) ** -0.5
        return found
    if family != "granite":
        return {}
    return {
        "embedding": config.factor("embedding_multiplier"),
        "attention": config.factor("attention_multiplier"),
        "residual": config.factor("residual_multiplier"),
        "logits": 1 / config.factor("logits_scaling"),
    }


def _equal_heads(config: ConfigFields, width: str, count: str) -> dict[str, int]:
    """Sizes of heads that share the width, as many of keys and values as of queries."""
    hidden, heads = config.size(width), config.size(count)
    if hidden % heads:
        raise config.error(count, f"a divisor of {width} = {hidden}")
    return {"hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads}


def _opt(config: ConfigFields) -> dict[str, object]:
    heads = _equal_heads(config, "hidden_size", "num_attention_heads")
    hidden = heads["hidden"]
    if config.size("word_embed_proj_dim", hidden) != hidden:
        raise config.error("word_embed_proj_dim", f"hidden_size = {hidden}: no projection")
    bias = config.flag("enable_bias", True)
    return {
        "layers": config.size("num_hidden_layers"),
        **heads,
        "ffn": config.size("ffn_dim"),
        "vocab": config.size("vocab_size"),
        "max_positions": config.size("max_position_embeddings"),
        "norm_eps": 1e-5,  # torch.nn.LayerNorm's default; OPT has no field for it
        "activation": config.choice("activation_function", "relu", _ACTIVATIONS),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _gpt_neox(config: ConfigFields) -> dict[str, object]:
    heads = _equal_heads(config, "hidden_size", "num_attention_heads")
    own = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    renamed = {own.get(name, name): value for name, value in config.fields.items()}
    bias = config.flag("attention_bias", True)
    return {
        "layers": config.size("num_hidden_layers"),
        **heads,
        "ffn": config.size("intermediate_size"),
        "vocab": config.size("vocab_size"),
        "max_positions": config.size("max_position_embeddings"),
        "norm_eps": config.fields.get("layer_norm_eps", 1e-5),
        "activation": config.choice("hidden_act", "gelu", _ACTIVATIONS),
        "parallel": config.flag("use_parallel_residual", True),
        "tied": config.flag("tie_word_embeddings", False),
        "qkv_bias": bias,
        "out_bias": bias,
        **rotation_facts(ConfigFields(config.where, renamed), 1e4, heads["head_dim"], partial=0.25),
    }


def _gpt2(config: ConfigFields) -> dict[str, object]:
    heads = _equal_heads(config, "n_embd", "n_head")
    return {
        "layers": config.size("n_layer"),
        **heads,
        "ffn": config.size("n_inner", 4 * heads["hidden"]),
        "vocab": config.size("vocab_size"),
        "max_positions": config.size("n_positions"),
        "norm_eps": config.fields.get("layer_norm_epsilon", 1e-5),
        "activation": config.choice("activation_function", "gelu_new", _ACTIVATIONS),
        "tied": config.flag("tie_word_embeddings", True),
    }


#: Reads a configuration of a family.
FAMILY_READERS: Mapping[str, Callable[[ConfigFields], dict[str, object]]] = MappingProxyType(
    {
        **dict.fromkeys(_WORDS, _llama),
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "gpt_oss": _gpt_oss,
        "gemma2": _gemma2,
        "opt": _opt,
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
    }
)
