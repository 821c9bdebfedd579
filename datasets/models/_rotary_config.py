"""Rotation of a ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreplan.datasets.models._config_fields import ConfigFields

#: Our names of what scales a rotation.
_SCALING: Mapping[str, str] = MappingProxyType(
    {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    }
)
_PARTIAL, _ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"


def rotation_facts(
    config: ConfigFields,
    base: float,
    head_dim: int,
    *,
    partial: float | None = None,
    longrope: bool = False,
    neighbours: bool = False,
) -> dict[str, Any]:
    """Rotary base, scaling and width, of ``rope_parameters`` (transformers 5) or the older fields.

    Args:
        config: read.
        base: of the frequencies where the file has none.
        head_dim: features of one head.
        partial: share of them that is turned where the file has none; ``None`` of a family whose
            heads are turned whole.
        longrope: the family has ``longrope``.
        neighbours: pairs of features are neighbours.

    Raises:
        SpecError: another scaling, or heads that are turned in part where they cannot be.
    """
    field, parameters = _parameters(config)
    found: dict[str, Any] = {
        "rope_theta": parameters.get("rope_theta", config.fields.get("rope_theta", base))
    }
    rotary: dict[str, Any] = {"pairs": "neighbours"} if neighbours else {}
    if unrotated := unrotated_layers(config):
        rotary["unrotated_layers"] = unrotated
    share = parameters.get(_PARTIAL, config.fields.get(_PARTIAL, partial or 1))
    if share != 1:
        place = field if _PARTIAL in parameters else _PARTIAL
        if partial is None:
            raise config.unmodelled(place, f"a {_PARTIAL} of 1: whole heads are rotated")
        width = int(head_dim * share) if isinstance(share, (int, float)) else 0
        if not 0 < width <= head_dim or width % 2:
            raise config.error(
                place, f"a {_PARTIAL} by which an even number of {head_dim} features are rotated"
            )
        rotary["width"] = width
    if rotary:
        found["rotary"] = rotary
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return found
    if longrope and kind in ("longrope", "su"):
        return found | {"rope_scaling": _longrope(config, field, parameters)}
    if kind == "yarn":
        return found | {"rope_scaling": _yarn(config, field, parameters)}
    if kind not in ("linear", "llama3"):
        known = f"default, linear, yarn or {'longrope' if longrope else 'llama3'}"
        raise config.unmodelled(field, f"a rope_type of {known}")
    needed = list(_SCALING) if kind == "llama3" else ["factor"]
    missing = [name for name in needed if name not in parameters]
    if missing:
        raise config.error(field, f"{', '.join(missing)} too, for rope_type {kind}")
    scaling = {_SCALING[name]: parameters[name] for name in needed}
    return found | {"rope_scaling": {"kind": kind, **scaling}}


def alternating_facts(config: ConfigFields, head_dim: int) -> dict[str, Any]:
    """The same of Gemma 3, whose layers with a window have a base of their own and no scaling.

    Raises:
        SpecError: as `rotation_facts`, or a scaling of those layers.
    """
    new = config.fields.get("rope_parameters") or {}
    scaling = config.fields.get("rope_scaling") or {}
    parts = [new, scaling]
    if isinstance(new, dict):
        parts += [new.get("full_attention") or {}, new.get("sliding_attention") or {}]
    if not all(isinstance(part, dict) for part in parts):
        raise config.error("rope_parameters", "a mapping for each kind of layer")
    full, sliding = parts[2], parts[3]
    if sliding.get("rope_type", "default") != "default":
        raise config.unmodelled("rope_parameters", "a rope_type of default in layers with a window")
    fields = {k: v for k, v in config.fields.items() if k != "rope_scaling"}
    whole = ConfigFields(config.where, fields | {"rope_parameters": {**full, **scaling}})
    found = rotation_facts(whole, 1e6, head_dim)
    if local := sliding_layers(config, config.size("sliding_window_pattern", 6)):
        theta = sliding.get("rope_theta", config.fields.get("rope_local_base_freq", 1e4))
        found["rotary"] = {"local_theta": theta, "local_layers": local}
    return found


def sliding_layers(config: ConfigFields, every: int) -> tuple[int, ...]:
    """Layers that have a window: listed, or all but each ``every``-th."""
    layers, listed = config.size("num_hidden_layers"), config.fields.get("layer_types")
    if listed is None:
        return tuple(layer for layer in range(layers) if (layer + 1) % every)
    known = ("sliding_attention", "full_attention")
    if not isinstance(listed, list) or len(listed) < layers or any(t not in known for t in listed):
        raise config.error("layer_types", f"one of {', '.join(known)} for each of {layers} layers")
    return tuple(layer for layer in range(layers) if listed[layer] == known[0])


def unrotated_layers(config: ConfigFields) -> tuple[int, ...]:
    """Layers without a rotation, which only SmolLM3 has: a 0 in ``no_rope_layers``."""
    if config.fields["model_type"] != "smollm3":
        return ()
    layers, listed = config.size("num_hidden_layers"), config.layers("no_rope_layers")
    if config.fields.get("no_rope_layers") is None:
        interval = config.size("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, layers, interval))
    if len(listed) < layers:
        raise config.error("no_rope_layers", f"a 0 or a 1 for each of {layers} layers")
    return tuple(layer for layer in range(layers) if not listed[layer])


def _parameters(config: ConfigFields) -> tuple[str, dict[str, Any]]:
    """The field that scales the rotation, and what it says."""
    new = config.fields.get("rope_parameters")
    field = "rope_parameters" if new is not None else "rope_scaling"
    parameters = new if new is not None else config.fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        raise config.unmodelled(field, "one mapping for all layers")
    return field, parameters


def _longrope(config: ConfigFields, field: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """As ``modeling_rope_utils._compute_longrope_parameters`` of transformers.

    The factor of cosine and sine is that of the longest sequence, in short ones too.
    """
    short = parameters.get("short_factor")
    if not isinstance(short, list):
        raise config.error(field, "a short_factor for each pair of features, for longrope")
    within = ConfigFields(f"{config.where}: {field}", parameters)
    original = within.size(_ORIGINAL, config.size(_ORIGINAL, 4096))
    factor = parameters.get("factor")
    if factor is None:
        factor = config.size("max_position_embeddings") / original
    if not isinstance(factor, (int, float)) or factor <= 0 or original < 2:
        raise config.error(field, "a positive factor, and 2 original positions or more")
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    return {
        "kind": "longrope",
        "factor": factor,
        "original_max_positions": original,
        "short_factors": tuple(short),
        "attention_factor": attention,
    }


def _yarn(config: ConfigFields, field: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """As ``modeling_rope_utils._compute_yarn_parameters`` of transformers."""
    within = ConfigFields(f"{config.where}: {field}", parameters)
    positions = config.size("max_position_embeddings")
    original = within.size(_ORIGINAL, config.size(_ORIGINAL, positions))
    factor = positions / original
    if parameters.get("factor") is not None:
        factor = within.factor("factor")
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = yarn_magnitude(factor, 1)
        scales = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if all(scales):
            ours, all_dimensions = within.factor("mscale"), within.factor("mscale_all_dim")
            attention = yarn_magnitude(factor, ours) / yarn_magnitude(factor, all_dimensions)
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": attention,
        "slow_turns": parameters.get("beta_slow") or 1,
        "fast_turns": parameters.get("beta_fast") or 32,
        "whole_pairs": within.flag("truncate", True),
    }


def enlarged_scores(config: ConfigFields) -> float:
    """Factor that DeepSeek gives its scores where a rotation is stretched, beside the usual one.

    The square of YaRN's magnitude (``yarn_apply_mscale`` of ``modeling_deepseek_v3.py``), which
    there is no part of the angles' cosine and sine.
    """
    field, parameters = _parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    within = ConfigFields(f"{config.where}: {field}", parameters)
    return yarn_magnitude(within.factor("factor"), within.factor("mscale_all_dim")) ** 2


def yarn_magnitude(factor: float, scale: float) -> float:
    """By what YaRN enlarges queries and keys that are stretched (Peng et al., 2023, section 3.4).

    Args:
        factor: by which positions are stretched.
        scale: of its logarithm; DeepSeek's ``mscale``.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
