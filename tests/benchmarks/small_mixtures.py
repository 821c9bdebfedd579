"""Folders of small decoders with random weights, for plans of mixtures on one GPU.

    python tests/benchmarks/small_mixtures.py FOLDER

Writes a ``config.json`` for each of `SMALL` below FOLDER; a plan draws the weights. What came out
on an H200 is in docs/results/h200.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_ANY: dict[str, Any] = {
    "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
_ROUTED = {
    "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
#: What differs from `_ANY`, by name.
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 2048, "intermediate_size": 4096,
        "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "glm": _ROUTED | {
        "model_type": "glm4_moe", "num_key_value_heads": 4, "head_dim": 64, "n_routed_experts": 32,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": True,
        "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    "deepseek": _ROUTED | {
        "model_type": "deepseek_v3", "num_key_value_heads": 16, "n_routed_experts": 16,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "kv_lora_rank": 256, "q_lora_rank": 512,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "hidden_size": 1024, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
        "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "swiglu_limit": 7.0,
        "attention_bias": True, "rope_theta": 150000.0, "rope_scaling": _YARN,
        "max_position_embeddings": 131072,
    },
    "gemma-2": {
        "model_type": "gemma2", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128, "sliding_window": 128, "query_pre_attn_scalar": 128,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
}  # fmt: skip


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, config in SMALL.items():
        folder = parser.parse_args().folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(_ANY | config, indent=1))


if __name__ == "__main__":
    main()
