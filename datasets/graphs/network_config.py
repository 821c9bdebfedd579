"""`check_config`: which configurations of transformers' networks no price can be made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.datasets.models.model import MOST_LAYERS
from foreplan.datasets.models.multimodal import MULTIMODAL
from foreplan.errors import SpecError

#: Fields that state a number of layers.
LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers")

#: Parts of a multimodal configuration.
_PARTS = ("text_config", "vision_config", "audio_config")

#: Mixtures whose experts transformers 5 runs in a loop that values decide, and not as grouped
#: products: no trace says how many tokens an expert gets.
_LOOPED = ("dbrx", "longcat_flash", "nllb-moe", "switch_transformers")


def check_config(fields: Mapping[str, Any], where: str) -> None:
    """Refuse what cannot be captured, whatever transformers would build of it.

    Args:
        fields: of a ``config.json``.
        where: what to call it in an error.

    Raises:
        SpecError: several networks in one, quantised weights, experts in a loop, or a number of
            layers that is none.
    """
    if any(fields.get(part) is not None for part in _PARTS):
        whole = "; 'foreplan plan bubbles' takes it whole, as multimodal"
        raise SpecError(
            f"{where}: model_type", got=fields["model_type"], expected="one network",
            fix="put the text_config or vision_config into a folder of its own"
            + (whole if fields["model_type"] in MULTIMODAL else ""),
        )  # fmt: skip
    if fields.get("quantization_config") is not None:
        raise SpecError(
            f"{where}: quantization_config", got="one", expected="unquantised weights",
            fix="leave it out to price the network in its own dtype",
        )  # fmt: skip
    if fields.get("model_type") in _LOOPED:
        raise SpecError(
            f"{where}: model_type", got=fields["model_type"],
            expected="experts that transformers can compute as grouped products",
            fix="price a dense network of the same layers, each as wide as a token's experts",
        )  # fmt: skip
    for field in LAYER_FIELDS:
        count = fields.get(field, 1)
        if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
            raise SpecError(
                f"{where}: {field}", got=count, expected=f"a whole number from 1 to {MOST_LAYERS}"
            )
