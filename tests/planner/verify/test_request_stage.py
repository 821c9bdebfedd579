"""Requests of unequal lengths in one batch: tokens equal those of each request alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import RandomWeights
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.request_stage import RequestStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 160, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-mha": LLAMA | {"num_key_value_heads": 4},
    "mistral": LLAMA | {"sliding_window": 5},
    "qwen3": LLAMA | {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": LLAMA
    | {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 10, "pad_token_id": 0,
       "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_positions": 64},
    "opt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
            "vocab_size": 160, "max_position_embeddings": 64},
}  # fmt: skip
LENGTHS, NEW = (9, 3, 14, 6), 5


def model_of(name: str, tmp_path: Any) -> Model:
    folder = tmp_path / name
    folder.mkdir()
    config = {"model_type": name.partition("-")[0], "torch_dtype": "float32", **MODELS[name]}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(str(folder))


def kernels_of(model: Model, cache: str) -> StageKernels:
    def both(text: str) -> PhaseKernels:
        return PhaseKernels(Variant.parse(text), Variant.parse(text))

    linear = both("bf16/bf16/torch.linear")
    attention = both("int8/bf16/torch.dequant_sdpa" if cache == "int8" else "bf16/bf16/torch.sdpa")
    return StageKernels((linear,) * model.layers, attention, linear)


def alone(model: Model, cache: str, prompt: torch.Tensor) -> list[int]:
    stage = DecoderStage(
        model, 0, model.layers, prefill_batches=(1,), decode_batches=(1,), prompt=len(prompt),
        positions=len(prompt) + NEW, reference=True,
    )  # fmt: skip
    stage.load(RandomWeights(model, seed=0), kernels_of(model, cache))
    made = stage.prefill(0, prompt[None])
    tokens = [int(made)]
    for step in range(1, NEW):
        made = stage.decode(0, step, made)
        tokens.append(int(made))
    return tokens


@pytest.mark.parametrize(
    ("name", "cache"), [*((name, "bf16") for name in MODELS), ("llama", "int8")]
)
def test_unequal_requests_say_what_each_says_alone(name, cache, tmp_path):
    model = model_of(name, tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(model.vocab, (n,), generator=generator) for n in LENGTHS]
    stage = RequestStage(
        model, 0, model.layers, rows=4, positions=max(LENGTHS) + NEW, reference=True
    )
    stage.load(RandomWeights(model, seed=0), kernels_of(model, cache))
    tokens: list[list[int]] = [[] for _ in prompts]

    def fill(first: int, members: list[int]) -> None:
        tokens_each = 2 + max(LENGTHS[i] for i in members)
        ids = torch.zeros(len(members), tokens_each, dtype=torch.int64)
        for row, i in enumerate(members):
            ids[row, : LENGTHS[i]] = prompts[i]
        made = stage.fill(first, [LENGTHS[i] for i in members], tokens_each, ids)
        for i, token in zip(members, made.tolist(), strict=True):
            tokens[i].append(token)

    def extend(first: int, members: list[int]) -> None:
        last = torch.tensor([tokens[i][-1] for i in members])
        made = stage.extend(first, [LENGTHS[i] + len(tokens[i]) for i in members], last)
        for i, token in zip(members, made.tolist(), strict=True):
            tokens[i].append(token)

    fill(0, [0, 1])  # two of unequal lengths, padded
    extend(0, [0, 1])
    fill(2, [2])  # one joins while others decode
    for _ in range(NEW - 2):
        extend(0, [0, 1, 2])
    # The first two end; the third's row fills the gap, and a fourth joins behind it.
    stage.move(2, 0, LENGTHS[2] + len(tokens[2]) - 1)
    fill(1, [3])
    extend(0, [2, 3])
    while len(tokens[3]) < NEW:
        extend(1, [3])
    for prompt, said in zip(prompts, tokens, strict=True):
        assert said == alone(model, cache, prompt)


def test_attention_to_latents_is_refused():
    with pytest.raises(SpecError, match=r"got 'attention to latents'"):
        RequestStage(load_model("deepseek-v3"), 0, 1, rows=1, positions=2)
