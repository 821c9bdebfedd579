"""Latent attention of a ``config.json`` (transformers, ``configuration_deepseek_v3.py``)."""

from __future__ import annotations

from typing import Any

from foreplan.datasets.models._config_fields import ConfigFields


def latent_facts(config: ConfigFields, enlarged: float) -> dict[str, Any]:
    """What latent attention says of a model: sizes, heads and the scale of scores.

    Args:
        config: read.
        enlarged: factor of scores beside the root of a key's features.
    """
    ranked = config.fields.get("q_lora_rank", 1536) is not None
    plain, turned = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
    latent = {
        "rank": config.size("kv_lora_rank", 512),
        "plain": plain,
        "turned": turned,
        "value": config.size("v_head_dim", 128),
        "query_rank": config.size("q_lora_rank", 1536) if ranked else None,
    }
    found: dict[str, Any] = {
        "latent": latent,
        "head_dim": turned,
        "kv_heads": config.size("num_attention_heads"),
    }
    if enlarged != 1:
        found["scalars"] = {"attention": enlarged * (plain + turned) ** -0.5}
    return found
