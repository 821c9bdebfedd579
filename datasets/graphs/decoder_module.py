"""`decoder_module`: a described decoder as the module that transformers runs, without weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from foreplan.datasets.experts import Experts
from foreplan.datasets.models.families import SLIDING_IN_TURN
from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: How transformers reads a folder: from the disk alone, and no code that the folder brings along.
LOCAL_DATA: Mapping[str, bool] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}
)


def decoder_module(model: Model, batch: int, tokens: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The causal language model that transformers builds of a description, empty, and its inputs.

    Args:
        model: what to build.
        batch: sequences.
        tokens: tokens of each.

    Raises:
        SpecError: an architecture that transformers lacks, more tokens than positions, or more of
            them than `blank` makes.
    """
    import torch
    import transformers

    if model.family not in transformers.CONFIG_MAPPING:
        raise SpecError(
            f"model {model.name}", got=f"the architecture {model.family}",
            expected="one that transformers has, whose pass is captured",
            fix="'foreplan plan serving' prices it by its shapes",
        )  # fmt: skip
    if tokens > model.max_positions:
        raise SpecError(
            "sequence length", got=tokens, expected=f"at most {model.max_positions} positions"
        )
    if model.path is not None:
        config = transformers.AutoConfig.from_pretrained(model.path, **LOCAL_DATA)
        if config.num_hidden_layers != model.layers:  # fewer layers asked for than the folder has
            config.num_hidden_layers = model.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: model.layers]
        if model.family in SLIDING_IN_TURN and model.sliding_window is None:
            # transformers builds a mask of the window even where no layer has it.
            config.sliding_window = model.max_positions
    else:
        config = transformers.AutoConfig.for_model(model.family, **config_fields(model))
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[model.dtype]
    with torch.device("meta"):
        build: Any = transformers.AutoModelForCausalLM.from_config
        module: torch.nn.Module = build(config, dtype=dtype)
    ids = blank(batch, tokens, dtype=torch.int64)
    # Without a cache every key and value of the pass is computed in the pass.
    return module, {"input_ids": ids, "use_cache": False}


def blank(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """An input of a described network, without data.

    Args:
        sizes: its shape.
        dtype: its data type.

    Raises:
        SpecError: more bytes than torch counts.
    """
    import torch

    if math.prod(sizes) * dtype.itemsize >= 1 << 63:
        raise SpecError(
            "batch", got=f"an input of the sizes {list(sizes)}", expected="fewer than 2^63 bytes"
        )
    return torch.zeros(sizes, dtype=dtype, device="meta")


def config_fields(model: Model) -> dict[str, Any]:
    """Configuration of a zoo model in transformers' words.

    Args:
        model: of a family that transformers has.
    """
    if model.family == "gpt2":
        return {
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "vocab_size": model.vocab,
            "n_positions": model.max_positions,
            "tie_word_embeddings": model.tied,
        }
    common = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": model.tied,
    }
    if model.family == "opt":
        return common | {"ffn_dim": model.ffn, "word_embed_proj_dim": model.hidden}
    fields: dict[str, Any] = common | {
        "intermediate_size": model.ffn,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "sliding_window": model.sliding_window,
    }
    if model.latent is not None:
        fields |= _latent_fields(model.latent)
    if model.family == "llama":
        fields |= {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    if model.family == "glm4_moe":
        fields |= {"attention_bias": model.qkv_bias, "use_qk_norm": model.qk_norm}
    if model.family in SLIDING_IN_TURN and model.sliding_window is None:
        fields |= {"sliding_window": model.max_positions}
    elif model.family in SLIDING_IN_TURN:
        slide = model.window_layers or range(model.layers)
        kinds = ("full_attention", "sliding_attention")
        fields |= {"layer_types": [kinds[i in slide] for i in range(model.layers)]}
    if model.family == "gemma2":
        fields |= {
            "attn_logit_softcapping": model.score_cap,
            "final_logit_softcapping": model.logit_cap,
            "query_pre_attn_scalar": round((model.scalars.attention or 0.0625) ** -2),
        }
    if model.family == "granite":
        scalars = model.scalars
        fields |= {
            "embedding_multiplier": scalars.embedding,
            "attention_multiplier": scalars.attention,
            "residual_multiplier": scalars.residual,
            "logits_scaling": 1 / scalars.logits,
        }
    if model.family == "gpt_neox":
        fields |= {"use_parallel_residual": model.parallel}
    if model.family == "smollm3":
        unrotated = model.rotary.unrotated_layers
        fields |= {"no_rope_layers": [int(i not in unrotated) for i in range(model.layers)]}
    return fields if model.experts is None else fields | _expert_fields(model.family, model.experts)


def _latent_fields(latent: LatentAttention) -> dict[str, Any]:
    """Attention over latents in transformers' words."""
    return {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.turned,
        "v_head_dim": latent.value,
    }


def _routed_fields(experts: Experts) -> dict[str, Any]:
    """Experts of DeepSeek's likes, whose shared ones are counted."""
    routing = experts.routing
    return {
        "moe_intermediate_size": experts.ffn,
        "num_experts_per_tok": experts.active,
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared_ffn // experts.ffn,
        "first_k_dense_replace": len(experts.dense_layers),
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.kept_groups,
        "topk_method": (
            "noaux_tc"
            if routing.corrected
            else "group_limited_greedy"
            if routing.grouped
            else "greedy"
        ),
    }


def _expert_fields(family: str, experts: Experts) -> dict[str, Any]:
    """Experts in transformers' words."""
    if family in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        return _routed_fields(experts)
    wide = {"intermediate_size": experts.ffn, "num_experts_per_tok": experts.active}
    if family in ("mixtral", "gpt_oss"):
        return wide | {"num_local_experts": experts.count}
    wide |= {"num_experts": experts.count, "norm_topk_prob": experts.normalise}
    if family == "olmoe":
        return wide
    del wide["intermediate_size"]  # of dense layers
    return wide | {
        "moe_intermediate_size": experts.ffn,
        "shared_expert_intermediate_size": experts.shared_ffn,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }
