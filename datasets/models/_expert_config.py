"""Experts of the families that have them, read from a ``config.json`` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from foreplan.datasets.experts import Experts
from foreplan.datasets.models._config_fields import ConfigFields
from foreplan.datasets.specs import validate

#: Ways in which DeepSeek-V2 chooses experts.
_TOPK_METHODS = MappingProxyType({name: name for name in ("greedy", "group_limited_greedy")})


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
    return _beside_shared(config, normalise=config.flag("norm_topk_prob", False))


def _glm4_moe(config: ConfigFields) -> Experts:
    routing = _routing(config, "sigmoid", (1, 1), 1.0)
    normalise = config.flag("norm_topk_prob", True)
    return _beside_shared(config, (128, 8, 1408, 1), 1, normalise=normalise, routing=routing)


def _deepseek_v2(config: ConfigFields) -> Experts:
    """Its weights are never normalised (transformers, ``DeepseekV2TopkRouter``)."""
    method = config.choice("topk_method", "greedy", _TOPK_METHODS)
    routing = _routing(config, "softmax", (1, 1), 1.0)
    if method == "greedy":
        routing |= {"groups": 1, "kept_groups": 1}
    return _beside_shared(config, (64, None, 1407, 2), normalise=False, routing=routing)


def _deepseek_v3(config: ConfigFields) -> Experts:
    routing = _routing(config, "sigmoid", (8, 4), 2.5)
    normalise = config.flag("norm_topk_prob", True)
    return _beside_shared(config, (256, 8, 2048, 1), 3, normalise=normalise, routing=routing)


def _beside_shared(
    config: ConfigFields,
    sizes: tuple[int | None, int | None, int | None, int | None] = (None,) * 4,
    first_dense: int = 0,
    **rest: object,
) -> Experts:
    """Experts beside shared ones that a row goes through always, behind a few dense layers.

    Args:
        config: read.
        sizes: of experts, active ones, features of each and shared ones, where the file has none.
        first_dense: likewise of dense layers.
        rest: other fields of `Experts`.
    """
    count, active, inner, several = sizes
    ffn, dense = config.size("moe_intermediate_size", inner), first_dense
    if config.fields.get("first_k_dense_replace") is not None:
        dense = config.fields["first_k_dense_replace"]
    if type(dense) is not int or not 0 <= dense < config.size("num_hidden_layers"):
        raise config.error("first_k_dense_replace", "a number of layers below num_hidden_layers")
    shared = config.fields.get("n_shared_experts", several) is not None
    return _experts(
        config, "n_routed_experts", count, active, ffn,
        shared_ffn=ffn * config.size("n_shared_experts", several) if shared else 0,
        dense_layers=tuple(range(dense)),
        **rest,
    )  # fmt: skip


def _gpt_oss(config: ConfigFields) -> Experts:
    """Its weights are a softmax over the chosen scores: normalised shares of one over all."""
    ffn = config.size("intermediate_size")
    return _experts(config, "num_local_experts", 128, 4, ffn, routing={"biased": True})


def _routing(
    config: ConfigFields, scores: str, groups: tuple[int, int], scale: float
) -> dict[str, object]:
    """Scores, groups and scale of a router; the latter two are transformers' defaults."""
    return {
        "scores": scores,
        "groups": config.size("n_group", groups[0]),
        "kept_groups": config.size("topk_group", groups[1]),
        "scale": config.factor("routed_scaling_factor", scale),
    }


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
        "glm4_moe": _glm4_moe,
        "deepseek_v2": _deepseek_v2,
        "deepseek_v3": _deepseek_v3,
        "gpt_oss": _gpt_oss,
    }
)
