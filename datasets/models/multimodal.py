"""`Multimodal`: language model and encoders of a multimodal model's Hugging Face configuration.

Sizes alone, from ``config.json``; weights are not looked at. Fields as transformers 5 has them
(``models/<family>/configuration_*.py``) and as the published files have them: LLaVA's leave out of
``text_config`` what equals transformers' defaults, Qwen2-VL's keep the language model's fields at
the top, InternVL's own (``internvl_chat``) call it ``llm_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from foreplan.datasets.models.encoders import VisionEncoder
from foreplan.datasets.specs import StrictModel, load_document, validate
from foreplan.errors import SpecError

_Size = Annotated[int, Field(gt=0, le=1 << 24)]
Fields = Mapping[str, Any]


class Bridge(StrictModel):
    """What brings an encoder's positions to the language model.

    Attributes:
        projector: ``mlp``, two matrices by way of the language model's width, or ``merger``, by way
            of the width of what it takes (Qwen2-VL).
        merged: positions that it takes together, one after another, and makes one of.
    """

    projector: Literal["mlp", "merger"] = "mlp"
    merged: _Size = 1


class Multimodal(StrictModel):
    """Sizes of a multimodal model.

    Attributes:
        name: of its folder.
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: of the language model, whose MLP has
            a gate.
        vision: the encoder of images.
        bridge: between the two.
    """

    name: str
    layers: _Size
    hidden: _Size
    heads: _Size
    kv_heads: _Size
    head_dim: _Size
    ffn: _Size
    vocab: _Size
    vision: VisionEncoder
    bridge: Bridge


def load_multimodal(folder: str | Path) -> Multimodal:
    """Read a Hugging Face folder.

    Raises:
        SpecError: no folder with a ``config.json``; another kind of model; sizes that are missing.
    """
    path = Path(folder).expanduser()
    file = path / "config.json"
    if not file.is_file():
        raise SpecError(
            "multimodal", got=str(folder), expected="a Hugging Face folder with a config.json"
        )
    config = load_document(file)
    kind = config.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise SpecError(
            f"{file}: model_type", got=kind, expected=f"one of {', '.join(_READERS)}",
            fix="state backbone and encoders in the workload",
        )  # fmt: skip
    vision, bridge = reader(_part(config, "vision_config", file), config, file)
    name = path.resolve().name or "model"
    facts = {"name": name, "vision": vision, "bridge": bridge, **_language(config, file)}
    return validate(Multimodal, facts, str(file))


# -------------------------------------------------------------------------------- language model

#: What transformers takes where a file leaves a field out; published LLaVA files do.
_DEFAULTS: Mapping[str, Fields] = MappingProxyType(
    {
        "llama": MappingProxyType(
            {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
             "num_attention_heads": 32, "vocab_size": 32000}
        ),
        "mistral": MappingProxyType(
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
        ),
    }
)  # fmt: skip
#: Language models with rotary positions, RMS norms and a gated MLP.
_LANGUAGE = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "internlm2")


def _language(config: Fields, file: Path) -> dict[str, object]:
    name = next((n for n in ("text_config", "llm_config") if n in config), None)
    text = config if name is None else _part(config, name, file)
    family, where = text.get("model_type"), f"{file}: {name or 'model_type'}"
    if family not in _LANGUAGE:
        raise SpecError(where, got=family, expected=f"one of {', '.join(_LANGUAGE)}")
    fields = dict(_DEFAULTS.get(str(family), {})) | dict(text)
    hidden, heads = (_size(fields, n, where) for n in ("hidden_size", "num_attention_heads"))
    kv_heads, head_dim = fields.get("num_key_value_heads"), fields.get("head_dim")
    if head_dim is None and hidden % heads:
        raise SpecError(where, got=f"{heads} heads", expected=f"a divisor of {hidden}")
    return {
        "layers": _size(fields, "num_hidden_layers", where),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else _size(fields, "num_key_value_heads", where),
        "head_dim": hidden // heads if head_dim is None else _size(fields, "head_dim", where),
        "ffn": _size(fields, "intermediate_size", where),
        "vocab": _size(fields, "vocab_size", where),
    }


# -------------------------------------------------------------------------------------- encoders


def _llava(vision: Fields, config: Fields, file: Path) -> tuple[dict[str, object], Bridge]:
    """CLIP or SigLIP and two matrices; a class token is dropped and not counted."""
    return _vit(vision, file), Bridge()


def _internvl(vision: Fields, config: Fields, file: Path) -> tuple[dict[str, object], Bridge]:
    """InternViT; a square of positions becomes one."""
    ratio = config.get("downsample_ratio", 0.5)
    side = round(1.0 / ratio) if isinstance(ratio, int | float) and 0.0 < ratio <= 1.0 else 0
    if not side or abs(side * ratio - 1.0) > 1e-9:
        raise SpecError(f"{file}: downsample_ratio", got=ratio, expected="1 over a whole number")
    return _vit(vision, file), Bridge(merged=side * side)


def _qwen2_vl(vision: Fields, config: Fields, file: Path) -> tuple[dict[str, object], Bridge]:
    """Images of any size, so that nothing here says how many positions one has."""
    where = f"{file}: vision_config"
    hidden, heads = _size(vision, "embed_dim", where), _size(vision, "num_heads", where)
    patch, frames = (_size(vision, f"{n}patch_size", where) for n in ("", "temporal_"))
    channels = vision.get("in_chans", vision.get("in_channels", 3))
    ratio, side = vision.get("mlp_ratio", 4), _size(vision, "spatial_merge_size", where)
    found = {
        "layers": _size(vision, "depth", where), "hidden": hidden, "heads": heads,
        "head_dim": hidden // heads, "ffn": int(hidden * ratio),
        "patch_features": channels * frames * patch * patch,
    }  # fmt: skip
    return found, Bridge(projector="merger", merged=side * side)


Reader = Callable[[Fields, Fields, Path], tuple[dict[str, object], Bridge]]
_READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "llava": _llava, "llava_next": _llava, "internvl": _internvl, "internvl_chat": _internvl,
        "qwen2_vl": _qwen2_vl,
    }
)  # fmt: skip
#: Values of ``model_type`` that `load_multimodal` reads.
MULTIMODAL = frozenset(_READERS)


def _vit(vision: Fields, file: Path) -> dict[str, object]:
    where = f"{file}: vision_config"
    hidden, heads = _size(vision, "hidden_size", where), _size(vision, "num_attention_heads", where)
    patch, image = _size(vision, "patch_size", where), _size(vision, "image_size", where)
    return {
        "layers": _size(vision, "num_hidden_layers", where), "hidden": hidden, "heads": heads,
        "head_dim": hidden // heads, "ffn": _size(vision, "intermediate_size", where),
        "patch_features": vision.get("num_channels", 3) * patch * patch,
        "tokens": (image // patch) ** 2,
    }  # fmt: skip


def _part(config: Fields, name: str, file: Path) -> Fields:
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise SpecError(f"{file}: {name}", got=found, expected="a mapping")
    return found


def _size(fields: Fields, name: str, where: str) -> int:
    """A positive whole number; a square's side may be written twice."""
    value = fields.get(name)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{where}: {name}", got=value, expected="a whole number of at least 1")
    return value
