"""Beyond a sliding window a pass of transformers attends under a mask, and is priced so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foreplan.cost_models.lowering.graph_programs import model_steps
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.ranking import rank_devices
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import Program

WINDOW = 32
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "vocab_size": 100, "max_position_embeddings": 256, "sliding_window": WINDOW,
    "num_hidden_layers": 4, "torch_dtype": "float32",
}  # fmt: skip
#: The first two layers see everything, the others slide.
MIXED = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}


def _folder(tmp_path: Path, fields: dict[str, Any]) -> Path:
    folder = tmp_path / fields["model_type"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | fields))
    return folder


def _run(folder: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which attentions of a real pass are given a mask."""
    masked: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, **named: Any) -> Any:
        masked.append(named.get("attn_mask") is not None)
        return attend(query, key, value, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    config = transformers.AutoConfig.from_pretrained(folder)
    build: Any = transformers.AutoModelForCausalLM.from_config
    module = build(config).eval()
    with torch.no_grad():
        module(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    return masked


@pytest.mark.parametrize("fields", [{"model_type": "mistral"}, MIXED], ids=["mistral", "mixed"])
@pytest.mark.parametrize("tokens", [WINDOW - 1, WINDOW, 3 * WINDOW])
def test_a_pass_is_priced_with_the_masks_that_a_real_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], tokens: int
) -> None:
    folder = _folder(tmp_path, fields)
    steps = model_steps(load_model(folder), batch=1, tokens=tokens)
    works = [step.work for step in steps if step.kind == "attention"]
    kernels = [work.variant.kernel for work in works if isinstance(work, Program)]
    masked = ["_mask" in kernel for kernel in kernels]
    assert masked == _run(folder, tokens, monkeypatch)
    assert any(masked) == (tokens >= WINDOW)


def test_a_window_is_not_faster_than_the_tokens_before_it() -> None:
    predictor, found = Predictor.load(), []
    for tokens in (4095, 4096, 8192):
        ranked = rank_devices(
            "mistral-7b-v0.1", "h200", sequence_length=tokens, predictor=predictor
        )
        found.append(ranked.fastest.latency_s)
    assert found == sorted(found)
