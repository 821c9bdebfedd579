"""Vision encoders: `VisionEncoder` from the zoo or from a Hugging Face vision configuration.

``zoo/encoders.yaml`` beside this module is the zoo. A folder's ``config.json`` may be a vision
model's (CLIP, SigLIP, ViT) or a multimodal model's with a ``vision_config``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from foreplan.datasets.models.zoo_entries import zoo_entries
from foreplan.datasets.specs import StrictModel, load_document, nearest, validate
from foreplan.errors import SpecError

_FILE = Path(__file__).parents[1] / "zoo" / "encoders.yaml"
_SCHEMA = "foreplan.encoder_zoo/1"

_Size = Annotated[int, Field(gt=0, le=1 << 24)]


class VisionEncoder(StrictModel):
    """Sizes of a transformer encoder of images.

    Attributes:
        layers, hidden, heads, head_dim, ffn: of its transformer (two linears in the MLP).
        patch_features: features of one patch (channels x side x side), where known.
        tokens: patches of one image, where known (a class token is not counted).
    """

    layers: _Size
    hidden: _Size
    heads: _Size
    head_dim: _Size
    ffn: _Size
    patch_features: _Size | None = None
    tokens: _Size | None = None

    @model_validator(mode="after")
    def _whole_heads(self) -> VisionEncoder:
        if self.hidden % self.heads:
            raise ValueError(f"heads that divide hidden = {self.hidden}, not {self.heads}")
        return self


def encoder_names() -> tuple[str, ...]:
    """Names of the encoder zoo."""
    return tuple(_entries())


def load_encoder(name_or_path: str | Path) -> VisionEncoder:
    """The encoder in a Hugging Face folder, or the zoo's of that name.

    Raises:
        SpecError: neither; a configuration without the sizes of a vision transformer.
    """
    text = str(name_or_path)
    if text in _entries():
        return validate(VisionEncoder, _entries()[text], f"{_FILE.name}: encoders.{text}")
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return _from_config(folder / "config.json")
    guess = nearest(text, _entries())
    raise SpecError(
        "encoder model", got=text,
        expected=f"a folder with a vision config.json, or one of {', '.join(_entries())}",
        fix=f"did you mean {guess!r}?" if guess else None,
    )  # fmt: skip


def _from_config(path: Path) -> VisionEncoder:
    config = load_document(path)
    vision = config.get("vision_config", config)
    where = f"{path.parent.name}/{path.name}"
    if not isinstance(vision, dict):
        raise SpecError(f"{where}: vision_config", got=vision, expected="a mapping")

    def size(*names: str) -> int:
        for name in names:
            value = vision.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise SpecError(
            f"{where}: {names[0]}", got=vision.get(names[0]),
            expected="a whole number of at least 1, as vision transformers have",
        )  # fmt: skip

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    patch, image = size("patch_size"), size("image_size")
    channels = vision.get("num_channels", 3)
    return validate(
        VisionEncoder,
        {
            "layers": size("num_hidden_layers"),
            "hidden": hidden,
            "heads": heads,
            "head_dim": hidden // heads,
            "ffn": size("intermediate_size"),
            "patch_features": channels * patch * patch,
            "tokens": (image // patch) ** 2,
        },
        where,
    )


def _entries() -> dict[str, dict[str, Any]]:
    return zoo_entries(_FILE, _SCHEMA, "encoders")
