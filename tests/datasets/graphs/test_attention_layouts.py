"""Without data a decoder's trace has the copies that it has with data."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import transformers

from foreplan.datasets.graphs.capture import capture

SIZES = {"vocab_size": 64, "num_hidden_layers": 2}
CONFIGS = {
    "llama": SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                      "num_key_value_heads": 2},
    "gpt2": {"vocab_size": 64, "n_layer": 2, "n_embd": 64, "n_head": 4},  # drops attention
    "opt": SIZES | {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4,
                    "word_embed_proj_dim": 64},
}  # fmt: skip


def operators(family: str, place: str, *, training: bool) -> Counter[tuple[str, str]]:
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    with torch.device(place):
        module = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(2, 24, dtype=torch.int64)
    graph = capture(
        module, {"input_ids": ids, "use_cache": False}, eager=training, training=training
    )
    return Counter((call.target, call.result) for call in graph.calls if call.operator)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("family", CONFIGS)
def test_no_layer_copies_what_its_attention_left(family: str, training: bool) -> None:
    with_data, without = (operators(family, place, training=training) for place in ("cpu", "meta"))
    assert with_data == without


def test_heads_that_lie_apart_stay_apart() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2) + 0.0

    found = []
    for query in (
        torch.zeros(2, 4, 8, 16, device="meta"),
        torch.zeros(2, 8, 4, 16, device="meta").transpose(1, 2),
    ):
        (call,) = [c for c in capture(Attention(), (query,)).calls if "add" in c.target]
        ((_, strides, _),) = [a["$tensor"] for a in json.loads(call.arguments)[0][:1]]
        found.append(strides)
    assert found == [[512, 16, 128, 1], [512, 64, 16, 1]]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_attention_inside_a_region_and_by_keywords(training: bool) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                q = self.linear(x).unflatten(-1, (4, 16)).transpose(1, 2)
                read = torch.nn.functional.scaled_dot_product_attention(query=q, key=q, value=q)
                return read.transpose(1, 2).contiguous().flatten(2)

    found = []
    for place in ("cpu", "meta"):
        with torch.device(place):
            module, x = Attention(), torch.zeros(2, 8, 64)
        calls = capture(module, (x,), training=training).calls
        found.append([(call.target, call.result) for call in calls if call.operator])
    assert found[0] == found[1]
    assert [target for target, _ in found[1]] == [
        "aten.linear.default", "aten.scaled_dot_product_attention.default",
    ]  # fmt: skip
