"""Sliding window of a ``config.json``, and the layers that have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreplan.datasets.models._config_fields import ConfigFields
from foreplan.datasets.models._rotary_config import sliding_layers, unrotated_layers
from foreplan.datasets.models.families import SLIDING_EVERYWHERE, SLIDING_IN_TURN

#: Families without a sliding window in any layer.
_NO_WINDOW = frozenset(
    {
        "llama",
        "olmoe",
        "deepseek",
        "seed_oss",
        "ernie4_5",
        "glm",
        "granite",
        "gemma",
        "olmo2",
        "glm4",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
    }
)


def window_facts(config: ConfigFields, family: str) -> dict[str, Any]:
    """Keys that a query sees at most, and which layers have this window; {} if none has.

    Args:
        config: read.
        family: of the model.

    Raises:
        SpecError: a window that is no number of keys, or layers that are no list.
    """
    window = _keys(config, family)
    layers = config.size("num_hidden_layers")
    slide = tuple(_layers(config, family, layers)) if window is not None else ()
    if not slide:
        return {}
    found: dict[str, Any] = {"sliding_window": window}
    return found if len(slide) == layers else found | {"window_layers": slide}


def _keys(config: ConfigFields, family: str) -> int | None:
    """Keys that a query of some layers may see at most; ``None`` = all."""
    stated = config.fields.get("sliding_window")
    if "sliding_window" in config.fields and stated is None and family != "gemma3_text":
        return None  # whatever transformers' default is, a null means full attention
    if family == "mistral":
        return config.size("sliding_window", 4096)
    if family in SLIDING_IN_TURN:
        return config.size("sliding_window", SLIDING_IN_TURN[family])
    if family in SLIDING_EVERYWHERE:
        return None if stated is None else config.size("sliding_window")
    if family != "gemma3_text" and (
        family in _NO_WINDOW or not config.flag("use_sliding_window", False)
    ):
        return None
    if family == "smollm3" and stated is None:
        return None
    return config.size("sliding_window", 4096)


def _layers(config: ConfigFields, family: str, layers: int) -> Sequence[int]:
    """Those of ``layers`` that have the window."""
    every = range(layers)
    if family in SLIDING_IN_TURN:
        return sliding_layers(config, 2)
    if family == "gemma3_text":
        return sliding_layers(config, config.size("sliding_window_pattern", 6))
    if family in SLIDING_EVERYWHERE or family == "qwen3_moe":
        return every
    listed = config.fields.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list):
            raise config.error("layer_types", "a list of texts")
        return [i for i, kind in enumerate(listed[:layers]) if kind == "sliding_attention"]
    if family == "smollm3":
        return unrotated_layers(config)
    none = config.fields.get("max_window_layers") == 0  # which no other size may be
    first = 0 if none else config.size("max_window_layers", 28)
    # Qwen2-MoE has it in every other one of the first layers, the others in those behind them.
    return every[:first:2] if family == "qwen2_moe" else every[first:]
