"""Which GGUF type ``llama-quantize`` gives each tensor by the lines of an export.

Names of tensors are those that llama.cpp's ``convert_hf_to_gguf.py`` gives these families, and the
first line that is found in a name decides (``llama_tensor_get_type``), as its quantiser was seen to
do with the same lines.
"""

from __future__ import annotations

import re

import pytest

import foreplan
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError
from foreplan.planner.export import gguf_types
from foreplan.planner.export.exporter import exporter
from foreplan.planner.export.handover import Handover, Scheme

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")


def types_of(model: str, storage: str, *names: str) -> list[str]:
    """Types of tensors of the last layer, which alone is quantised."""
    document = load_model(model)
    schemes = (*[Scheme("bf16")] * (document.layers - 1), Scheme(storage))
    handover = Handover((document.layers,), schemes, (("here", 0),))
    text = gguf_types.write(handover, document, "bf16")[gguf_types.FILE]
    assert gguf_types.read(text, document.layers) == schemes
    lines = [line.rpartition("=") for line in text.splitlines()]

    def of(name: str) -> str:
        return next(kind for pattern, _, kind in lines if re.search(pattern, name))

    assert {of(f"blk.0.{name}.weight") for name in names} == {"bf16"}
    return [of(f"blk.{document.layers - 1}.{name}.weight") for name in names]


@pytest.mark.parametrize(("storage", "kind"), gguf_types.TYPE.items())
def test_every_tensor_of_a_layer_gets_its_type(storage: str, kind: str) -> None:
    assert set(types_of("llama-3.2-1b", storage, *ATTENTION, *MLP)) == {kind}


def test_rows_that_no_large_block_divides_get_small_ones() -> None:
    """Else llama.cpp puts q5_0 in q4_K's place: 896 inputs, and 4864 of the last linear."""
    narrow, wide = [*ATTENTION, "ffn_gate", "ffn_up"], "ffn_down"
    assert set(types_of("qwen2.5-0.5b", "int4", *narrow)) == {"q4_0"}
    assert types_of("qwen2.5-0.5b", "int4", wide) == ["q4_K"]
    assert types_of("qwen2.5-0.5b", "int3", "attn_q", wide) == ["q4_0", "q3_K"]
    assert set(types_of("qwen2.5-0.5b", "int8", *narrow, wide)) == {"q8_0"}
    assert types_of("qwen2.5-72b", "int4", *ATTENTION, *MLP) == [*["q4_K"] * 6, "q4_0"]
    experts = ["ffn_gate_exps", "ffn_down_exps", "ffn_up_shexp", "ffn_down_shexp"]
    found = types_of("qwen1.5-moe-a2.7b", "int4", "attn_output", *experts)
    assert found == ["q4_K", "q4_K", "q4_0", "q4_K", "q4_K"]


def test_what_makes_heads_of_latents_keeps_its_16_bits() -> None:
    names = ["attn_k_b", "attn_v_b", "attn_kv_b", "attn_kv_a_mqa", "attn_q", "attn_output"]
    assert types_of("deepseek-v2-lite", "int8", *names) == [*["bf16"] * 3, *["q8_0"] * 3]


def test_rows_that_no_block_divides_are_refused() -> None:
    odd = load_model("llama-3.2-1b").model_copy(update={"ffn": 8200})
    handover = Handover((16,), (*[Scheme("bf16")] * 3, *[Scheme("int8")] * 13), (("here", 0),))
    with pytest.raises(SpecError, match=r"bits of layer 3: got '8, with rows of 8200'.*of 32"):
        gguf_types.write(handover, odd, "bf16")


@pytest.mark.parametrize(("tokens", "held"), [(8, "72 up to 256"), (192, None), (193, "257 up")])
def test_a_larger_cache_than_the_plans_is_said(tokens: int, held: str | None) -> None:
    workload = {"batch": 4, "prompt_tokens": 64, "new_tokens": tokens, "bits": (16,)}
    plan = foreplan.plan("serving", "llama-3.2-1b", "l4", workload, costs="roofline")
    said = [line for line in exporter("llama.cpp").write(plan).not_expressed if "positions" in line]
    assert bool(said) == (held is not None)
    assert held is None or held in said[0]


def test_larger_tensors_than_the_plans_are_said() -> None:
    workload = {"batch": 4, "prompt_tokens": 64, "new_tokens": 8, "bits": (3,)}
    for model, more in (("qwen2.5-0.5b", True), ("llama-3.2-1b", False)):
        plan = foreplan.plan("serving", model, "l4", workload, costs="roofline")
        said = exporter("llama.cpp").write(plan).not_expressed
        assert any("with 896 inputs" in line for line in said) == more
