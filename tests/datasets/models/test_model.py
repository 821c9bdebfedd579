"""Models: exact parameter counts, reading folders, and errors that name file and field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foreplan.datasets.models.attention_window import refuse_windows, window_of
from foreplan.datasets.models.checkpoint import read_checkpoint
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.model_limits import refuse_longer
from foreplan.datasets.models.model_zoo import published_parameters, zoo_names
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama-biased-tied": SMALL
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10},
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 12, "tie_word_embeddings": True},
    "mistral": SMALL | {"sliding_window": None},
    "mixtral": SMALL | {"num_local_experts": 5},
    "qwen2_moe": SMALL
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": SMALL
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "head_dim": 12,
    },
    "olmoe": SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "eos_token_id": 1},
    "glm4_moe": SMALL
    | {
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "deepseek_v2": SMALL | LATENT | {"q_lora_rank": None, "num_experts_per_tok": 3},
    "deepseek_v2-ranked": SMALL | LATENT | {"attention_bias": True, "num_experts_per_tok": 3},
    "deepseek_v3": SMALL | LATENT | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "gpt_oss": SMALL | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12},
    "gpt_oss-unbiased": SMALL
    | {"num_local_experts": 3, "num_experts_per_tok": 1, "attention_bias": False},
    "gemma2": SMALL | {"head_dim": 12},
    "phi3": SMALL | {"pad_token_id": 0},
    "starcoder2": SMALL,
    "starcoder2-unbiased": SMALL | {"use_bias": False, "tie_word_embeddings": False},
    "seed_oss": SMALL | {"head_dim": 12},
    "seed_oss-biased": SMALL | {"head_dim": None, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": SMALL | {"pad_token_id": 0},
    "ernie4_5": SMALL | {"use_bias": True},
    "glm": SMALL | {"head_dim": 8, "pad_token_id": 0},
    "granite": SMALL | {"mlp_bias": True},
    "gemma": SMALL | {"head_dim": 12},
    "olmo2": SMALL,
    "glm4": SMALL | {"head_dim": 8, "pad_token_id": 0, "attention_bias": False},
    "gemma3_text": SMALL | {"head_dim": 12},
    "gpt_neox": SMALL,
    "gpt_neox-unbiased": SMALL | {"attention_bias": False, "tie_word_embeddings": True},
    "phi3-partial": SMALL | {"pad_token_id": 0, "partial_rotary_factor": 0.5},
    "opt": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 100,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    },
    "opt-unbiased": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 100,
        "vocab_size": 97,
        "enable_bias": False,
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64},
    "gpt2-inner": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 72, "vocab_size": 97},
}


def build(case: str) -> Any:
    """The module that transformers builds, on the meta device."""
    family = case.split("-")[0]
    config = transformers.AutoConfig.for_model(family, **CONFIGS[case])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def write_config(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def llama_config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SMALL, **changes}


@pytest.mark.parametrize("case", CONFIGS)
def test_parameters_equal_transformers(case: str, tmp_path: Path) -> None:
    module = build(case)
    module.config.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    layers = getattr(module.base_model, "layers", None) or getattr(module.base_model, "h", None)
    if layers is None:
        layers = module.base_model.decoder.layers
    assert model.layers == len(layers)
    for layer_class, layer in zip(model.layer_classes, layers, strict=True):
        assert model.parameters_of(layer_class) == sum(p.numel() for p in layer.parameters())
    assert model.parameters == sum(p.numel() for p in module.parameters())
    head = module.get_output_embeddings().weight.numel()
    assert model.head_parameters == head + model.norm_parameters
    assert model.weights == "random"


@pytest.mark.parametrize("name", zoo_names())
def test_zoo_counts_what_its_source_publishes(name: str) -> None:
    model = load_model(name)
    assert model.parameters == published_parameters(name)
    assert model.weights == "random"
    assert model.path is None


def test_reading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_config(tmp_path, **llama_config())
    code = (
        "import sys; from foreplan.datasets.models.load_model import load_model; "
        f"load_model({str(tmp_path)!r}); load_model('gpt2'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "case", ["llama", "gpt2", "opt", "qwen3", "mixtral", "qwen2_moe", "phi3", "gpt_oss", "gemma2"]
)
@pytest.mark.parametrize("shards", [False, True])
def test_checkpoint_bytes_are_exact(case: str, shards: bool, tmp_path: Path) -> None:
    family = case.split("-")[0]
    config = transformers.AutoConfig.for_model(family, **CONFIGS[case])
    module = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    module.save_pretrained(tmp_path, max_shard_size="30KB" if shards else "1GB")
    model = load_model(tmp_path)
    assert model.weights == "trained"
    assert model.dtype == "bf16"
    assert model.checkpoint_bytes == 2 * model.parameters
    assert model.path == str(tmp_path)
    if shards:
        victim = sorted(tmp_path.glob("*.safetensors"))[1]
        victim.unlink()
        with pytest.raises(SpecError, match=r"shards missing: model-00002-of"):
            load_model(tmp_path)


def test_base_model_without_prefix(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("gpt2", **CONFIGS["gpt2"])
    transformers.GPT2Model(config).save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    document["architectures"] = ["GPT2LMHeadModel"]  # as the published GPT-2 has it
    (tmp_path / "config.json").write_text(json.dumps(document))
    model = load_model(tmp_path)
    assert model.checkpoint_bytes == 4 * model.parameters


def test_a_cut_off_or_foreign_file_is_one_line(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SMALL)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(SpecError, match="cut off"):
        read_checkpoint(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SpecError, match="complete safetensors"):
        read_checkpoint(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(SpecError, match="complete safetensors"):
        read_checkpoint(tmp_path)
    file.write_bytes(content)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"intermediate_size": 81}))
    with pytest.raises(SpecError, match=r"gate_proj.weight.shape: got \[80, 48\]"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "bloom"}, r"model_type: got 'bloom', expected a supported .*gpt2, .*llama"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"num_attention_heads": 5}, "num_attention_heads: got 5, expected a divisor"),
        ({"num_key_value_heads": 4}, "kv_heads: got 4, expected a divisor of heads = 6"),
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"hidden_size": "48"}, "hidden_size: got '48'"),
        ({"num_hidden_layers": 10**9}, "layers: got 1000000000, expected less than or equal"),
        ({"hidden_size": 6 * 2**40}, "hidden: got .*, expected less than or equal"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"hidden_act": "xielu"}, "hidden_act: got 'xielu', expected one of silu"),
        (
            {"hidden_act": "relu"},
            "activation: got 'relu', expected silu, gelu_tanh or clamped",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "default, linear, yarn or llama3"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "yarn counts turns by a rope_theta above 1",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": -2.0}}, "rope_scaling: factor: got -2.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one mapping for all"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected a partial_rot"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: got {.* of 1"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"rms_norm_eps": -1.0}, "norm_eps: got -1.0"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: got 'yes'"),
    ],
)
def test_unsupported_configs_name_the_field(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    write_config(tmp_path, **llama_config(**changes))
    with pytest.raises(SpecError, match=match) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_byte_order_mark_is_refused_before_transformers_does(tmp_path: Path) -> None:
    write_config(tmp_path, **llama_config())
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    with pytest.raises(SpecError, match=r"config\.json: got 'a byte order mark', expected UTF-8"):
        load_model(tmp_path)


def test_opt_350m_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="opt", do_layer_norm_before=False, **CONFIGS["opt"])
    with pytest.raises(SpecError, match="do_layer_norm_before: got False"):
        load_model(tmp_path)


SLIDES: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16, 16, 16]),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 3),
        ({"model_type": "starcoder2", "sliding_window": 16}, [16, 16, 16]),
        ({"model_type": "smollm3", "sliding_window": 16}, [None] * 3),
        ({"model_type": "smollm3"} | SLIDES | {"sliding_window": None}, [None] * 3),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]} | SLIDES, [None, 16, None]),
        ({"model_type": "qwen2", "sliding_window": 16}, [None] * 3),
        ({"model_type": "qwen2"} | SLIDES, [None] * 3),
        ({"model_type": "qwen2", "max_window_layers": 1} | SLIDES, [None, 16, 16]),
        ({"model_type": "qwen3", "max_window_layers": 0} | SLIDES, [16, 16, 16]),
        (
            {"model_type": "qwen2", "max_window_layers": 1} | SLIDES | {"sliding_window": None},
            [None] * 3,
        ),
        ({"model_type": "qwen2_moe"} | SLIDES | MIXTURE, [16, None, 16]),
        ({"model_type": "qwen2_moe", "max_window_layers": 1} | SLIDES | MIXTURE, [16, None, None]),
        ({"model_type": "qwen3_moe"} | SLIDES | MIXTURE, [16, 16, 16]),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
            | SLIDES,
            [None, None, 16],
        ),
    ],
)
def test_sliding_window(fields: dict[str, Any], windows: list[int | None], tmp_path: Path) -> None:
    model = load_model(write_config(tmp_path, **SMALL, **fields))
    assert [window_of(model, layer) for layer in range(3)] == windows
    module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path, pad_token_id=0)
    )
    theirs = [getattr(layer.self_attn, "sliding_window", None) for layer in module.model.layers]
    if fields["model_type"] not in ("mistral", "starcoder2"):  # which ask the config anew
        assert [window or None for window in theirs] == windows
    assert model.max_sequence == 64
    with pytest.raises(SpecError, match=r"can attend to$"):
        refuse_longer(model, 65, "tokens", 1)


def test_windows_are_of_layers_that_are_there() -> None:
    model = load_model("gemma-3-1b")
    assert [window_of(model, layer) for layer in (4, 5)] == [512, None]
    for update, words in (
        ({"window_layers": (26,)}, "different layers"),
        ({"window_layers": (1, 0)}, "different layers"),
        ({"sliding_window": None}, "there is no sliding_window"),
    ):
        with pytest.raises(ValueError, match=words):
            type(model).model_validate(model.model_dump() | update)


def test_what_knows_no_windows_refuses_to_cross_one() -> None:
    model = load_model("mistral-7b-v0.1")
    refuse_windows(model, 4096, "tokens", "not known")
    with pytest.raises(SpecError, match="tokens: got 4097, expected at most the sliding window of"):
        refuse_windows(model, 4097, "tokens", "not known")


LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}
PHI3: dict[str, Any] = {"model_type": "phi3", **SMALL}


def test_longrope_stops_where_its_frequencies_change(tmp_path: Path) -> None:
    partial = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}
    fields = PHI3 | partial | {"rope_scaling": LONGROPE}
    model = load_model(write_config(tmp_path, **fields))
    assert (model.rotary.width, model.max_sequence) == (4, 32)
    assert model.rope_scaling is not None
    # sqrt(1 + log(64 / 32) / log(32)), as transformers has it for every length
    assert model.rope_scaling.attention_factor == pytest.approx(1.2**0.5)
    with pytest.raises(SpecError, match="before it rotates by other frequencies"):
        refuse_longer(model, 33, "tokens", 33)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_scaling": LONGROPE}, "4 short_factors, one for each pair"),
        ({"rope_scaling": {"type": "longrope"}}, "a short_factor for each pair"),
        ({"rope_scaling": {"type": "llama3"}}, "linear or longrope|too, for rope_type llama3"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "default, linear, yarn or longrope"),
        ({"partial_rotary_factor": 0.4}, "an even number of 8 features"),
        ({"partial_rotary_factor": 1.5}, "an even number of 8 features"),
        ({"partial_rotary_factor": "half"}, "an even number of 8 features"),
    ],
)
def test_rotations_that_are_not_modelled(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=match):
        load_model(write_config(tmp_path, **PHI3, **changes))


@pytest.mark.parametrize(
    ("changes", "unrotated"),
    [
        ({"num_hidden_layers": 9}, (3, 7)),
        ({"no_rope_layer_interval": 2}, (1,)),
        ({"no_rope_layers": [0, 1, 0]}, (0, 2)),
        ({"no_rope_layers": [1, 1, 1]}, ()),
    ],
)
def test_layers_without_rotation(
    changes: dict[str, Any], unrotated: tuple[int, ...], tmp_path: Path
) -> None:
    fields = SMALL | {"model_type": "smollm3"} | changes
    assert load_model(write_config(tmp_path, **fields)).rotary.unrotated_layers == unrotated
    with pytest.raises(SpecError, match=r"no_rope_layers: got .* for each of 3 layers"):
        load_model(write_config(tmp_path, **SMALL, model_type="smollm3", no_rope_layers=[1]))


def test_factors_are_read_and_have_to_be_positive(tmp_path: Path) -> None:
    fields = SMALL | {"model_type": "granite", "logits_scaling": 8, "residual_multiplier": 0.25}
    scalars = load_model(write_config(tmp_path, **fields)).scalars
    assert (scalars.logits, scalars.residual, scalars.attention) == (0.125, 0.25, 1.0)
    for wrong in (0, -1.0, "one", True, None):
        with pytest.raises(SpecError, match="logits_scaling: got"):
            load_model(write_config(tmp_path, **fields | {"logits_scaling": wrong}))


def test_the_first_gemma_files_name_another_activation(tmp_path: Path) -> None:
    fields = SMALL | {"model_type": "gemma", "head_dim": 8}
    for named in ("gelu", "gelu_pytorch_tanh"):
        model = load_model(write_config(tmp_path, **fields, hidden_act=named))
        assert (model.activation, model.gated) == ("gelu_tanh", True)
    with pytest.raises(SpecError, match="use_bidirectional_attention: got True"):
        load_model(write_config(tmp_path, **fields, use_bidirectional_attention=True))
    load_model(write_config(tmp_path, **fields, use_bidirectional_attention=None))


def test_gemma_3_has_two_bases(tmp_path: Path) -> None:
    fields: dict[str, Any] = SMALL | {"model_type": "gemma3_text", "head_dim": 8}
    old = load_model(
        write_config(
            tmp_path / "m", **fields, rope_theta=2e6, rope_local_base_freq=3e4,
            sliding_window_pattern=2, sliding_window=16,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    )  # fmt: skip
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
    local = {"rope_type": "default", "rope_theta": 3e4}
    parameters = {"full_attention": full, "sliding_attention": local}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    fields |= {"sliding_window": 16, "rope_parameters": parameters, "layer_types": types}
    assert load_model(write_config(tmp_path / "m", **fields)) == old
    assert (old.rotary.local_layers, old.rotary.local_theta, old.rope_theta) == ((0, 2), 3e4, 2e6)
    assert (old.sliding_window, old.window_layers) == (16, (0, 2))
    assert old.rotations_of(0, 3) == ("local", "global")
    for wrong, match in (
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping: got 30\.0"),
        ({"layer_types": types[:2]}, "layer_types: got"),
        ({"rope_parameters": {"sliding_attention": full}}, "a rope_type of default in layers"),
        ({"rope_parameters": [1]}, "a mapping for each kind"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0"),
    ):
        with pytest.raises(SpecError, match=match):
            load_model(write_config(tmp_path / "m", **fields | wrong))


def test_gpt_oss_is_read_with_its_defaults(tmp_path: Path) -> None:
    fields: dict[str, Any] = SMALL | {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    model = load_model(write_config(tmp_path, **fields))
    published = load_model("gpt-oss-20b")
    alike = ("rope_theta", "rope_scaling", "sliding_window", "sinks", "activation", "head_dim")
    assert all(getattr(model, name) == getattr(published, name) for name in alike)
    assert model.window_layers == (0, 2)
    assert (model.qkv_bias, model.out_bias, model.mlp_bias) == (True, True, True)
    assert model.experts is not None
    assert model.experts.routing.biased
    assert model.experts.normalise
    everywhere = load_model(write_config(tmp_path, **fields, sliding_window=None))
    assert (everywhere.sliding_window, everywhere.window_layers) == (None, ())
    for wrong, match in (
        ({"swiglu_limit": 6.0}, r"swiglu_limit: got 6\.0"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha: got 1\.0"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: got"),
    ):
        with pytest.raises(SpecError, match=match):
            load_model(write_config(tmp_path, **fields | wrong))


def test_gemma_2_is_read_with_its_caps(tmp_path: Path) -> None:
    fields: dict[str, Any] = SMALL | {"model_type": "gemma2", "head_dim": 8}
    model = load_model(write_config(tmp_path, **fields))
    published = load_model("gemma-2-2b")
    alike = ("score_cap", "logit_cap", "sliding_window", "activation", "norms", "norm_eps", "tied")
    assert all(getattr(model, name) == getattr(published, name) for name in alike)
    assert model.scalars.attention == published.scalars.attention
    assert model.window_layers == (0, 2)
    other = {"attn_logit_softcapping": None, "final_logit_softcapping": 7, "sliding_window": 3}
    changed = load_model(write_config(tmp_path, **fields | other))
    assert (changed.score_cap, changed.logit_cap, changed.sliding_window) == (None, 7.0, 3)
    for wrong, match in (
        ({"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping: got -1\.0"),
        ({"final_logit_softcapping": "no"}, "final_logit_softcapping: got 'no'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
    ):
        with pytest.raises(SpecError, match=match):
            load_model(write_config(tmp_path, **fields | wrong))


def test_a_wrong_activation_is_one_mistake() -> None:
    fields = load_model("gpt-oss-20b").model_dump(mode="json", exclude_none=True)
    with pytest.raises(SpecError) as caught:
        validate(Model, fields | {"activation": "swish"}, "m")
    assert "m: activation: got 'swish'" in str(caught.value)
    assert "more error" not in str(caught.value)
    with pytest.raises(SpecError, match="only experts with a gate and silu or clamped_silu are"):
        validate(Model, fields | {"activation": "gelu_tanh"}, "m")


def test_old_and_new_rope_fields_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = llama_config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = llama_config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    first = load_model(write_config(tmp_path / "m", **old))
    second = load_model(write_config(tmp_path / "m", **new))
    assert first == second
    assert first.rope_scaling is not None
    assert first.rope_scaling.original_max_positions == 32
    assert first.rope_theta == 5e5


def test_what_is_neither_folder_nor_zoo_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="name of the zoo"):
        load_model("no-such-model")
    with pytest.raises(SpecError, match="did you mean 'llama-2-7b'"):
        load_model("llama2-7b")
    with pytest.raises(SpecError, match=r"without config\.json"):
        load_model(tmp_path)


def test_a_model_survives_json() -> None:
    model = load_model("llama-3.2-1b")
    assert Model.model_validate_json(model.model_dump_json()) == model
