"""Families of decoder-only language models, and what every model of one has in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Family = Literal[
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek",
    "opt", "gpt2", "phi3", "starcoder2", "seed_oss", "smollm3", "ernie4_5", "glm",
    "granite", "gemma", "olmo2", "glm4", "gemma3_text",
    "gpt_neox", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "gemma2",
]  # fmt: skip

#: Those whose layers, or some of them, are mixtures of experts.
MIXTURES = frozenset(
    {
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "deepseek",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
    }
)

#: Those whose attention caches latents (`foreplan.datasets.models.latent`).
LATENTS = frozenset({"deepseek_v2", "deepseek_v3"})

#: Other names of a family: a ``model_type`` whose architecture is the family's.
SAME_FAMILY: Mapping[str, Family] = MappingProxyType({"kimi_k2": "deepseek_v3"})

#: Those whose every layer has the sliding window, where a model has one.
SLIDING_EVERYWHERE = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})

#: Those whose layers have the sliding window in turn, a layer with it first, unless a file lists
#: them; and its keys unless a file says how many (transformers, ``configuration_<family>.py``).
SLIDING_IN_TURN: Mapping[str, int] = MappingProxyType({"gpt_oss": 128, "gemma2": 4096})

_BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_LLAMA = {"norm": "rms", "gated": True, "activation": "silu", "position": "rope"}

#: What every model of a family has in common (transformers, ``models/<family>/modeling_*.py``).
#: A folder's configuration or a zoo entry fills in the rest and may override the biases.
FAMILY_FACTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama": MappingProxyType(_LLAMA),
        "mistral": MappingProxyType(_LLAMA),
        "qwen2": MappingProxyType({**_LLAMA, "qkv_bias": True}),
        "qwen3": MappingProxyType({**_LLAMA, "qk_norm": True}),
        "mixtral": MappingProxyType(_LLAMA),
        "qwen2_moe": MappingProxyType({**_LLAMA, "qkv_bias": True}),
        "qwen3_moe": MappingProxyType({**_LLAMA, "qk_norm": True}),
        "olmoe": MappingProxyType({**_LLAMA, "qk_norm": True, "qk_norm_whole": True}),
        "deepseek": MappingProxyType(_LLAMA),
        "glm4_moe": MappingProxyType(_LLAMA),
        "deepseek_v2": MappingProxyType(_LLAMA),
        "deepseek_v3": MappingProxyType(_LLAMA),
        "gpt_oss": MappingProxyType(
            {**_LLAMA, **_BIASED, "activation": "clamped_silu", "sinks": True}
        ),
        "phi3": MappingProxyType(_LLAMA),
        "seed_oss": MappingProxyType(_LLAMA),
        "smollm3": MappingProxyType(_LLAMA),
        "ernie4_5": MappingProxyType(_LLAMA),
        "glm": MappingProxyType(_LLAMA),
        "granite": MappingProxyType(_LLAMA),
        "gemma2": MappingProxyType({**_LLAMA, "activation": "gelu_tanh", "norms": "both"}),
        "gemma3_text": MappingProxyType(
            {**_LLAMA, "activation": "gelu_tanh", "norms": "both", "qk_norm": True}
        ),
        "olmo2": MappingProxyType(
            {**_LLAMA, "norms": "behind", "qk_norm": True, "qk_norm_whole": True}
        ),
        "glm4": MappingProxyType({**_LLAMA, "norms": "both"}),
        "gemma": MappingProxyType({**_LLAMA, "activation": "gelu_tanh"}),
        "starcoder2": MappingProxyType(
            {"norm": "layer", "gated": False, "activation": "gelu_tanh", "position": "rope"}
            | _BIASED
        ),
        "opt": MappingProxyType(
            {
                "norm": "layer",
                "gated": False,
                "activation": "relu",
                "position": "learned",
                # OPTLearnedPositionalEmbedding keeps two unused rows in front.
                "position_offset": 2,
                **_BIASED,
            }
        ),
        "gpt_neox": MappingProxyType(
            {"norm": "layer", "gated": False, "activation": "gelu", "position": "rope"} | _BIASED
        ),
        "gpt2": MappingProxyType(
            {
                "norm": "layer",
                "gated": False,
                "activation": "gelu_tanh",
                "position": "learned",
                **_BIASED,
            }
        ),
    }
)

#: The language model's class in transformers, by family.
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "deepseek": "DeepseekForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "glm": "GlmForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "gemma": "GemmaForCausalLM",
        "granite": "GraniteForCausalLM",
        "opt": "OPTForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
        "gpt2": "GPT2LMHeadModel",
    }
)
