"""Attention over latents: sizes, what a configuration says, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from foreplan.cost_models.tensor_parallel import degrees
from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.latent_programs import attention_call
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_names import layer_sources, linear_modules
from foreplan.errors import SpecError

V3 = {
    "model_type": "deepseek_v3", "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 6, "intermediate_size": 80, "vocab_size": 97,
    "max_position_embeddings": 64, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
V2 = V3 | {"model_type": "deepseek_v2", "topk_method": "greedy"}


def read(folder: Path, **fields: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(fields))
    return load_model(folder)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # "15.7B total parameters with 2.4B active": model card of DeepSeek-V2-Lite; without the
        # embedding.
        ("deepseek-v2-lite", 15.7, 2.4),
        # "236B total parameters, of which 21B are activated": arXiv:2405.04434, abstract.
        ("deepseek-v2", 236, 21),
        # "671B total parameters with 37B activated": arXiv:2412.19437, abstract.
        ("deepseek-v3", 671, 37),
        # 1.04T in total, 32.6B activated: arXiv:2507.20534, table 2.
        ("kimi-k2", 1040, 32.6),
        # "15.29B in total, 2.24B activated", without embedding and head: arXiv:2502.16982, table 4.
        ("moonlight-16b-a3b", 15.29, 2.24),
        # "355B-A32B" and "106B-A12B": github.com/zai-org/GLM-4.5.
        ("glm-4.5", 355, 32),
        ("glm-4.5-air", 106, 12),
    ],
)
def test_totals_are_near_those_published(name: str, total: float, active: float) -> None:
    """Sources differ in what they count: embedding and head once, twice or not at all."""
    model = load_model(name)
    table = model.vocab * model.hidden
    for count, published in ((model.parameters, total), (model.active_parameters, active)):
        tries = [(count - tables * table) / 1e9 for tables in range(3)]
        assert min(abs(found / published - 1) for found in tries) < 0.025


def test_the_cache_keeps_one_latent_for_all_heads() -> None:
    """DeepSeek-V2, table 1: 576 numbers a token and layer, as 2.25 groups of keys and values."""
    model = load_model("deepseek-v3")
    assert model.cache_shape == (1, 1, 576)
    assert model.kv_bytes_per_token("bf16") == 1152
    assert load_model("llama-3.1-8b").cache_shape == (2, 8, 128)


def test_which_operator_attends() -> None:
    model = load_model("deepseek-v2-lite")
    heads = {"batch": 2, "keys": 9, "heads": 16}
    whole = heads | {"queries": 9, "kv_heads": 16, "head_dim": 192}
    assert attention_call(model, 2, 9, 9) == ("attention", whole)
    one = heads | {"latent": 512, "turned": 64}
    assert attention_call(model, 2, 1, 9) == ("latent_attention", one)


def test_names_of_a_checkpoint(tmp_path: Path) -> None:
    model = read(tmp_path, **V3)
    sources = layer_sources(model, 0)
    assert sources["latents.weight"].names == (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
    )
    assert sources["latents.weight"].rows == (16, 10)
    assert sources["latents.weight"].change.order[12:] == (12, 14, 13, 15)
    assert "self_attn.q_b_proj" in linear_modules(model)
    whole = read(tmp_path, **V3 | {"q_lora_rank": None})
    assert layer_sources(whole, 0)["queries.weight"].names[0].endswith("self_attn.q_proj.weight")
    assert "query_norm.weight" not in layer_sources(whole, 0)
    assert "self_attn.q_b_proj" not in linear_modules(whole)


def test_kimi_k2_is_another_name(tmp_path: Path) -> None:
    kimi = V3 | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert read(tmp_path, **kimi) == read(tmp_path, **V3)


def test_yarns_magnitude_is_in_the_scores(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "mscale": 1.0,
            "mscale_all_dim": 1.0}  # fmt: skip
    model = read(tmp_path, **V3 | {"rope_scaling": yarn})
    expected = (1 + 0.1 * math.log(40)) ** 2 / 10**0.5
    assert model.scalars.attention == pytest.approx(expected)
    assert model.rope_scaling is not None
    assert model.rope_scaling.attention_factor == 1
    assert layer_sources(model, 0)["queries.weight"].change.factor == pytest.approx(
        expected * 10**0.5
    )
    plain = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 32}
    assert read(tmp_path, **V3 | {"rope_scaling": plain}).scalars.attention is None
    # The published ones, of which the zoo's entries state the result.
    for name, magnitude in (("deepseek-v2-lite", 0.707), ("deepseek-v3", 1.0), ("kimi-k2", 1.0)):
        zoo = load_model(name)
        assert zoo.rope_scaling is not None
        stretched = 1 + 0.1 * magnitude * math.log(zoo.rope_scaling.factor)
        assert zoo.scalars.attention == pytest.approx(stretched**2 / 192**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (V3 | {"qk_rope_head_dim": 5}, "head_dim = 5 is odd and rope turns pairs"),
        (V3 | {"kv_lora_rank": 0}, "kv_lora_rank: got 0, expected a whole number"),
        (V3 | {"v_head_dim": 11}, "value: got 11, expected at most the 10 features of a key"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func: got 'softmax', expected sigmoid"),
        (V3 | {"topk_method": "greedy"}, "topk_method: got 'greedy', expected noaux_tc"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq: got 2, expected 1"),
        (V3 | {"rope_interleave": "yes"}, "rope_interleave: got 'yes', expected true or false"),
        (V3 | {"quantization_config": {"quant_method": "fp8"}}, "unquantised weights"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method: .* greedy, group_limited_greedy"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob: got True"),
        (V2 | {"mlp_bias": True}, "mlp_bias: got True"),
        (V2 | {"num_experts_per_tok": None}, "num_experts_per_tok: got nothing"),
    ],
)
def test_what_is_not_modelled_is_one_line(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message) as error:
        read(tmp_path, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("greedy", [True, False])
def test_groups_of_the_second_deepseek(greedy: bool, tmp_path: Path) -> None:
    method = "greedy" if greedy else "group_limited_greedy"
    experts = read(tmp_path, **V2 | {"topk_method": method}).experts
    assert experts is not None
    assert (experts.routing.groups, experts.routing.grouped) == (
        (1, False) if greedy else (4, True)
    )
    assert not experts.normalise


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, {"norms": "both"}, {"head_dim": 32}, {"sliding_window": 64}],
)
def test_what_does_not_go_with_latents(changes: dict[str, object]) -> None:
    facts = load_model("moonlight-16b-a3b").model_dump()
    with pytest.raises(ValidationError, match="latent"):
        Model.model_validate(facts | changes)


def test_values_are_no_wider_than_keys() -> None:
    assert LatentAttention(rank=4, plain=2, turned=2, value=4).width == 4
    with pytest.raises(ValidationError, match="at most the 4 features"):
        LatentAttention(rank=4, plain=2, turned=2, value=5)


def test_a_latent_is_not_split_over_devices() -> None:
    assert degrees(load_model("deepseek-v2-lite"), 4) == (1,)
