"""`scan_network`: networks of the end-to-end check whose layers carry a state from token to token.

They run as transformers itself computes them, without the fused kernels of other packages. No
constant and no weight was chosen on any of them (named 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: By chunks of tokens, and those from ``mamba`` on token by token.
SCANS = (
    "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_next", "lfm2",
    "mamba", "falcon_mamba", "jamba", "recurrent_gemma", "rwkv",
)  # fmt: skip


def scan_network(name: str, text: Mapping[str, Any]) -> Any:
    """One network, with random weights; configurations are the published ones, shrunk.

    Args:
        name: of `SCANS`.
        text: words, width, layers and heads of a network of text.
    """
    import transformers as hf

    hidden, layers, heads = (
        text[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    plain = {k: text[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}
    gated = {**text, "intermediate_size": 2 * hidden, "num_key_value_heads": heads // 2}
    # The third of four layers attends, as one of several does in the published hybrids.
    attends = [i for i in range(layers) if i % 4 == 2]
    kinds = ["attention" if i in attends else "mamba" for i in range(layers)]
    state = {"mamba_n_heads": 2 * heads, "mamba_d_head": hidden // heads, "mamba_n_groups": 1}
    config: Any
    if name == "mamba2":
        config = hf.Mamba2Config(**plain, num_heads=2 * heads, head_dim=hidden // heads, n_groups=1)
    elif name == "bamba":
        config = hf.BambaConfig(**gated, **state, attn_layer_indices=attends)
    elif name == "falcon_h1":  # attention and state side by side in every layer
        config = hf.FalconH1Config(**gated, **state, mamba_d_ssm=2 * hidden)
    elif name == "granitemoehybrid":  # without experts, as the smaller Granite 4
        config = hf.GraniteMoeHybridConfig(
            **gated, **state, layer_types=kinds, shared_intermediate_size=2 * hidden,
            num_local_experts=0,
        )  # fmt: skip
    elif name == "nemotron_h":
        few = {key: value for key, value in gated.items() if key != "num_hidden_layers"}
        config = hf.NemotronHConfig(
            **few, mamba_num_heads=2 * heads, mamba_head_dim=hidden // heads, n_groups=1,
            layers_block_type=(["mamba", "mlp", "attention", "mlp"] * layers)[:layers],
        )  # fmt: skip
    elif name == "qwen3_next":  # gated delta rule, experts
        config = hf.Qwen3NextConfig(
            **gated, head_dim=hidden // heads, linear_num_key_heads=heads,
            linear_num_value_heads=2 * heads, linear_key_head_dim=hidden // heads,
            linear_value_head_dim=hidden // heads, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=hidden // 2, shared_expert_intermediate_size=hidden // 2,
        )  # fmt: skip
    elif name == "lfm2":  # short convolutions along the tokens
        config = hf.Lfm2Config(
            **gated,
            layer_types=["full_attention" if i in attends else "conv" for i in range(layers)],
        )
    elif name == "mamba":
        config = hf.MambaConfig(**plain)
    elif name == "falcon_mamba":
        config = hf.FalconMambaConfig(**plain)
    elif name == "jamba":  # without experts
        config = hf.JambaConfig(
            **gated, attn_layer_period=4, attn_layer_offset=2, num_experts=1,
            use_mamba_kernels=False,
        )  # fmt: skip
    elif name == "recurrent_gemma":
        config = hf.RecurrentGemmaConfig(**gated, lru_width=hidden)
    else:
        config = hf.RwkvConfig(**plain)
    decoders: Any = hf.AutoModelForCausalLM
    return decoders.from_config(config)
