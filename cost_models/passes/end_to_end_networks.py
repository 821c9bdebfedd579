"""Networks of the end-to-end check: published configurations at four sizes, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.passes.end_to_end_scans import SCANS, scan_network
from foreplan.cost_models.passes.end_to_end_untouched import UNTOUCHED, UNTOUCHED_IMAGES, untouched

if TYPE_CHECKING:
    import torch

#: Width, layers, vocabulary, and (batch, tokens) or (batch, pixels) of each size, which a network
#: may have of its own: of each at least two keep an H200 busy for longer than its host.
SIZES: Mapping[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "layers": 4, "vocab": 64, "depths": (1, 1, 1, 1),
             "text": ((1, 1),), "image": ((1, 32),)},
    "small": {"hidden": 256, "layers": 4, "vocab": 2048, "depths": (1, 1, 1, 1),
              "text": ((1, 32), (4, 64)), "image": ((1, 64), (4, 64))},
    "medium": {"hidden": 384, "layers": 4, "vocab": 4096, "depths": (1, 1, 1, 1),
               "text": ((1, 128), (2, 48)), "image": ((1, 96), (3, 96))},
    "large": {"hidden": 2048, "layers": 12, "vocab": 32000, "depths": (3, 4, 6, 3),
              "text": ((1, 256), (4, 256), (8, 512), (16, 512)),
              "image": ((1, 224), (4, 224), (16, 224), (32, 224)),
              "resnet": ((1, 224), (16, 224), (64, 224), (128, 224))},
    # Shapes that no other size has, for networks that prices were not chosen on.
    "held_out": {"hidden": 1536, "layers": 8, "vocab": 50000, "depths": (2, 3, 5, 2),
                 "text": ((2, 384), (12, 320)), "image": ((6, 192), (48, 192))},
}  # fmt: skip

TEXT = ("llama", "gpt2", "opt", "qwen3", "bert")
IMAGE = ("resnet", "vit", "convnext")
NETWORKS = (*TEXT, *IMAGE)
#: Networks that prices of the host are fitted to: none of the above.
CALIBRATION = ("gpt_neox", "phi", "distilbert", "dinov2", "swin", "regnet", "mobilenet_v2")
#: Networks in no other list; of these T5 and BART have an encoder and a decoder, and wav2vec 2.0
#: hears sound.
_OTHERS = ("t5", "bart", "segformer", "efficientnet", "wav2vec2", "gemma", "bloom", "pvt_v2")
_IMAGES = (
    *IMAGE, "dinov2", "swin", "regnet", "mobilenet_v2", "segformer", "efficientnet", "pvt_v2",
    *UNTOUCHED_IMAGES,
)  # fmt: skip
#: All that can be built.
KNOWN = (*NETWORKS, *CALIBRATION, *_OTHERS, *UNTOUCHED, *SCANS)


def shapes_of(name: str, size: str) -> tuple[tuple[int, int], ...]:
    """(batch, tokens) or (batch, pixels) that a network is run at."""
    kind = "image" if name in _IMAGES else "text"
    found: tuple[tuple[int, int], ...] = SIZES[size].get(name, SIZES[size][kind])
    return found


def build(name: str, size: str) -> torch.nn.Module:
    """One network, with random weights; configurations are the published ones, shrunk."""
    import transformers as hf

    s = SIZES[size]
    hidden, layers, vocab, heads = s["hidden"], s["layers"], s["vocab"], max(2, s["hidden"] // 64)
    text = {
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }  # fmt: skip
    gated = {**text, "intermediate_size": 11 * hidden // 4, "num_key_value_heads": heads // 2}
    wide = {**text, "intermediate_size": 4 * hidden}
    model: Any
    if name in UNTOUCHED:
        model = untouched(name, text, wide, shapes_of(name, size)[0][1])
    elif name in SCANS:
        model = scan_network(name, text)
    elif name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**gated))
    elif name == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**gated, head_dim=hidden // heads))
    elif name == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=heads))  # fmt: skip
    elif name == "opt":
        model = hf.OPTForCausalLM(hf.OPTConfig(
            **text, ffn_dim=4 * hidden, word_embed_proj_dim=hidden))  # fmt: skip
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**wide))
    elif name == "gpt_neox":
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**wide))
    elif name == "phi":
        model = hf.PhiForCausalLM(hf.PhiConfig(**wide))
    elif name == "distilbert":
        model = hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(
                vocab_size=vocab, dim=hidden, n_layers=layers, n_heads=heads, hidden_dim=4 * hidden
            )
        )
    elif name == "dinov2":
        model = hf.Dinov2ForImageClassification(
            hf.Dinov2Config(
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                image_size=s["image"][0][1],
                patch_size=16,
            )
        )
    elif name == "swin":
        pixels, embed = s["image"][0][1], hidden // 2
        first = max(2, embed // 32)  # heads of 32 channels
        model = hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=pixels,
                patch_size=4,
                embed_dim=embed,
                depths=[2, 2],
                num_heads=[first, 2 * first],
                window_size=max(4, pixels // 32),
            )
        )
    elif name == "t5":
        model = hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=vocab, d_model=hidden, d_kv=hidden // heads, d_ff=4 * hidden,
            num_layers=layers // 2, num_decoder_layers=layers // 2, num_heads=heads))  # fmt: skip
    elif name == "bart":
        model = hf.BartForConditionalGeneration(hf.BartConfig(
            vocab_size=vocab, d_model=hidden, encoder_layers=layers // 2,
            decoder_layers=layers // 2, encoder_attention_heads=heads,
            decoder_attention_heads=heads, encoder_ffn_dim=4 * hidden,
            decoder_ffn_dim=4 * hidden))  # fmt: skip
    elif name == "segformer":  # MiT-B0
        model = hf.SegformerForImageClassification(hf.SegformerConfig())
    elif name == "efficientnet":  # B0
        model = hf.EfficientNetForImageClassification(hf.EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280))  # fmt: skip
    elif name == "gemma":  # one head of keys and values, as Gemma 2B
        model = hf.GemmaForCausalLM(hf.GemmaConfig(
            **{**gated, "num_key_value_heads": 1}, head_dim=hidden // heads))  # fmt: skip
    elif name == "bloom":
        model = hf.BloomForCausalLM(hf.BloomConfig(
            vocab_size=vocab, hidden_size=hidden, n_layer=layers, n_head=heads))  # fmt: skip
    elif name == "pvt_v2":  # B0
        model = hf.PvtV2ForImageClassification(hf.PvtV2Config())
    elif name == "wav2vec2":  # no masks of the input drawn, no layer skipped: equal passes
        model = hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(
            **wide, apply_spec_augment=False, layerdrop=0.0))  # fmt: skip
    elif name == "regnet":
        model = hf.RegNetForImageClassification(hf.RegNetConfig())
    elif name == "mobilenet_v2":
        model = hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config())
    elif name == "vit":
        vit = {key: wide[key] for key in wide if key != "vocab_size"}
        model = hf.ViTForImageClassification(hf.ViTConfig(
            **vit, image_size=s["image"][0][1], patch_size=16))  # fmt: skip
    elif name == "resnet":
        model = hf.ResNetForImageClassification(hf.ResNetConfig(depths=list(s["depths"])))
    else:
        widths = [hidden // 8 * 2**stage for stage in range(4)]
        model = hf.ConvNextForImageClassification(
            hf.ConvNextConfig(depths=list(s["depths"]), hidden_sizes=widths)
        )
    made: torch.nn.Module = model
    return made


def example(name: str, size: str, shape: tuple[int, int] | None, device: str, dtype: Any) -> Any:
    """Inputs of a network by name, of the size's first shape if none is given."""
    import torch

    batch, extent = shape or shapes_of(name, size)[0]
    if name in _IMAGES:
        image = torch.rand(batch, 3, extent, extent, device=device).to(dtype)
        return {"pixel_values": image}
    if name == "wav2vec2":  # its convolutions make a token of 320 samples, the first of 400
        return {"input_values": torch.randn(batch, 320 * extent + 80, device=device).to(dtype)}
    ids = torch.randint(0, SIZES[size]["vocab"], (batch, extent), device=device)
    if name == "whisper":  # a spectrum of 80 bands, two frames a position
        frames = 2 * shapes_of(name, size)[0][1]
        heard = torch.randn(batch, 80, frames, device=device).to(dtype)
        return {"input_features": heard, "decoder_input_ids": ids, "use_cache": False}
    if name in ("t5", "bart"):
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} | ({} if "bert" in name else {"use_cache": False})
