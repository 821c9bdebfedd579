"""`untouched`: networks of the end-to-end check that nothing was chosen on, scored once.

Named before they were measured for the first time (2026-11-23), with weights that were final then.
Networks that have been looked at are in `end_to_end_networks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

UNTOUCHED = (
    "albert", "olmo2", "falcon", "whisper", "poolformer", "convnextv2", "mobilevit", "beit",
    # Of the eighth sweep.
    "stablelm", "granite", "electra", "levit", "cvt",
    # Of the ninth.
    "swinv2", "bit", "focalnet", "deberta_v2", "gpt_bigcode", "modernbert",
    # Of the same weights, but for nine rows.
    "siglip", "mobilenet_v1", "roformer", "starcoder2", "smollm3", "squeezebert", "xglm",
)  # fmt: skip
UNTOUCHED_IMAGES = (
    "poolformer", "convnextv2", "mobilevit", "beit", "levit", "cvt", "swinv2", "bit", "focalnet",
    "siglip", "mobilenet_v1",
)  # fmt: skip


def untouched(name: str, text: Mapping[str, Any], wide: Mapping[str, Any], pixels: int) -> Any:
    """One network, with random weights; configurations are the published ones, shrunk.

    Args:
        name: of `UNTOUCHED`.
        text: words, width, layers and heads of a network of text.
        wide: the same with a width between of four times its own.
        pixels: of a side of the first images.
    """
    import transformers as hf

    hidden, layers, heads = (
        text[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    model: Any
    if name == "albert":  # one layer's weights, again and again
        model = hf.AlbertForMaskedLM(hf.AlbertConfig(**wide, embedding_size=128))
    elif name == "olmo2":  # norms behind attention, and of queries and keys
        model = hf.Olmo2ForCausalLM(
            hf.Olmo2Config(**text, intermediate_size=11 * hidden // 4, num_key_value_heads=heads)
        )
    elif name == "falcon":  # one head of keys, attention beside the MLP
        model = hf.FalconForCausalLM(hf.FalconConfig(**text, multi_query=True, parallel_attn=True))
    elif name == "whisper":
        model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(
            vocab_size=text["vocab_size"], d_model=hidden, encoder_layers=layers // 2,
            decoder_layers=layers // 2, encoder_attention_heads=heads,
            decoder_attention_heads=heads, encoder_ffn_dim=4 * hidden, decoder_ffn_dim=4 * hidden,
            max_source_positions=pixels, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1))  # fmt: skip
    elif name == "poolformer":  # S12
        model = hf.PoolFormerForImageClassification(hf.PoolFormerConfig())
    elif name == "convnextv2":  # tiny
        model = hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config())
    elif name == "mobilevit":  # small
        model = hf.MobileViTForImageClassification(hf.MobileViTConfig(image_size=pixels))
    elif name == "stablelm":  # a quarter of each head is rotated, norms with a bias
        model = hf.StableLmForCausalLM(
            hf.StableLmConfig(**text, intermediate_size=8 * hidden // 3, num_key_value_heads=heads)
        )
    elif name == "granite":  # factors of embeddings, attention, residuals and logits
        model = hf.GraniteForCausalLM(hf.GraniteConfig(
            **text, intermediate_size=4 * hidden, num_key_value_heads=max(1, heads // 4),
            embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
            attention_multiplier=0.0078125))  # fmt: skip
    elif name == "electra":
        model = hf.ElectraForMaskedLM(hf.ElectraConfig(**wide, embedding_size=hidden // 2))
    elif name == "levit":  # 128S: attention on images, with batch norms
        model = hf.LevitForImageClassification(hf.LevitConfig(image_size=pixels))
    elif name == "swinv2":  # cosines as scores, biases by a network; windows that fit every size
        model = hf.Swinv2ForImageClassification(
            hf.Swinv2Config(image_size=pixels, window_size=max(2, pixels // 32))
        )
    elif name == "bit":  # 50: standardised weights, norms of groups
        model = hf.BitForImageClassification(hf.BitConfig())
    elif name == "focalnet":  # tiny
        model = hf.FocalNetForImageClassification(hf.FocalNetConfig(image_size=pixels))
    elif name == "deberta_v2":  # scores of positions, picked for each pair
        pairs: dict[str, Any] = {
            "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
            "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
        }  # fmt: skip
        model = hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**wide, **pairs))
    elif name == "gpt_bigcode":  # one head of keys
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
        model = hf.GPTBigCodeForCausalLM(
            hf.GPTBigCodeConfig(vocab_size=text["vocab_size"], **sizes)
        )
    elif name == "modernbert":  # windows of tokens in two layers of three
        model = hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(**text, intermediate_size=3 * hidden // 2, pad_token_id=0)
        )
    elif name == "siglip":
        tower = {key: wide[key] for key in wide if key != "vocab_size"}
        model = hf.SiglipForImageClassification(hf.SiglipConfig(
            vision_config={**tower, "image_size": pixels, "patch_size": 16}))  # fmt: skip
    elif name == "mobilenet_v1":
        model = hf.MobileNetV1ForImageClassification(hf.MobileNetV1Config())
    elif name == "roformer":  # rotations in an encoder
        model = hf.RoFormerForMaskedLM(hf.RoFormerConfig(**wide, embedding_size=hidden))
    elif name == "starcoder2":  # biases, and a window beyond the tokens
        model = hf.Starcoder2ForCausalLM(
            hf.Starcoder2Config(**wide, num_key_value_heads=max(1, heads // 8))
        )
    elif name == "smollm3":  # every fourth layer without positions
        model = hf.SmolLM3ForCausalLM(hf.SmolLM3Config(
            **text, intermediate_size=11 * hidden // 4, num_key_value_heads=max(1, heads // 4),
            pad_token_id=0))  # fmt: skip
    elif name == "squeezebert":  # linear layers as grouped convolutions along a line
        model = hf.SqueezeBertForMaskedLM(hf.SqueezeBertConfig(**wide, embedding_size=hidden))
    elif name == "xglm":
        model = hf.XGLMForCausalLM(hf.XGLMConfig(
            vocab_size=text["vocab_size"], d_model=hidden, ffn_dim=4 * hidden,
            num_layers=layers, attention_heads=heads))  # fmt: skip
    elif name == "cvt":  # 13: convolutions make queries, keys and values
        model = hf.CvtForImageClassification(hf.CvtConfig())
    else:
        beit = {key: wide[key] for key in wide if key != "vocab_size"}
        model = hf.BeitForImageClassification(
            hf.BeitConfig(**beit, image_size=pixels, patch_size=16, drop_path_rate=0.0)
        )
    made: torch.nn.Module = model
    return made
