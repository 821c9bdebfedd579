"""Experts of the families that have them, read from a ``config.json`` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from foreplan.datasets.experts import Experts
from foreplan.datasets.models._config_fields import ConfigFields
from foreplan.datasets.specs import validate


def _mixtral(config: ConfigFields) -> Experts:
    return _experts(config, "num_local_experts", 8, 2, config.size("intermediate_size"))


def _qwen_moe(config: ConfigFields) -> Experts:
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


def _olmoe(config: ConfigFields) -> Experts:
    return _experts(
        config, "num_experts", 64, 8, config.size("intermediate_size"),
        normalise=config.flag("norm_topk_prob", False),
    )  # fmt: skip


def _deepseek(config: ConfigFields) -> Experts:
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
    config: ConfigFields,
    field: str,
    count: int | None,
    active: int | None,
    ffn: int,
    **rest: object,
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


EXPERT_READERS: Mapping[str, Callable[[ConfigFields], Experts]] = MappingProxyType(
    {
        "mixtral": _mixtral,
        "qwen2_moe": _qwen_moe,
        "qwen3_moe": _qwen_moe,
        "olmoe": _olmoe,
        "deepseek": _deepseek,
    }
)
