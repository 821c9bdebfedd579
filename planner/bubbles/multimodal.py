"""`completed`: a workload whose sizes come from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.datasets.models.encoders import encoder_names, load_encoder
from foreplan.datasets.models.multimodal import load_multimodal
from foreplan.errors import SpecError

#: What the encoder of a folder's images is called.
VISION = "vision"


def completed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a workload with sizes in place of folders, so that a plan can be taken elsewhere.

    Raises:
        SpecError: no such folder, or no number of positions where images have any size.
    """
    made = _with_multimodal(fields)
    stated = made.get("encoders")
    if isinstance(stated, list | tuple):
        made["encoders"] = [_read(e) if isinstance(e, Mapping) else e for e in stated]
    return made


def _read(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an encoder with ``dims`` in place of a folder; names of the zoo stay."""
    made, model = dict(encoder), encoder.get("model")
    if not isinstance(model, str) or model in encoder_names() or made.get("dims") is not None:
        return made
    found = load_encoder(made.pop("model"))
    made["dims"] = found.model_dump(include={"layers", "hidden", "heads", "head_dim", "ffn"})
    if made.get("patch_features") is None:
        made["patch_features"] = found.patch_features
    return made


def _with_multimodal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a workload with backbone and encoder filled in from ``multimodal``.

    What the workload states itself counts: its backbone, other encoders, and every field of an
    encoder called ``vision`` (``frozen``, ``tokens``, ``images``).

    Args:
        fields: of a `BubblesWorkload`, as a user writes them.
    """
    made, folder = dict(fields), fields.get("multimodal")
    if folder is None:
        return made
    if not isinstance(folder, str):
        raise SpecError("multimodal", got=folder, expected="a Hugging Face folder")
    known = load_multimodal(folder)
    sizes = known.model_dump(include={"layers", "hidden", "heads", "kv_heads", "head_dim", "ffn"})
    made.setdefault("backbone", sizes | {"vocab": known.vocab, "gated": True})
    stated = made.get("encoders", ())
    if not isinstance(stated, list | tuple) or any(not isinstance(e, Mapping) for e in stated):
        return made  # for the workload's own message
    mine: Mapping[str, Any] = next((e for e in stated if e.get("name") == VISION), {})
    vision, bridge = known.vision, known.bridge
    tokens = mine.get("tokens", vision.tokens)
    if tokens is None:
        raise SpecError(
            f"encoders.{VISION}.tokens", got=None,
            expected=f"positions of an image: {known.name} takes images of any size",
            fix=f"add encoders: [{{name: {VISION}, tokens: 1024}}] to the workload",
        )  # fmt: skip
    dims = vision.model_dump(include={"layers", "hidden", "heads", "head_dim", "ffn"})
    encoder = {
        "name": VISION, "dims": dims, "tokens": tokens, "patch_features": vision.patch_features,
        "projector": bridge.projector,
    }  # fmt: skip
    if bridge.merged > 1 and isinstance(tokens, int):
        images = mine.get("images", 1)
        encoder |= {"pool": "concatenate", "projected_tokens": tokens * images // bridge.merged}
    others = [e for e in stated if e is not mine]
    made["encoders"] = [encoder | dict(mine), *others]
    return made
