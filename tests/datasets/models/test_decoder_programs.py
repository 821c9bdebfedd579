"""Programs of a decoder: the list, its FLOP, and what the model decides of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.kernels.registry import function, kernels_for
from foreplan.datasets.models.decoder_memory import layer_bytes, stage_bytes
from foreplan.datasets.models.decoder_programs import (
    embedding_programs,
    fixed_variant,
    head_programs,
    layer_programs,
)
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model_zoo import zoo_names
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError

INT4 = Variant.parse("int4/bf16/torch.dequant_linear")
SDPA = Variant.parse("bf16/bf16/torch.sdpa")


def choose(op: str, dims: Mapping[str, int]) -> Variant:
    assert op in ("linear", *ATTENTIONS)
    return INT4 if op == "linear" else SDPA


@pytest.mark.parametrize("name", zoo_names())
def test_linear_flops_are_two_per_weight_and_row(name: str) -> None:
    model = load_model(name)
    for layer_class in sorted(set(model.layer_classes)):
        counts = layer_programs(model, 2, 16, 16, choose, layer_class)
        products = [(p, count) for p, count in counts if p.op in ("linear", *EXPERT_OPERATORS)]
        weights = sum(linear.n * linear.k for linear in model.linears_of(layer_class))
        if layer_class == "moe":
            each = sum(linear.n * linear.k for linear in model.expert_linears)
            weights += model.experts.active * each
        assert sum(count * p.flops for p, count in products) == 2.0 * weights * 32
        assert {p.variant for p, _ in products} == {INT4}


@pytest.mark.parametrize("name", ["gpt2", "opt-1.3b", "llama-3-8b", "qwen2-7b", "qwen3-8b"])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (1, 9)])
def test_every_program_has_a_kernel(name: str, queries: int, keys: int) -> None:
    model = load_model(name)
    counts = layer_programs(model, 2, queries, keys, choose)
    counts += embedding_programs(model, 2, queries) + head_programs(model, 2, choose)
    for made, count in counts:
        assert count > 0
        assert made.variant in kernels_for(made.op, "cpu") or made.variant == INT4
        if made.op != "linear":
            function(made.op, made.variant)


def test_llama_layer_in_full() -> None:
    counts = layer_programs(load_model("llama-3-8b"), 2, 1, 100, choose)
    assert [(str(made).split("@")[0], count) for made, count in counts] == [
        ("norm(rows=2,cols=4096)", 2),
        ("linear(rows=2,n=6144,k=4096)", 1),
        ("rope(rows=2,heads=40,head_dim=128)", 1),
        ("cache_write(batch=2,tokens=1,kv_heads=8,head_dim=128)", 1),
        ("attention(batch=2,queries=1,keys=100,heads=32,kv_heads=8,head_dim=128)", 1),
        ("linear(rows=2,n=4096,k=4096)", 1),
        ("add(rows=2,cols=4096)", 2),
        ("linear(rows=2,n=28672,k=4096)", 1),
        ("activation(rows=2,cols=14336)", 1),
        ("linear(rows=2,n=4096,k=14336)", 1),
    ]


def test_head_norms_part_the_rotation() -> None:
    counts = dict(layer_programs(load_model("qwen3-8b"), 1, 4, 4, choose))
    turned = [made.dims["heads"] for made in counts if made.op == "rope"]
    assert turned == [32, 8]
    assert sum(count for made, count in counts.items() if made.op == "norm") == 4


def test_the_model_decides_norm_and_activation() -> None:
    opt, llama = load_model("opt-125m"), load_model("llama-7b")
    assert fixed_variant(opt, "norm").kernel == "torch.layer_norm"
    assert fixed_variant(opt, "activation").kernel == "torch.relu"
    assert fixed_variant(llama, "activation").kernel == "torch.silu_mul"
    assert not any(made.op == "rope" for made, _ in layer_programs(opt, 1, 4, 4, choose))
    assert [made.op for made, _ in embedding_programs(opt, 1, 4)] == ["embedding", "add"]
    assert [made.op for made, _ in embedding_programs(llama, 1, 4)] == ["embedding"]
    with pytest.raises(SpecError):
        fixed_variant(llama, "linear")


def test_a_pass_cannot_see_fewer_keys_than_it_writes() -> None:
    with pytest.raises(SpecError, match=r"pass\.keys"):
        layer_programs(load_model("gpt2"), 1, 4, 3, choose)


def test_stage_bytes_of_a_whole_model() -> None:
    model = load_model("llama-2-7b")
    items = stage_bytes(model, 0, 32, ["bf16"] * 32, batch=4, positions=612)
    assert items["weights"] + items["embedding"] + items["head"] == 2 * model.parameters
    assert items["kv_cache"] == 32 * 4 * 612 * 2 * 4096 * 2
    middle = stage_bytes(model, 1, 31, ["int4"] * 30, batch=4, positions=612)
    assert middle["embedding"] == middle["head"] == 0
    # 4 bits and a bf16 scale and zero for every 64 weights: 4.5 bits.
    assert middle["weights"] == pytest.approx(30 * model.linear_parameters * 4.5 / 8, rel=1e-3)
    assert layer_bytes(model, "bf16") == 2 * model.layer_parameters
