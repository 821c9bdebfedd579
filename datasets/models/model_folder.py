"""Reads a Hugging Face folder into a `Model`: its ``config.json`` and safetensors headers.

Follows transformers 5 (``models/<family>/configuration_*.py``) and understands what transformers 4
wrote (``rope_theta`` + ``rope_scaling``, ``torch_dtype``). An option that changes the computation
and is not modelled is an error, never ignored.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from foreplan.datasets.models._config_fields import ConfigFields
from foreplan.datasets.models._expert_config import EXPERT_READERS
from foreplan.datasets.models.checkpoint import Checkpoint, read_checkpoint
from foreplan.datasets.models.families import ARCHITECTURES, FAMILY_FACTS
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_names import check_tensors
from foreplan.datasets.specs import load_document, validate
from foreplan.errors import SpecError

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
    config = ConfigFields(str(file), load_document(file))
    with file.open("rb") as stream:
        if stream.read(len(BOM_UTF8)) == BOM_UTF8:
            raise SpecError(
                str(file), got="a byte order mark", expected="UTF-8 without one, for transformers"
            )
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


def _family(config: ConfigFields) -> str:
    family = config.fields.get("model_type")
    supported = ", ".join(sorted(ARCHITECTURES))
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise config.error(
            "model_type",
            f"a supported architecture: {supported}",
            fix="'foreplan predict' prices a pass of any other network of transformers",
        )
    architectures = config.fields.get("architectures")
    if architectures and not (
        isinstance(architectures, list) and ARCHITECTURES[family] in architectures
    ):
        raise config.error("architectures", f"[{ARCHITECTURES[family]!r}], a language model")
    if config.fields.get("quantization_config") is not None:
        raise config.error(
            "quantization_config", "unquantised weights: Foreplan quantises them itself"
        )
    for field, value in _ONLY.get(family, {}).items():
        if config.fields.get(field, value) != value:
            raise config.error(field, f"{value}: nothing else is supported for {family}")
    return family


def _dtype(config: ConfigFields) -> str:
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


def _llama(config: ConfigFields) -> dict[str, object]:
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
    if family in EXPERT_READERS:
        facts["experts"] = EXPERT_READERS[family](config)
    return facts


#: Key and value heads that transformers takes where the field is missing.
_KV_HEADS = MappingProxyType({"mistral": 8, "mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4})

#: Families without a sliding window in any layer.
_NO_WINDOW = frozenset({"llama", "olmoe", "deepseek"})


def _window(config: ConfigFields, family: str) -> int | None:
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
    if family in EXPERT_READERS:
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


def _rope(config: ConfigFields, base: float) -> dict[str, object]:
    """Rotary base and scaling, from ``rope_parameters`` (transformers 5) or the older fields."""
    new = config.fields.get("rope_parameters")
    field = "rope_parameters" if new is not None else "rope_scaling"
    parameters = new if new is not None else config.fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        raise config.error(field, "one mapping for all layers")
    theta = parameters.get("rope_theta", config.fields.get("rope_theta", base))
    rotated = "partial_rotary_factor"
    if parameters.get(rotated, config.fields.get(rotated, 1)) != 1:
        place = field if rotated in parameters else rotated
        raise config.error(place, f"a {rotated} of 1: whole heads are rotated")
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


def _opt(config: ConfigFields) -> dict[str, object]:
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


def _gpt2(config: ConfigFields) -> dict[str, object]:
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
        **dict.fromkeys(EXPERT_READERS, _llama),
        "opt": _opt,
        "gpt2": _gpt2,
    }
)
