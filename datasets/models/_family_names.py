"""Names that checkpoints of each family give to tensors (transformers, ``models/<family>``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

_LLAMA_LAYER = {
    "norm1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "sinks": ("self_attn.sinks",),
    "out": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_GLM_LAYER = _LLAMA_LAYER | {"up": ("mlp.gate_up_proj",)}
_GLM4_LAYER = _GLM_LAYER | {
    "attended_norm": ("post_self_attn_layernorm",),
    "fed_norm": ("post_mlp_layernorm",),
}
_BEHIND = {
    "attended_norm": ("post_attention_layernorm",),
    "fed_norm": ("post_feedforward_layernorm",),
}
_GEMMA3_LAYER = _LLAMA_LAYER | _BEHIND | {"norm2": ("pre_feedforward_layernorm",)}
_OLMO2_LAYER = {
    part: names for part, names in _LLAMA_LAYER.items() if part not in ("norm1", "norm2")
} | _BEHIND
_PHI3_LAYER = _GLM_LAYER | {"qkv": ("self_attn.qkv_proj",)}
_STARCODER2_LAYER = _LLAMA_LAYER | {"up": ("mlp.c_fc",), "down": ("mlp.c_proj",)}
#: Latents of keys and values and of queries.
_DEEPSEEK_LAYER = {
    "norm1": ("input_layernorm",),
    "latents": ("self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj"),
    "latent_norm": ("self_attn.kv_a_layernorm",),
    "query_norm": ("self_attn.q_a_layernorm",),
    "queries": ("self_attn.q_b_proj",),
    "expand": ("self_attn.kv_b_proj",),
    **{part: _LLAMA_LAYER[part] for part in ("out", "norm2", "up", "down")},
}
#: What is called otherwise where queries have no latent.
WHOLE_QUERIES = {
    "latents": ("self_attn.kv_a_proj_with_mqa",),
    "queries": ("self_attn.q_proj",),
}
_OPT_LAYER = {
    "norm1": ("self_attn_layer_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.out_proj",),
    "norm2": ("final_layer_norm",),
    "up": ("fc1",),
    "down": ("fc2",),
}
_GPT_NEOX_LAYER = {
    "norm1": ("input_layernorm",),
    "qkv": ("attention.query_key_value",),
    "out": ("attention.dense",),
    "norm2": ("post_attention_layernorm",),
    "up": ("mlp.dense_h_to_4h",),
    "down": ("mlp.dense_4h_to_h",),
}
_GPT2_LAYER = {
    "norm1": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "out": ("attn.c_proj",),
    "norm2": ("ln_2",),
    "up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
}


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """Names of a family: ``prefix`` of the base model, then these parts; ``head`` has no prefix.

    ``qkv_by_head`` says that its fused projection is stored head by head.
    """

    prefix: str
    layers: str
    layer: Mapping[str, tuple[str, ...]]
    embed: str
    positions: str
    final_norm: str
    head: str = "lm_head"
    qkv_by_head: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names within a MoE layer; ``mlp`` are gate, up and down of one expert.

    ``stacked`` says that one tensor holds all experts' matrices, ``[experts, k, n]``, gate and up
    in turn in one of them, and another their biases; then ``mlp`` are gate and up, and down.
    """

    router: str
    expert: str
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = ""
    shared_gate: str = ""
    stacked: bool = False


EXPERT_NAMES: Mapping[str, ExpertNames] = MappingProxyType(
    {
        "mixtral": ExpertNames(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")
        ),
        "qwen2_moe": ExpertNames(
            "mlp.gate", "mlp.experts.{}.", shared="mlp.shared_expert.",
            shared_gate="mlp.shared_expert_gate",
        ),
        "qwen3_moe": ExpertNames("mlp.gate", "mlp.experts.{}."),
        "olmoe": ExpertNames("mlp.gate", "mlp.experts.{}."),
        "gpt_oss": ExpertNames(
            "mlp.router", "mlp.experts.", ("gate_up_proj", "down_proj"), stacked=True
        ),
        **dict.fromkeys(
            ("deepseek", "glm4_moe", "deepseek_v2", "deepseek_v3"),
            ExpertNames("mlp.gate", "mlp.experts.{}.", shared="mlp.shared_experts."),
        ),
    }
)  # fmt: skip

_LLAMA = FamilyNames("model.", "layers", _LLAMA_LAYER, "embed_tokens", "", "norm")
FAMILY_NAMES: Mapping[str, FamilyNames] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "seed_oss": _LLAMA,
        "smollm3": _LLAMA,
        "ernie4_5": _LLAMA,
        "granite": _LLAMA,
        **dict.fromkeys(("gemma2", "gemma3_text"), replace(_LLAMA, layer=_GEMMA3_LAYER)),
        "olmo2": replace(_LLAMA, layer=_OLMO2_LAYER),
        "glm4": replace(_LLAMA, layer=_GLM4_LAYER),
        "gemma": _LLAMA,
        "glm": replace(_LLAMA, layer=_GLM_LAYER),
        **dict.fromkeys(EXPERT_NAMES, _LLAMA),
        "deepseek_v2": replace(_LLAMA, layer=_DEEPSEEK_LAYER),
        "deepseek_v3": replace(_LLAMA, layer=_DEEPSEEK_LAYER),
        "phi3": replace(_LLAMA, layer=_PHI3_LAYER),
        "starcoder2": replace(_LLAMA, layer=_STARCODER2_LAYER),
        "opt": FamilyNames(
            "model.",
            "decoder.layers",
            _OPT_LAYER,
            "decoder.embed_tokens",
            "decoder.embed_positions",
            "decoder.final_layer_norm",
        ),
        "gpt_neox": FamilyNames(
            "gpt_neox.", "layers", _GPT_NEOX_LAYER, "embed_in", "", "final_layer_norm",
            head="embed_out", qkv_by_head=True,
        ),
        "gpt2": FamilyNames("transformer.", "h", _GPT2_LAYER, "wte", "wpe", "ln_f"),
    }
)  # fmt: skip
