"""Exports of plans for mixtures of experts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan

WORKLOAD = {"batch": 4, "prompt_tokens": 64, "new_tokens": 8}


def plan(model: str, bits: tuple[int, ...]) -> Plan:
    sizes = {"prefill_microbatch": 4, "decode_microbatch": 4}
    return foreplan.plan(
        "serving", model, "2xa100-80g", WORKLOAD | sizes | {"bits": bits}, costs="roofline"
    )


@pytest.fixture(scope="module")
def mixtral() -> Plan:
    return plan("mixtral-8x7b", (4,))


@pytest.mark.parametrize("target", ["vllm", "sglang", "llama.cpp", "torchrun"])
def test_quantised_experts_are_written(mixtral: Plan, target: str, tmp_path: Path) -> None:
    written = export_plan(mixtral, target, tmp_path)
    if target != "torchrun":
        assert any(line.startswith("experts:") for line in written.not_expressed)


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt-llm"])
def test_experts_that_are_published_in_four_bits_stay_so(
    mixtral: Plan, target: str, tmp_path: Path
) -> None:
    written = export_plan(plan("gpt-oss-20b", (16,)), target, tmp_path / "oss")
    assert any("MXFP4" in line for line in written.not_expressed)
    if target != "tensorrt-llm":  # which refuses these
        others = export_plan(mixtral, target, tmp_path / "mixtral").not_expressed
        assert not any("MXFP4" in line for line in others)


@pytest.mark.parametrize(
    ("model", "taken", "left"),
    [
        (
            "mixtral-8x7b",
            ["self_attn.q_proj", "block_sparse_moe.experts.7.w1", "block_sparse_moe.experts.0.w2"],
            ["block_sparse_moe.gate", "input_layernorm"],
        ),
        (
            "qwen1.5-moe-a2.7b",
            ["self_attn.o_proj", "mlp.experts.59.gate_proj", "mlp.shared_expert.down_proj"],
            ["mlp.gate", "mlp.shared_expert_gate"],
        ),
        (
            "deepseek-v2-lite",
            ["self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.up_proj"],
            ["mlp.gate", "self_attn.kv_b_proj"],
        ),
    ],
)
def test_patterns_take_experts_and_leave_routers(
    model: str, taken: list[str], left: list[str], tmp_path: Path
) -> None:
    written = export_plan(plan(model, (8,)), "vllm", tmp_path)
    document = json.loads(written.files["quantization_config.json"])
    (target,) = document["config_groups"]["group_0"]["targets"]
    pattern = re.compile(target.removeprefix("re:"))
    assert all(pattern.match(f"model.layers.5.{name}") for name in taken)
    assert not any(pattern.match(f"model.layers.5.{name}") for name in left)
    # A linear that no group takes has to be ignored, or the server refuses the checkpoint.
    ignored = [re.compile(word[3:]) for word in document["ignore"] if word.startswith("re:")]
    for name in left[:1] if "norm" in left[1] else left:
        assert any(word.match(f"model.layers.5.{name}") for word in ignored)
    assert not any(word.match(f"model.layers.5.{name}") for word in ignored for name in taken)


def test_tensorrt_llm_takes_experts_of_16_bits_alone(mixtral: Plan, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"decision: bits of layer 0: .*experts of int4"):
        export_plan(mixtral, "tensorrt-llm", tmp_path)
    export_plan(plan("mixtral-8x7b", (16,)), "tensorrt-llm", tmp_path)
    with pytest.raises(SpecError, match=r"model\.family: .*deepseek.* a mixture"):
        export_plan(plan("deepseek-moe-16b", (16,)), "tensorrt-llm", tmp_path)
