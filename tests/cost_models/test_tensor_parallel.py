"""What one of several devices holds that share a model's layers, and what they exchange."""

import math

import pytest

from foreplan.cost_models.costs import Collective
from foreplan.cost_models.tensor_parallel import (
    degrees,
    shard_layout,
    shard_model,
    stage_collectives,
)
from foreplan.datasets.models.decoder_memory import stage_bytes
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError


@pytest.mark.parametrize("name", ["llama-2-70b", "opt-13b", "gpt2", "qwen2-0.5b", "mixtral-8x7b"])
def test_every_degree_covers_every_tensor_once_but_for_shared_heads(name):
    model = load_model(name)
    for degree in degrees(model, 16):
        layout = shard_layout(model, degree)
        assert layout.missing() == {}
        for tensor, shape in ((t.name, t.shape) for t in layout.tensors.values()):
            held = sum(box.size for boxes in layout.boxes for box in boxes.get(tensor, ()))
            whole = math.prod(shape)
            copies = held / whole
            if tensor.split(".")[0] == "qkv":
                each = degree // math.gcd(degree, model.kv_heads)  # devices that share a head
                keys = 2 * model.kv_heads / (model.heads + 2 * model.kv_heads)
                assert copies == pytest.approx(1 + (each - 1) * keys)
            elif "norm" in tensor or tensor.startswith("positions"):
                assert copies == degree
            else:
                assert copies == 1


@pytest.mark.parametrize("name", ["llama-2-70b", "opt-13b", "qwen2-0.5b", "mixtral-8x7b"])
def test_bytes_of_a_shard_are_the_layouts(name):
    """The shard described as a model, and its boxes one by one, count the same first device."""
    model = load_model(name)
    for degree in degrees(model, 8):
        shard = shard_model(model, degree)
        layout = shard_layout(model, degree)
        boxes = layout.boxes[0]
        counted = {name: 2 * sum(box.size for box in held) for name, held in boxes.items()}
        linears = ("qkv", "out", "up", "down")
        weights = sum(counted[f"{linear}.weight"] for linear in linears)
        assert weights == 2 * sum(linear.n * linear.k for linear in shard.linears)
        assert counted["embed.weight"] + counted.get("positions.weight", 0) == (
            2 * shard.embedding_parameters
        )
        held = stage_bytes(shard, 0, model.layers, ["bf16"] * model.layers, batch=3, positions=7)
        cache = stage_bytes(model, 0, model.layers, ["bf16"] * model.layers, batch=3, positions=7)
        share = max(1 / degree, 1 / model.kv_heads)
        assert held["kv_cache"] == pytest.approx(cache["kv_cache"] * share)


def test_degrees_are_those_that_split_heads_and_features():
    assert degrees(load_model("llama-2-13b"), 8) == (1, 2, 4, 8)  # 40 heads, 13,824 features
    assert degrees(load_model("opt-13b"), 8) == (1, 2, 4, 5, 8)  # 40 heads, 20,480 features
    assert degrees(load_model("olmoe-1b-7b"), 8) == (1,)  # a norm takes all heads together
    assert shard_model(load_model("llama-2-70b"), 16).kv_heads == 1


@pytest.mark.parametrize("degree", [0, 3, 7, 80])
def test_a_degree_that_cannot_be_is_refused_with_the_reason(degree):
    with pytest.raises(SpecError, match="heads"):
        shard_model(load_model("llama-2-13b"), degree)


def test_a_pass_has_two_sums_a_layer_and_those_of_its_ends():
    model, group = load_model("llama-2-13b"), (4, 5)
    hidden = 3 * 64 * model.hidden * 2
    assert stage_collectives(model, group, 10, 3, 64, first=True, last=False) == (
        (Collective("all_reduce", hidden, group, "bf16", waited=True), 21),
    )
    assert stage_collectives(model, group, 10, 3, 64, first=False, last=True) == (
        (Collective("all_reduce", hidden, group, "bf16", waited=True), 20),
        (Collective("all_gather", 2 * 3 * 16, group, "fp64", waited=True), 1),
    )
    assert stage_collectives(model, (4,), 10, 3, 64, first=True, last=True) == ()
