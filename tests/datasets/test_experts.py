"""Mixtures of experts: parameters, the layers that have them, and the work of a pass."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.experts import (
    EXPERT_OPERATORS,
    computed_sizes,
    padded_rows,
    touched_experts,
)
from foreplan.datasets.kernels.registry import function, kernels_for
from foreplan.datasets.models.decoder_memory import layer_bytes, stage_bytes
from foreplan.datasets.models.decoder_programs import layer_programs
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import Variant, program
from foreplan.errors import SpecError

LINEAR = Variant.parse("bf16/bf16/torch.linear")
SDPA = Variant.parse("bf16/bf16/torch.sdpa")


def choose(op: str, dims: Mapping[str, int]) -> Variant:
    return LINEAR if op == "linear" else SDPA


# Parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # "46.7B total parameters but only uses 12.9B parameters per token": Mistral AI, Mixtral of
        # experts (mistral.ai/news/mixtral-of-experts).
        ("mixtral-8x7b", 46.7, 12.9),
        # "39B active parameters out of 141B": mistral.ai/news/mixtral-8x22b.
        ("mixtral-8x22b", 141, 39),
        # "14.3B parameters in total and 2.7B activated": model card of Qwen/Qwen1.5-MoE-A2.7B.
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        # "30.5B in total and 3.3B activated": model card of Qwen/Qwen3-30B-A3B; 3.35 exactly, which
        # the card cuts.
        ("qwen3-30b-a3b", 30.5, 3.35),
        # 1.3B of 6.9B: Muennighoff et al., OLMoE, arXiv:2409.02060, table 1.
        ("olmoe-1b-7b", 6.9, 1.3),
        # "16.4B parameters", 2.8B activated: Dai et al., DeepSeekMoE, arXiv:2401.06066, section 5.
        ("deepseek-moe-16b", 16.4, 2.8),
        # "20.9B" and "116.8B" in all: OpenAI, gpt-oss-120b & gpt-oss-20b model card, table 1; its
        # 3.6B and 5.1B active ones leave the embedding out, which is 0.58B.
        ("gpt-oss-20b", 20.9, 4.2),
        ("gpt-oss-120b", 116.8, 5.7),
    ],
)
def test_totals_are_those_published(name: str, total: float, active: float) -> None:
    model = load_model(name)

    def rounded(count: int, like: float) -> float:
        digits = len(str(like).partition(".")[2])
        return round(count / 1e9, digits)

    assert rounded(model.parameters, total) == total
    assert rounded(model.active_parameters, active) == active


def test_a_dense_model_uses_all_it_has() -> None:
    model = load_model("llama-3-8b")
    assert model.active_parameters == model.parameters
    assert set(model.layer_classes) == {"dense"}
    assert model.expert_linears == ()
    assert model.linears_of("moe") == model.linears


def test_layers_add_up_to_the_model() -> None:
    model = load_model("deepseek-moe-16b")
    assert model.layer_classes == ("dense", *["moe"] * 27)
    layers = model.parameters_of("dense") + 27 * model.parameters_of("moe")
    assert model.parameters == layers + model.embedding_parameters + model.head_parameters
    unused = 27 * (64 - 6) * 3 * 2048 * 1408
    assert model.parameters - model.active_parameters == unused


# Reading ------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
QWEN3 = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 20}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek", "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 20, "n_shared_experts": 2}  # fmt: skip
GLM4 = DEEPSEEK | {"model_type": "glm4_moe"}


def read(folder: Path, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(SMALL | fields))
    return load_model(folder)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        (QWEN3, ()),
        (QWEN3 | {"decoder_sparse_step": 2}, (0, 2, 4)),
        (QWEN3 | {"mlp_only_layers": [3, 0]}, (0, 3)),
        (QWEN3 | {"decoder_sparse_step": 3, "mlp_only_layers": [5]}, (0, 1, 3, 4, 5)),
        (DEEPSEEK | {"first_k_dense_replace": 2}, (0, 1)),
        (DEEPSEEK, ()),
        (GLM4, (0,)),
    ],
)
def test_which_layers_are_dense(
    fields: dict[str, Any], dense: tuple[int, ...], tmp_path: Path
) -> None:
    model = read(tmp_path, **fields)
    assert model.experts.dense_layers == dense
    assert [i for i, c in enumerate(model.layer_classes) if c == "dense"] == list(dense)


def test_shared_experts_are_one_wide_one(tmp_path: Path) -> None:
    model = read(tmp_path, **DEEPSEEK)
    assert [(s.name, s.n, s.k) for s in model.linears_of("moe")[2:]] == [
        ("shared_up", 80, 48), ("shared_down", 48, 40),
    ]  # fmt: skip
    assert model.experts.shared_gate is False
    assert read(tmp_path, **(DEEPSEEK | {"n_shared_experts": None})).experts.shared_ffn == 0


def test_either_name_of_the_number_of_experts(tmp_path: Path) -> None:
    renamed = {k: v for k, v in QWEN3.items() if k != "num_experts"}
    assert read(tmp_path, **renamed, num_local_experts=8) == read(tmp_path, **QWEN3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deepseek_v4"}, "model_type: .*deepseek_v4.* supported architecture"),
        ({"model_type": "phimoe"}, "model_type: .* supported architecture: deepseek, .*gpt2"),
        (QWEN3 | {"num_experts_per_tok": 9}, "active: .* at most the 8 experts"),
        (QWEN3 | {"num_experts": 0}, "num_experts: got 0, expected a whole number of at least 1"),
        (QWEN3 | {"mlp_only_layers": list(range(6))}, "mlp_only_layers: .* one layer of experts"),
        (QWEN3 | {"mlp_only_layers": 3}, "mlp_only_layers: got 3, expected a list of layers"),
        (QWEN3 | {"hidden_act": "relu"}, "silu"),
        (DEEPSEEK | {"first_k_dense_replace": 6}, "first_k_dense_replace: got 6"),
        (DEEPSEEK | {"scoring_func": "sigmoid"}, "scoring_func: .* softmax"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv: got 8.0, expected None"),
        (GLM4 | {"n_group": 3}, "routing: .* groups that 8 experts split into evenly"),
        (GLM4 | {"n_group": 8, "topk_group": 3}, "routing: .* in twos at least"),
        (GLM4 | {"n_group": 4}, "routing: .* as many are kept as 3 experts need"),
        (GLM4 | {"topk_group": 2}, "kept_groups: got 2, expected at most the 1 groups"),
        (GLM4 | {"routed_scaling_factor": 0}, "routed_scaling_factor: got 0"),
    ],
)
def test_what_is_not_modelled_is_one_line(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message) as error:
        read(tmp_path, **fields)
    assert "\n" not in str(error.value)


# Work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "active"), [(4, 2), (5, 1), (4, 3)])
def test_touched_experts_by_enumeration(count: int, active: int) -> None:
    draws = list(itertools.combinations(range(count), active))
    for rows in (1, 2, 3):
        every = itertools.product(draws, repeat=rows)
        different = [len(set(itertools.chain(*choice))) for choice in every]
        assert touched_experts(rows, count, active) == pytest.approx(
            sum(different) / len(different)
        )


@given(st.integers(1, 300), st.data(), st.floats(1, 1e5), st.floats(0, 1e5))
def test_more_rows_touch_more_experts(
    count: int, data: st.DataObject, rows: float, more: float
) -> None:
    active = data.draw(st.integers(1, count))
    here, there = (touched_experts(r, count, active) for r in (rows, rows + more))
    slack = 1e-9 * count
    assert active - slack <= here <= there + slack
    assert there <= min(count, active * (rows + more)) + slack


@given(st.integers(1, 4096), st.integers(1, 64), st.data())
def test_work_of_experts_grows_with_rows(rows: int, count: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, count))
    variant = data.draw(st.sampled_from(kernels_for("experts", "cpu", n=64, k=64)))
    dims = {"experts": count, "active": active, "ffn": 64, "hidden": 64}
    few, more = (program("experts", variant, rows=r, **dims) for r in (rows, rows + 1))
    assert few.flops < more.flops
    assert few.bytes < more.bytes
    # Never more than one copy of each expert's weights besides the activations of its rows.
    alone = program("experts", variant, rows=rows, **(dims | {"experts": 1, "active": 1}))
    assert few.bytes <= (count + rows * active) * alone.bytes


def test_few_shapes_are_computed() -> None:
    sizes = [padded_rows(count) for count in range(1, 4097)]
    assert all(count <= size for count, size in enumerate(sizes, 1))
    assert all(size - count < max(8, count / 8) for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert sizes[:8] == list(range(1, 9))
    assert len(set(sizes)) < 70
    # 32 rows each of the 16 experts, give or take three deviations of 5.3.
    assert computed_sizes(256, 16, 2) == len({16, 24, 32, 40, 48})
    assert computed_sizes(1, 8, 8) == 1
    assert computed_sizes(4, 16, 2) <= 4


def test_a_layer_of_mixtral_in_full() -> None:
    counts = layer_programs(load_model("mixtral-8x7b"), 2, 1, 100, choose)
    assert [(str(made).split("@")[0], count) for made, count in counts] == [
        ("norm(rows=2,cols=4096)", 2),
        ("linear(rows=2,n=6144,k=4096)", 1),
        ("rope(rows=2,heads=40,head_dim=128)", 1),
        ("cache_write(batch=2,tokens=1,kv_heads=8,head_dim=128)", 1),
        ("attention(batch=2,queries=1,keys=100,heads=32,kv_heads=8,head_dim=128)", 1),
        ("linear(rows=2,n=4096,k=4096)", 1),
        ("add(rows=2,cols=4096)", 2),
        ("router(rows=2,experts=8,active=2,hidden=4096)", 1),
        ("experts(rows=2,experts=8,active=2,ffn=14336,hidden=4096)", 1),
    ]


def test_a_shared_expert_runs_beside_the_others() -> None:
    counts = layer_programs(load_model("qwen1.5-moe-a2.7b"), 2, 1, 100, choose)
    texts = [(str(made).split("@")[0], count) for made, count in counts]
    assert ("add(rows=2,cols=2048)", 3) in texts
    assert texts[-4:] == [
        ("linear(rows=2,n=11264,k=2048)", 1),
        ("activation(rows=2,cols=5632)", 1),
        ("linear(rows=2,n=2048,k=5632)", 1),
        ("shared_gate(rows=2,cols=2048)", 1),
    ]
    for made, _ in counts:
        assert made.variant in kernels_for(made.op, "cpu")
        if made.op not in ("linear", *EXPERT_OPERATORS):
            function(made.op, made.variant)


def test_norms_over_all_heads_are_one_row_each() -> None:
    counts = dict(layer_programs(load_model("olmoe-1b-7b"), 2, 3, 3, choose))
    norms = {made.sizes: count for made, count in counts.items() if made.op == "norm"}
    assert norms == {(6, 2048): 4}  # two of the stream, queries, keys


def test_a_model_of_both_classes_needs_to_be_told_which() -> None:
    model = load_model("deepseek-moe-16b")
    with pytest.raises(SpecError, match=r"layer class: .* the model has both"):
        layer_programs(model, 1, 1, 1, choose)
    with pytest.raises(SpecError, match="layer class"):
        layer_bytes(model, "bf16")


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-moe-16b", "glm-4.5-air"]
)
def test_memory_holds_every_expert(name: str) -> None:
    model = load_model(name)
    items = stage_bytes(model, 0, model.layers, ["bf16"] * model.layers, batch=1, positions=8)
    corrections = 4 * 45 * 128 if name == "glm-4.5-air" else 0
    held = items["weights"] + items["embedding"] + items["head"]
    assert held == 2 * model.parameters + corrections
    quarter = stage_bytes(model, 0, model.layers, ["int4"] * model.layers, batch=1, positions=8)
    assert 0.28 < quarter["weights"] / items["weights"] < 0.285  # 4.5 of 16 bits
