"""Reads a Hugging Face folder into a `Model`: its ``config.json`` and safetensors headers.

Follows transformers 5 (``models/<family>/configuration_*.py``) and understands what transformers 4
wrote (``rope_theta`` + ``rope_scaling``, ``torch_dtype``). An option that changes the computation
and is not modelled is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreplan.datasets.checkpoint import Checkpoint, read_checkpoint
from foreplan.datasets.experts import Experts
from foreplan.datasets.model import FAMILY_FACTS, Model
from foreplan.datasets.specs import load_document, validate
from foreplan.datasets.tensor_names import check_tensors
from foreplan.errors import SpecError

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "deepseek": "DeepseekForCausalLM",
        "opt": "OPTForCausalLM",
        "gpt2": "GPT2LMHeadModel",
    }
)

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

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
)

#: Options that change what is computed: the one value that is modelled, by family.
_ONLY: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "olmoe": MappingProxyType({"clip_qkv": None}),
        "deepseek": MappingProxyType(
            {"scoring_func": "softmax", "moe_layer_freq": 1, "attention_bias": False}
        ),
        "opt": MappingProxyType(
            {
                # False only in opt-350m, which also projects its embedding.
                "do_layer_norm_before": True,
                "layer_norm_elementwise_affine": True,
                "_remove_final_layer_norm": False,
            }
        ),
        "gpt2": MappingProxyType(
            {
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            }
        ),
    }
)


class _Config:
    """A configuration with one-line errors that name file and field."""

    def __init__(self, where: str, fields: Mapping[str, Any]) -> None:
        self.where = where
        self.fields = fields

    def error(self, field: str, expected: str, fix: str | None = None) -> SpecError:
        got = self.fields.get(field, "nothing")
        return SpecError(f"{self.where}: {field}", got=got, expected=expected, fix=fix)

    def size(self, field: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` stands for a missing or null field."""
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, "a whole number of at least 1")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.fields.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def layers(self, field: str) -> tuple[int, ...]:
        """A list of layers; a missing or null field is an empty one."""
        value = self.fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or any(type(layer) is not int for layer in value):
            raise self.error(field, "a list of layers")
        return tuple(value)

    def choice(self, field: str, default: str, choices: Mapping[str, str]) -> str:
        value = self.fields.get(field, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(field, f"one of {', '.join(choices)}")
        return choices[value]


def read_folder(folder: Path) -> Model:
    """Describe the model in a Hugging Face folder.

    Raises:
        SpecError: no or a wrong ``config.json``; an architecture, attention or rotary scaling that
            is not supported; quantised, missing or misshapen tensors.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise SpecError(
            str(folder), got="a folder without config.json", expected="a Hugging Face model folder"
        )
    config = _Config(str(file), load_document(file))
    family = _family(config)
    facts: dict[str, object] = {
        "name": folder.resolve().name or "model",
        "family": family,
        **FAMILY_FACTS[family],
        **_READERS[family](config),
        "dtype": _dtype(config),
        "path": str(folder),
    }
    model = validate(Model, facts, config.where)
    checkpoint = read_checkpoint(folder)
    if checkpoint is None:
        return model
    stored = {
        "weights": "trained",
        "checkpoint_bytes": check_tensors(model, checkpoint),
        "dtype": _stored_dtype(checkpoint),
    }
    return validate(Model, facts | stored, config.where)


def _family(config: _Config) -> str:
    family = config.fields.get("model_type")
    supported = ", ".join(sorted(_ARCHITECTURES))
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise config.error(
            "model_type",
            f"a supported architecture: {supported}",
            fix="capture any other model as a module (foreplan.datasets.capture)",
        )
    architectures = config.fields.get("architectures")
    if architectures and not (
        isinstance(architectures, list) and _ARCHITECTURES[family] in architectures
    ):
        raise config.error("architectures", f"[{_ARCHITECTURES[family]!r}], a language model")
    if config.fields.get("quantization_config") is not None:
        raise config.error(
            "quantization_config", "unquantised weights: Foreplan quantises them itself"
        )
    for field, value in _ONLY.get(family, {}).items():
        if config.fields.get(field, value) != value:
            raise config.error(field, f"{value}: nothing else is supported for {family}")
    return family


def _dtype(config: _Config) -> str:
    field = "dtype" if "dtype" in config.fields else "torch_dtype"
    if config.fields.get(field) in (None, "auto"):
        return "fp32"
    return config.choice(field, "float32", _DTYPES)


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most bytes are stored in; ``config.json`` may say another."""
    total: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.bytes
    return max(sorted(total), key=lambda dtype: total[dtype])


def _llama(config: _Config) -> dict[str, object]:
    """Llama and its likes: the same fields but for biases, head size, window and experts."""
    family = str(config.fields["model_type"])
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    # transformers' own default for Qwen3 is 128 whatever the hidden size.
    head_dim = config.size("head_dim", 128 if family == "qwen3" else hidden // heads)
    if family != "qwen3" and config.fields.get("head_dim") is None and hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    facts: dict[str, object] = {
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        # transformers' default differs by family; a file without the field means no grouping.
        "kv_heads": config.size("num_key_value_heads", _KV_HEADS.get(family, heads)),
        "head_dim": head_dim,
        "ffn": config.size("intermediate_size"),
        "vocab": config.size("vocab_size"),
        "max_positions": config.size("max_position_embeddings"),
        "norm_eps": config.fields.get("rms_norm_eps", 1e-6),
        "activation": config.choice("hidden_act", "silu", _ACTIVATIONS),
        "tied": config.flag("tie_word_embeddings", False),
        "sliding_window": _window(config, family),
        **_rope(config, 1e6 if family == "mixtral" else 1e4),
    }
    if family == "qwen2_moe":
        facts["qkv_bias"] = config.flag("qkv_bias", True)
    if family in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        bias = config.flag("attention_bias", False)
        facts |= {"qkv_bias": bias, "out_bias": bias}
    if family == "llama":
        facts["mlp_bias"] = config.flag("mlp_bias", False)
    if family in _EXPERTS:
        facts["experts"] = _EXPERTS[family](config)
    return facts


def _mixtral(config: _Config) -> Experts:
    return _experts(config, "num_local_experts", 8, 2, config.size("intermediate_size"))


def _qwen_moe(config: _Config) -> Experts:
    """Qwen2-MoE and Qwen3-MoE; only the former has a shared expert."""
    shared = config.fields["model_type"] == "qwen2_moe"
    layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    plain = config.layers("mlp_only_layers")
    return _experts(
        config, "num_experts", 60 if shared else 128, 4 if shared else 8,
        config.size("moe_intermediate_size", 1408 if shared else 768),
        shared_ffn=config.size("shared_expert_intermediate_size", 5632) if shared else 0,
        shared_gate=shared,
        normalise=config.flag("norm_topk_prob", False),
        dense_layers=tuple(i for i in range(layers) if i in plain or (i + 1) % step),
    )  # fmt: skip


def _olmoe(config: _Config) -> Experts:
    return _experts(
        config, "num_experts", 64, 8, config.size("intermediate_size"),
        normalise=config.flag("norm_topk_prob", False),
    )  # fmt: skip


def _deepseek(config: _Config) -> Experts:
    """DeepSeekMoE 16B: ``modeling_deepseek.py`` of its repository (no grouped routing)."""
    ffn = config.size("moe_intermediate_size")
    several = config.fields.get("n_shared_experts")
    dense = config.fields.get("first_k_dense_replace", 0)
    if type(dense) is not int or not 0 <= dense < config.size("num_hidden_layers"):
        raise config.error("first_k_dense_replace", "a number of layers below num_hidden_layers")
    return _experts(
        config, "n_routed_experts", None, None, ffn,
        shared_ffn=0 if several is None else ffn * config.size("n_shared_experts"),
        normalise=config.flag("norm_topk_prob", False),
        dense_layers=tuple(range(dense)),
    )  # fmt: skip


def _experts(
    config: _Config, field: str, count: int | None, active: int | None, ffn: int, **rest: object
) -> Experts:
    """Experts of a configuration; ``count`` and ``active`` are transformers' defaults."""
    layers = config.size("num_hidden_layers")
    if rest.get("dense_layers") == tuple(range(layers)):
        raise config.error(
            "mlp_only_layers", "at least one layer of experts", fix="name the dense model type"
        )
    # transformers 5 writes Qwen3's count under Mixtral's name.
    if config.fields.get(field) is None and "num_local_experts" in config.fields:
        field = "num_local_experts"
    facts = {
        "count": config.size(field, count),
        "active": config.size("num_experts_per_tok", active),
        "ffn": ffn,
        **rest,
    }
    return validate(Experts, facts, config.where)


_EXPERTS = MappingProxyType(
    {
        "mixtral": _mixtral,
        "qwen2_moe": _qwen_moe,
        "qwen3_moe": _qwen_moe,
        "olmoe": _olmoe,
        "deepseek": _deepseek,
    }
)
#: Key and value heads that transformers takes where the field is missing.
_KV_HEADS = MappingProxyType({"mistral": 8, "mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4})


#: Families without a sliding window in any layer.
_NO_WINDOW = frozenset({"llama", "olmoe", "deepseek"})


def _window(config: _Config, family: str) -> int | None:
    if family == "mistral":
        # transformers' default is 4096; a null means full attention.
        if config.fields.get("sliding_window", 4096) is None:
            return None
        return config.size("sliding_window", 4096)
    if family == "mixtral":
        window = config.fields.get("sliding_window")
        return None if window is None else config.size("sliding_window")
    if family in _NO_WINDOW or not config.flag("use_sliding_window", False):
        return None
    if family in _EXPERTS:
        return config.size("sliding_window", 4096)
    layer_types = config.fields.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise config.error("layer_types", "a list of texts")
        if "sliding_attention" not in layer_types:
            return None
        return config.size("sliding_window", 4096)
    if config.size("max_window_layers", 28) >= config.size("num_hidden_layers"):
        return None  # the window begins behind the last layer
    return config.size("sliding_window", 4096)


def _rope(config: _Config, base: float) -> dict[str, object]:
    """Rotary base and scaling, from ``rope_parameters`` (transformers 5) or the older fields."""
    new = config.fields.get("rope_parameters")
    field = "rope_parameters" if new is not None else "rope_scaling"
    parameters = new if new is not None else config.fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        raise config.error(field, "one mapping for all layers")
    theta = parameters.get("rope_theta", config.fields.get("rope_theta", base))
    if parameters.get("partial_rotary_factor", config.fields.get("partial_rotary_factor", 1)) != 1:
        raise config.error(field, "a partial_rotary_factor of 1: whole heads are rotated")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3"):
        raise config.error(field, "a rope_type of default, linear or llama3")
    ours = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    }
    needed = list(ours) if kind == "llama3" else ["factor"]
    missing = [name for name in needed if name not in parameters]
    if missing:
        raise config.error(field, f"{', '.join(missing)} too, for rope_type {kind}")
    scaling = {ours[name]: parameters[name] for name in needed}
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, **scaling}}


def _opt(config: _Config) -> dict[str, object]:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    if config.size("word_embed_proj_dim", hidden) != hidden:
        raise config.error("word_embed_proj_dim", f"hidden_size = {hidden}: no projection")
    bias = config.flag("enable_bias", True)
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
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


def _gpt2(config: _Config) -> dict[str, object]:
    hidden, heads = config.size("n_embd"), config.size("n_head")
    if hidden % heads:
        raise config.error("n_head", f"a divisor of n_embd = {hidden}")
    return {
        "layers": config.size("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": config.size("n_inner", 4 * hidden),
        "vocab": config.size("vocab_size"),
        "max_positions": config.size("n_positions"),
        "norm_eps": config.fields.get("layer_norm_epsilon", 1e-5),
        "activation": config.choice("activation_function", "gelu_new", _ACTIVATIONS),
        "tied": config.flag("tie_word_embeddings", True),
    }


_READERS = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _llama,
        "qwen2": _llama,
        "qwen3": _llama,
        **dict.fromkeys(_EXPERTS, _llama),
        "opt": _opt,
        "gpt2": _gpt2,
    }
)
