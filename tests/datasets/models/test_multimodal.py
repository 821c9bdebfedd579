"""Sizes of published multimodal models, from the fields of their published configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreplan.datasets.models.multimodal import load_multimodal
from foreplan.errors import SpecError

# llava-hf/llava-1.5-7b-hf: what equals transformers' defaults is left out of text_config.
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
        "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14,
    },
}  # fmt: skip
# Qwen/Qwen2-VL-7B-Instruct: the language model's fields at the top.
QWEN: dict[str, Any] = {
    "model_type": "qwen2_vl", "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
        "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
# OpenGVLab/InternVL2-8B.
INTERNVL: dict[str, Any] = {
    "model_type": "internvl_chat", "downsample_ratio": 0.5,
    "llm_config": {
        "model_type": "internlm2", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 92553,
    },
    "vision_config": {
        "hidden_size": 1024, "image_size": 448, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
    },
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_llava(tmp_path: Path) -> None:
    found = load_multimodal(folder(tmp_path, LLAVA))
    assert (found.layers, found.hidden, found.heads, found.kv_heads) == (32, 4096, 32, 32)
    assert (found.ffn, found.vocab, found.head_dim) == (11008, 32064, 128)
    assert (found.vision.layers, found.vision.tokens) == (24, 576)
    assert found.vision.patch_features == 3 * 14 * 14
    assert (found.bridge.projector, found.bridge.merged) == ("mlp", 1)


def test_qwen2_vl_takes_images_of_any_size(tmp_path: Path) -> None:
    found = load_multimodal(folder(tmp_path, QWEN))
    assert (found.layers, found.kv_heads, found.vocab) == (28, 4, 152064)
    assert (found.vision.hidden, found.vision.ffn, found.vision.head_dim) == (1280, 5120, 80)
    assert found.vision.patch_features == 1176
    assert found.vision.tokens is None
    assert (found.bridge.projector, found.bridge.merged) == ("merger", 4)


@pytest.mark.parametrize("squares", [False, True])
def test_internvl_in_both_spellings(tmp_path: Path, squares: bool) -> None:
    config = json.loads(json.dumps(INTERNVL))
    if squares:  # as transformers' own class writes it
        config |= {"model_type": "internvl", "text_config": config.pop("llm_config")}
        config["text_config"]["model_type"] = "qwen2"
        config["vision_config"] |= {"image_size": [448, 448], "patch_size": [14, 14]}
    found = load_multimodal(folder(tmp_path, config))
    assert (found.vision.tokens, found.bridge.merged) == (1024, 4)
    assert found.kv_heads == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_type": "mllama"}, "model_type: got 'mllama'"),
     ({"vision_config": None}, "vision_config: got nothing"),
     ({"text_config": {"model_type": "gemma2"}}, "text_config: got 'gemma2'"),
     ({"text_config": {"model_type": "qwen2"}}, "hidden_size: got nothing"),
     ({"vision_config": LLAVA["vision_config"] | {"image_size": [336, 224]}}, "image_size"),
     ({"model_type": "internvl", "downsample_ratio": 0.3}, "downsample_ratio: got 0.3")],
)  # fmt: skip
def test_what_is_not_understood_is_named(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load_multimodal(folder(tmp_path, LLAVA | change))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.json"):
        load_multimodal(tmp_path)
