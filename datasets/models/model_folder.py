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
from foreplan.datasets.models._family_config import FAMILY_READERS
from foreplan.datasets.models.checkpoint import Checkpoint, read_checkpoint
from foreplan.datasets.models.families import ARCHITECTURES, FAMILY_FACTS, SAME_FAMILY
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_names import check_tensors
from foreplan.datasets.specs import load_document, validate
from foreplan.errors import SpecError

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
)

#: Options that change what is computed: the one value that is modelled, by family.
_ONLY: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gemma3_text": MappingProxyType(
            {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "use_bidirectional_attention": False,
            }
        ),
        "gemma2": MappingProxyType({"use_bidirectional_attention": False}),
        "gpt_oss": MappingProxyType(
            {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
        ),
        "gemma": MappingProxyType({"use_bidirectional_attention": False}),
        "olmoe": MappingProxyType({"clip_qkv": None}),
        "deepseek": MappingProxyType(
            {"scoring_func": "softmax", "moe_layer_freq": 1, "attention_bias": False}
        ),
        "deepseek_v2": MappingProxyType(
            {
                "scoring_func": "softmax",
                "moe_layer_freq": 1,
                "norm_topk_prob": False,
                "mlp_bias": False,
            }
        ),
        "deepseek_v3": MappingProxyType(
            {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
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
#: Ways of storing weights that are read as the bf16 they stand for, by family.
_READ_AS_BF16: Mapping[str, tuple[str, ...]] = MappingProxyType({"gpt_oss": ("mxfp4",)})


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
        **FAMILY_READERS[family](config),
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
    stated = config.fields.get("model_type")
    family = SAME_FAMILY.get(stated, stated) if isinstance(stated, str) else stated
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
        raise config.unmodelled("architectures", f"[{ARCHITECTURES[family]!r}], a language model")
    stored = config.fields.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if stored is not None and method not in _READ_AS_BF16.get(family, ()):
        raise config.error(
            "quantization_config", "unquantised weights: Foreplan quantises them itself"
        )
    for field, value in _ONLY.get(family, {}).items():
        if (config.fields.get(field, value) or None) != (value or None):
            raise config.unmodelled(field, f"{value}: nothing else is supported for {family}")
    return family


def _dtype(config: ConfigFields) -> str:
    field = "dtype" if "dtype" in config.fields else "torch_dtype"
    if config.fields.get(field) in (None, "auto"):
        return "fp32"
    return config.choice(field, "float32", _DTYPES)


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most bytes are stored in; ``config.json`` may say another.

    MXFP4 counts as the bf16 that it is read as.
    """
    total: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        dtype = "bf16" if tensor.dtype == "U8" else tensor.dtype
        total[dtype] = total.get(dtype, 0) + tensor.bytes
    return max(sorted(total), key=lambda dtype: total[dtype])
