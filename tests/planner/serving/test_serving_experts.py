"""Serving plans for mixtures of experts, of layers of one class and of two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import foreplan
from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.quality.sensitivity import weight_sensitivity
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.tensor_parallel import degrees
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_zoo import device
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.api import load_cluster
from foreplan.planner.plan import Plan
from foreplan.planner.serving.chain import ServingChains, static_bytes
from foreplan.planner.serving.kernels import compare_tokens, single_process_tokens
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload
from foreplan.planner.serving.workspace import StageWorkspace

WORKLOAD = {
    "batch": 4, "prompt_tokens": 64, "new_tokens": 9, "prefill_microbatch": 2,
    "decode_microbatch": 4,
}  # fmt: skip
SIZES = MicroBatches(2, 4)


def planned(model: str, devices: str, costs: str, **changes: object) -> Plan:
    return foreplan.plan("serving", model, devices, WORKLOAD | changes, costs=costs)


def cluster(devices: str) -> Cluster:
    return load_cluster(devices)[0]


def pricing(model: str, name: str, **changes: object) -> Pricing:
    book = CostBook([RooflineSource({f"localhost/{name}": device(name)})])
    return Pricing(load_model(model), ServingWorkload(**(WORKLOAD | changes)), book)


@pytest.mark.parametrize("costs", ["roofline", "predicted"])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-moe-16b"])
def test_mixtures_are_planned(model: str, costs: str) -> None:
    plan = planned(model, "2xa100-80g", costs)
    assert plan.bound.gap < 1e-3
    held = sum(rank.memory_bytes["weights"] for rank in plan.predicted.ranks)
    described = load_model(model)
    # Every expert is somewhere, at 3 bits or more, and counts in full.
    assert held > (described.parameters - 2 * described.vocab * described.hidden) * 3 / 8
    assert all(rank.cause_s["experts"] > 0 for rank in plan.predicted.ranks)
    assert any("one by one" in note for note in plan.assumptions)
    # The simulator's replay of the plan and the solver's law tell the same time.
    assert plan.predicted.total_s == pytest.approx(plan.bound.lower_s, rel=0.02)


def test_only_some_gpus_call_experts_one_by_one(tmp_path: Path) -> None:
    cores = tmp_path / "cores.yaml"
    cores.write_text("devices: [{name: xeon_8592+, memory_bytes: 16 GiB}]")
    for model, devices in (
        ("tiny-moe-random", cores), ("llama-3.2-1b", "2xa100-80g"), ("olmoe-1b-7b", "h200"),
    ):  # fmt: skip
        notes = foreplan.plan("serving", model, devices, WORKLOAD, costs="roofline").assumptions
        assert not any("one by one" in note for note in notes)


def test_all_experts_have_to_fit() -> None:
    # 46.7 billion parameters at 4.5 bits: 24.7 GiB.
    with pytest.raises(InfeasibleError, match=r"mixtral-8x7b at 4 bits needs 2[4-7]\S* GiB"):
        planned("mixtral-8x7b", "t4", "roofline", bits=(4,))
    with pytest.raises(InfeasibleError, match=r"above all weights .*all 64 experts of a layer"):
        planned("deepseek-moe-16b", "2xt4", "roofline", bits=(16,), tensor_parallel="auto")


def test_each_class_has_its_own_price_and_size() -> None:
    price = pricing("deepseek-moe-16b", "h200", bits=(16, 4))
    model = price.model
    omega = np.zeros((model.layers, 2))
    chains = ServingChains(price, cluster("h200"), (141 << 30,), omega)
    problem = chains.problem(SIZES)
    dense, *mixed = problem.memory_bytes[0, :, 0]
    assert len(set(mixed)) == 1
    cache = 2 * 4 * 73 * 2 * 16 * 128  # keys and values, requests, positions, bf16, heads
    assert dense == 2 * model.parameters_of("dense") + cache
    assert mixed[0] == 2 * model.parameters_of("moe") + cache
    for table in (problem.prefill_s[0], problem.decode_s[0]):
        assert (table[1:] == table[1]).all()
        assert (table[0] != table[1]).all()
    # A stage of both classes holds and costs what its layers do.
    whole = static_bytes(model, price.workload, 0, 3, (16, 4, 16))
    assert whole["weights"] + whole["kv_cache"] == (
        problem.memory_bytes[0, 0, 0]
        + problem.memory_bytes[0, 1, 1]
        + problem.memory_bytes[0, 2, 0]
    )
    rank, kernels = chains.first(0), chains.kernels(0, SIZES)
    three = price.seconds(rank, price.layers(kernels, 0, (16, 4, 16), PREFILL, SIZES))
    expected = problem.prefill_s[0, 0, 0] + problem.prefill_s[0, 1, 1] + problem.prefill_s[0, 2, 0]
    assert three == pytest.approx(expected)


def test_a_larger_batch_costs_less_a_request() -> None:
    """Rows share the experts that they touch, the less so the fewer rows there are."""
    price = pricing("qwen3-30b-a3b", "h200", batch=64, prefill_microbatch=1, decode_microbatch=64)
    rank = cluster("h200").ranks()[0]
    kernels = price.kernels(rank, MicroBatches(1, 64))
    times = [
        price.seconds(rank, price.layer(kernels, 16, DECODE, MicroBatches(1, rows)))
        for rows in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert times == sorted(times)
    each = [seconds / rows for seconds, rows in zip(times, (1, 2, 4, 8, 16, 32, 64), strict=True)]
    assert each == sorted(each, reverse=True)


def test_workspace_has_room_for_one_popular_expert() -> None:
    model = load_model("olmoe-1b-7b")
    workload = ServingWorkload(**WORKLOAD)
    rows = 2 * 64
    least = rows * 2 * (3 * 2048 + 6 * 2048 + 4 * 1024)
    space = StageWorkspace(model, workload, SIZES, "cuda")
    assert space.stage_bytes(0, 1, (16,)) > least


def test_profiles_measure_the_experts_of_every_class() -> None:
    model = load_model("deepseek-moe-16b")
    found = serving_programs(model, ServingWorkload(**WORKLOAD), "cpu")
    assert len(found) == len(set(found))
    ops = {made.op for made in found}
    assert {"router", "experts", "linear", "activation"} <= ops
    assert {made.dims["n"] for made in found if made.op == "linear"} >= {2 * 10944, 2 * 2816, 2048}
    rows = {made.dims["rows"] for made in found if made.op == "experts"}
    assert rows == {128, 4}
    # Every expert kernel takes both of an expert's products.
    assert all(made.variant.storage in ("bf16", "int8", "int4")
               for made in found if made.op == "experts")  # fmt: skip


def test_stages_say_what_one_process_says() -> None:
    """Real kernels, planned decision, layers of both classes, two stages against one process."""
    model = load_model("tiny-moe-random")
    small = WORKLOAD | {"prompt_tokens": 6, "new_tokens": 4}
    workload = ServingWorkload(**small)
    kernels = {
        f"{phase}/{what}": kernel
        for phase in ("prefill", "decode")
        for what, kernel in (
            ("attention", "bf16/bf16/torch.sdpa"), ("head", "bf16/bf16/torch.linear"),
            ("linear/8", "int8/bf16/torch.int8pack_mm"), ("linear/16", "bf16/bf16/torch.linear"),
        )
    }  # fmt: skip
    two = {
        "stages": [
            {"rank": 0, "device": "a", "start": 0, "end": 2, "bits": [8, 16], "kernels": kernels},
            {"rank": 1, "device": "b", "start": 2, "end": 6, "bits": [8] * 4, "kernels": kernels},
        ],
        "prefill_microbatch": 2, "decode_microbatch": 4, "average_bits": 28 / 3, "omega": 0.0,
    }  # fmt: skip
    one = two | {
        "stages": [
            {"rank": 0, "device": "a", "start": 0, "end": 6, "bits": [8, 16, 8, 8, 8, 8],
             "kernels": kernels}
        ]
    }  # fmt: skip
    here = cluster("2xcpu:threads=1")
    torch.set_num_threads(1)
    results = [
        single_process_tokens(
            model, here, workload, ServingDecision.model_validate(d, strict=False), "reference", 0
        )
        for d in (one, two)
    ]
    assert compare_tokens(results[1], results[0], "reference").exact


def test_quality_from_weights_counts_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, vocab_size=96, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[1], head_dim=16,
        eos_token_id=1,
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # A far outlier in one expert of the last layer makes its groups' steps coarse.
        module.model.layers[2].mlp.experts.down_proj[3, :, ::64] *= 40
    module.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    omega = weight_sensitivity(model, (16, 8, 4, 3))
    assert omega.shape == (3, 4)
    assert (omega[:, 0] == 0).all()
    assert (np.diff(omega, axis=1) > 0).all()
    assert omega[2, 2] > 1.2 * omega[0, 2]


def test_groups_of_devices_share_every_expert() -> None:
    assert degrees(load_model("mixtral-8x7b"), 8) == (1, 2, 4, 8)
    made = planned("mixtral-8x7b", "2xa100-80g", "roofline", tensor_parallel=2)
    assert [stage["peers"] for stage in made.decision["stages"]] == [[1]]
    weights = [rank.memory_bytes["weights"] for rank in made.predicted.ranks]
    whole = 2 * load_model("mixtral-8x7b").parameters
    assert weights[0] == weights[1] < 0.51 * whole


def test_what_knows_no_experts_says_so() -> None:
    tower = {"name": "eye", "model": "vit-3b", "tokens": 64, "patch_features": 588}
    training = {"encoders": [tower], "sequence_length": 256, "microbatches": 4}
    with pytest.raises(SpecError, match=r"model mixtral-8x7b: .*layers of experts"):
        foreplan.plan("bubbles", "mixtral-8x7b", "8xa100-80g", training)
