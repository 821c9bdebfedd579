"""Serving plans for attention over latents: planned, run in stages, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import foreplan
from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.serving.spec import ServingWorkload

WORKLOAD = {
    "batch": 4, "prompt_tokens": 64, "new_tokens": 9, "prefill_microbatch": 2,
    "decode_microbatch": 4,
}  # fmt: skip


def planned(model: str = "deepseek-v2-lite", **changes: object) -> Plan:
    return foreplan.plan("serving", model, "2xl4", WORKLOAD | changes, costs="predicted")


@pytest.mark.parametrize("kv_bits", [16, "auto"])
def test_a_cluster_serves_it(kv_bits: object) -> None:
    plan = planned(kv_bits=kv_bits)
    cached = sum(rank.memory_bytes["kv_cache"] for rank in plan.predicted.ranks)
    assert cached == 27 * 4 * 73 * 1152  # layers, requests, positions, bytes
    kernels = plan.decision["stages"][0]["kernels"]
    assert kernels["prefill/attention"] == "bf16/bf16/torch.sdpa"
    assert kernels["decode/attention"] == "bf16/bf16/torch.latent_bmm"
    assert plan.predicted.total_s == pytest.approx(plan.bound.lower_s, rel=0.02)
    assert all(rank.cause_s["latent_attention"] > 0 for rank in plan.predicted.ranks)


def test_profiles_measure_both_ways_of_attention() -> None:
    programs = serving_programs(
        load_model("deepseek-v2-lite"), ServingWorkload(**(WORKLOAD | {"kv_bits": "auto"})), "cpu"
    )
    found = {(item.op, str(item.variant)) for item in programs}
    assert ("latent_attention", "bf16/fp32/torch.latent_sdpa") in found
    assert ("attention", "bf16/fp32/torch.sdpa") in found
    assert {text for op, text in found if op == "cache_write"} == {"bf16/bf16/torch.copy"}
    assert {text.partition("torch.")[2] for op, text in found if op == "matmul"} == {
        "linear", "bmm", "bmm_transposed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kv_bits": 8}, r"kv_bits: got 8, expected 16 or auto: the latents that deepseek-v2-lite"),
        ({"tensor_parallel": 2}, r"tensor_parallel: got 2, expected auto or one of 1"),
    ],
)
def test_what_latents_do_not_have_is_one_line(changes: dict[str, object], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        planned(**changes)


def test_training_plans_refuse_it() -> None:
    tower = {"name": "eye", "model": "vit-3b", "tokens": 64, "patch_features": 588}
    training = {"encoders": [tower], "sequence_length": 256, "microbatches": 4}
    with pytest.raises(SpecError, match=r"model deepseek-v3: .*layers of experts"):
        foreplan.plan("bubbles", "deepseek-v3", "8xa100-80g", training)


def test_exports_take_it_or_say_why(tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = planned(bits=(8,))
    for target in ("vllm", "sglang", "llama.cpp", "torchrun"):
        assert export_plan(plan, target, tmp_path_factory.mktemp("x")).files
    with pytest.raises(SpecError, match=r"model\.family: got 'deepseek_v2'"):
        export_plan(plan, "tensorrt-llm", tmp_path_factory.mktemp("x"))


def test_stages_say_what_one_process_says(check_stages: Callable[..., None]) -> None:
    whole = load_model("deepseek-v3")
    assert whole.experts is not None
    few = {"count": 16, "active": 4, "ffn": 64, "shared_ffn": 64, "dense_layers": (0,)}
    model = whole.model_copy(
        update={
            "layers": 3, "vocab": 128, "hidden": 128, "ffn": 192, "heads": 4, "kv_heads": 4,
            "latent": LatentAttention(rank=32, plain=16, turned=64, value=16, query_rank=48),
            "experts": whole.experts.model_copy(update=few),
        }
    )  # fmt: skip
    workload = ServingWorkload(**WORKLOAD)
    kernels = {
        "prefill/attention": "bf16/bf16/torch.sdpa",
        "decode/attention": "bf16/fp32/torch.latent_sdpa",
        **{f"{phase}/{op}": "bf16/bf16/torch.linear"
           for phase in ("prefill", "decode") for op in ("linear/16", "head")},
    }  # fmt: skip
    check_stages(model, workload, kernels)
