"""Serving plans for attention with sinks and with capped scores: planned, run, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import foreplan
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.serving.spec import ServingWorkload

WORKLOAD = {
    "batch": 4, "prompt_tokens": 200, "new_tokens": 9, "prefill_microbatch": 2,
    "decode_microbatch": 4,
}  # fmt: skip
#: Operator and kernel of each zoo model's attention.
KINDS = {
    "gpt-oss-20b": ("sink_attention", "sink_sdpa"),
    "gemma-2-9b": ("capped_attention", "capped_bmm"),
}


def planned(model: str, costs: str = "predicted", **changes: object) -> Plan:
    return foreplan.plan("serving", model, "2xa100-80g", WORKLOAD | changes, costs=costs)


@pytest.mark.parametrize("costs", ["predicted", "roofline"])
@pytest.mark.parametrize("kv_bits", [16, 8, "auto"])
@pytest.mark.parametrize("name", KINDS)
def test_a_cluster_serves_it(name: str, kv_bits: object, costs: str) -> None:
    op, kernel = KINDS[name]
    plan = planned(name, costs, kv_bits=kv_bits)
    prefix = "torch.dequant_" if kv_bits == 8 else "torch."
    for phase in ("prefill", "decode"):
        chosen = plan.decision["stages"][0]["kernels"][f"{phase}/attention"]
        assert chosen.rpartition("/")[2] == prefix + kernel
    assert plan.predicted.total_s == pytest.approx(plan.bound.lower_s, rel=0.02)
    assert all(rank.cause_s[op] > 0 for rank in plan.predicted.ranks)
    assert all("attention" not in rank.cause_s for rank in plan.predicted.ranks)


@pytest.mark.parametrize("name", KINDS)
def test_sinks_and_caps_cost_more_than_plain_attention(name: str) -> None:
    """By what is computed beside it, and not by much."""
    op, _ = KINDS[name]
    plan = planned(name)
    plain = foreplan.plan(
        "serving",
        load_model(name).model_copy(update={"sinks": False, "score_cap": None}),
        "2xa100-80g", WORKLOAD, costs="predicted",
    )  # fmt: skip
    more, less = (
        sum(rank.cause_s[cause] for rank in p.predicted.ranks)
        for p, cause in ((plan, op), (plain, "attention"))
    )
    assert less < more < 6 * less


@pytest.mark.parametrize("name", KINDS)
def test_profiles_measure_its_attention_in_every_storage(name: str) -> None:
    op, kernel = KINDS[name]
    workload = ServingWorkload(**(WORKLOAD | {"kv_bits": "auto"}))
    programs = serving_programs(load_model(name), workload, "cpu")
    found = {(item.op, str(item.variant)) for item in programs if "attention" in item.op}
    assert found == {
        (op, f"{storage}/{compute}/torch.{'dequant_' * (storage == 'int8')}{kernel}")
        for storage in ("bf16", "int8") for compute in ("bf16", "fp32")
    }  # fmt: skip


def test_kernels_of_other_attention_are_refused() -> None:
    plan = planned("gpt-oss-20b")
    decision = json.loads(json.dumps(plan.decision))
    decision["stages"][0]["kernels"]["decode/attention"] = "bf16/bf16/torch.sdpa"
    changed = plan.model_copy(update={"decision": decision})
    with pytest.raises(
        SpecError, match=r"decode/attention: got 'bf16/bf16/torch.sdpa', .*sink_sdpa"
    ):
        foreplan.verify(changed, dry_run=True)


@pytest.mark.parametrize(
    ("name", "match"), [("gpt-oss-20b", "layers of experts"), ("gemma-2-2b", "gemma2 family")]
)
def test_bubble_plans_refuse_it(name: str, match: str) -> None:
    tower = {"name": "eye", "model": "vit-3b", "tokens": 64, "patch_features": 588}
    training = {"encoders": [tower], "sequence_length": 100, "microbatches": 4}
    with pytest.raises(SpecError, match=match):
        foreplan.plan("bubbles", name, "8xa100-80g", training)


def test_exports_take_it_or_say_why(tmp_path: Path) -> None:
    plain, mixture = planned("gemma-2-9b", bits=(8,)), planned("gpt-oss-20b", bits=(16,))
    for target in ("vllm", "sglang", "llama.cpp", "torchrun"):
        assert export_plan(plain, target, tmp_path / target).files
    for target in ("vllm", "sglang", "llama.cpp", "torchrun", "tensorrt-llm"):
        assert export_plan(mixture, target, tmp_path / f"{target}-mixture").files
    with pytest.raises(SpecError, match=r"model\.family: got 'gemma2'"):
        export_plan(plain, "tensorrt-llm", tmp_path / "x")
    quantised = planned("gpt-oss-20b", bits=(8,))
    for target in ("vllm", "sglang"):
        with pytest.raises(SpecError, match=r"16 bits: nothing documents gpt_oss.*to llama\.cpp"):
            export_plan(quantised, target, tmp_path / "x")
    with pytest.raises(SpecError, match=r"experts of 16 bits: .*or export to llama\.cpp"):
        export_plan(quantised, "tensorrt-llm", tmp_path / "x")
    assert export_plan(quantised, "llama.cpp", tmp_path / "x").files


def small(name: str) -> Model:
    whole = load_model(name)
    changes: dict[str, object] = {
        "layers": 3, "vocab": 128, "hidden": 128, "ffn": 192, "heads": 4, "kv_heads": 2,
        "head_dim": 32, "sliding_window": 20, "window_layers": (0, 2),
    }  # fmt: skip
    if whole.experts is not None:
        few = {"count": 8, "active": 2, "ffn": 64}
        changes["experts"] = whole.experts.model_copy(update=few)
    return whole.model_copy(update=changes)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("name", KINDS)
def test_stages_say_what_one_process_says(
    name: str, kv_bits: int, check_stages: Callable[..., None]
) -> None:
    model = small(name)
    workload = ServingWorkload(**(WORKLOAD | {"prompt_tokens": 50, "kv_bits": kv_bits}))
    attention = f"bf16/bf16/torch.{KINDS[name][1]}"
    if kv_bits == 8:
        attention = f"int8/bf16/torch.dequant_{KINDS[name][1]}"
    kernels = {
        f"{phase}/{op}": attention if op == "attention" else "bf16/bf16/torch.linear"
        for phase in ("prefill", "decode") for op in ("linear/16", "head", "attention")
    }  # fmt: skip
    check_stages(model, workload, kernels)
