"""`foreplan predict` prices a pass of any network that transformers builds from a folder."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cost_models.test_zoo_laws import WITHIN

from foreplan.cost_models.lowering.graph_programs import lower, model_steps
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.cost_models.lowering.step_store import stored_steps
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.ranking import Ranking, rank_devices
from foreplan.cost_models.replay import predict_latency
from foreplan.datasets.graphs import transformers_network
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.transformers_network import (
    TransformersNetwork,
    network_module,
    network_or_model,
)
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPLAN_CACHE", str(tmp_path / "cache"))


TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
BERT = TEXT | {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "intermediate_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128,
    "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 100,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "vocab_size": 100, "num_mel_bins": 16, "max_source_positions": 50,
    "max_target_positions": 64, "pad_token_id": 0,
}  # fmt: skip
SPEECH = {
    "model_type": "speech_to_text", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "vocab_size": 100, "input_feat_per_channel": 16,
    "max_source_positions": 60, "max_target_positions": 64, "conv_channels": 32,
}  # fmt: skip
VIDEO = VIT | {
    "model_type": "timesformer", "architectures": ["TimesformerModel"], "num_frames": 4,
}  # fmt: skip
GEMMA = TEXT | {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "sliding_window": 16, "torch_dtype": "bfloat16",
    "max_position_embeddings": 64,
    "use_bidirectional_attention": True,  # which plans do not model
}  # fmt: skip
DEEPSEEK = TEXT | {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
    "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": None,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "torch_dtype": "bfloat16", "max_position_embeddings": 64,
    "norm_topk_prob": True,  # which plans do not model
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 32,
    "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8,
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 32,
    "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8, "num_heads": 4, "head_dim": 16,
    "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
SEEN = {"vit": "1 image", "timesformer": "1 video of 4 frames"}
SCANS = {"mamba": MAMBA, "mamba2": MAMBA2}
ALL = {**SCANS, "bert": BERT, "t5": T5, "vit": VIT, "whisper": WHISPER, "gemma2": GEMMA,
       "deepseek_v2": DEEPSEEK, "speech_to_text": SPEECH, "timesformer": VIDEO}  # fmt: skip


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.load()


def _folder(tmp_path: Path, fields: dict[str, Any]) -> Path:
    folder = tmp_path / str(fields["model_type"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _latencies(ranked: Ranking) -> dict[str, float]:
    return {replay.device: replay.latency_s for replay in ranked.replays}


def _network(tmp_path: Path, fields: dict[str, Any]) -> TransformersNetwork:
    found = network_or_model(_folder(tmp_path, fields))
    assert isinstance(found, TransformersNetwork)
    return found


@pytest.mark.parametrize("family", ALL)
def test_parameters_and_passes_are_those_of_the_module(tmp_path: Path, family: str) -> None:
    network = _network(tmp_path, ALL[family])
    config = transformers.AutoConfig.from_pretrained(network.path)
    build = (
        getattr(transformers, config.architectures[0])
        if config.architectures
        else transformers.AutoModel.from_config
    )
    real: Any = build(config)
    assert network.parameters == sum(p.numel() for p in real.parameters())
    module, inputs = network_module(network, batch=2, tokens=24)
    graph = capture(module, inputs, eager=True)
    given = {k: torch.zeros_like(v, device="cpu") for k, v in inputs.items()
             if isinstance(v, torch.Tensor)}  # fmt: skip
    with torch.no_grad():  # transformers itself takes these inputs
        real.eval()(**{k: v.float() if v.is_floating_point() else v for k, v in given.items()})
    assert graph.flops > 0
    assert not list(graph.operators("unknown"))


@pytest.mark.parametrize("family", ALL)
def test_more_work_is_never_faster_and_a_step_takes_longer(
    tmp_path: Path, family: str, predictor: Predictor
) -> None:
    network = _network(tmp_path, ALL[family])
    found = [
        rank_devices(network, "h200,t4,xeon_8480+", batch=batch, phase=phase, predictor=predictor,
                     sequence_length=None if family in SEEN else 32)
        for batch, phase in ((1, "inference"), (64, "inference"), (64, "training"))
    ]  # fmt: skip
    for less, more in pairwise(found):
        before = {replay.device: replay.latency_s for replay in less.replays}
        slack = 1 - WITHIN  # networks this small are bound by the host
        assert all(replay.latency_s > slack * before[replay.device] for replay in more.replays)
    assert found[0].document()["images"] == (family in SEEN)
    assert found[0].document()["scans"] == (family in SCANS)
    beside = {
        "t5": " on both sides", "whisper": " and 100 frames", "speech_to_text": " and 60 frames"
    }.get(family, "")  # fmt: skip
    what = SEEN.get(family, f"1 x 32 tokens{beside}")
    assert repr(found[0]).startswith(f"<Ranking: {family}, {what}, inference: ")
    assert found[0].plot().get_title("left") == f"{family}, {what}, inference"
    assert all(r.low_s <= r.latency_s <= r.high_s for rank in found for r in rank.replays)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"hidden_act": "relu6"},
        {"architectures": ["LlamaForSequenceClassification"]},
    ],
)
def test_what_plans_do_not_model_is_captured(tmp_path: Path, changes: dict[str, Any]) -> None:
    llama = TEXT | {"model_type": "llama", "max_position_embeddings": 64, "intermediate_size": 128}
    assert isinstance(network_or_model(_folder(tmp_path, llama)), Model)
    network = _network(tmp_path, llama | changes)
    assert network.family == "llama"
    # What cannot be built is refused as plans refuse it, and what is wrong is never captured.
    for wrong in ({"hidden_act": "fast"}, {"hidden_size": 0}):
        with pytest.raises(SpecError, match=f"config.json: {next(iter(wrong))}: got"):
            network_or_model(_folder(tmp_path, llama | wrong))


def test_a_described_family_stays_described_and_a_folder_is_enough(
    tmp_path: Path, predictor: Predictor
) -> None:
    opt = TEXT | {"model_type": "opt", "ffn_dim": 128, "max_position_embeddings": 64,
                  "word_embed_proj_dim": 64}  # fmt: skip
    assert isinstance(network_or_model(_folder(tmp_path, opt)), Model)
    assert isinstance(network_or_model("gpt2"), Model)
    folder = str(_folder(tmp_path, BERT))
    one = predict_latency(Path(folder), "l4", sequence_length=32, predictor=predictor)
    ranked = rank_devices(folder, "l4", sequence_length=32, predictor=predictor)
    assert one.latency_s == pytest.approx(ranked.fastest.latency_s)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": 7}, "7/config.json: model_type: got 7, expected an architecture of"),
        ({"model_type": "no_such"}, "no_such/config.json: got .*a network that transformers"),
        ({"model_type": "llava", "text_config": {}}, "of its own; .*plan bubbles' takes it whole"),
        ({"model_type": "clip"}, "text_config or vision_config into a folder of its own$"),
        (BERT | {"num_hidden_layers": 10**9}, "num_hidden_layers: .* a whole number from 1 to"),
        (BERT | {"num_hidden_layers": "2"}, "num_hidden_layers"),
        (BERT | {"hidden_size": -64}, "bert/config.json"),
        (BERT | {"hidden_size": "many"}, "bert/config.json"),
        (BERT | {"quantization_config": {"bits": 4}}, "unquantised"),
        ({"model_type": "switch_transformers", "num_experts": 4}, "as grouped products; price a"),
        ({"model_type": "nllb-moe"}, "as grouped products"),
    ],
)
def test_what_is_not_priced_is_refused_in_one_line(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        network_or_model(_folder(tmp_path, fields))
    assert "\n" not in str(caught.value)


def test_a_folders_network_is_built_once_for_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = network_or_model(_folder(tmp_path, BERT))
    vit = network_or_model(_folder(tmp_path, VIT))

    def refuse(*_: object) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patched:
        patched.setattr(transformers_network, "_build", refuse)
        assert network_or_model(_folder(tmp_path, BERT)) == first
        assert network_or_model(_folder(tmp_path, VIT)) == vit
        (tmp_path / "other").mkdir()
        other = network_or_model(_folder(tmp_path / "other", BERT))
        assert other == first.model_copy(update={"path": str(tmp_path / "other/bert")})
        with pytest.raises(AssertionError):
            network_or_model(_folder(tmp_path, BERT | {"num_hidden_layers": 1}))
    for kept in (tmp_path / "cache").glob("*.json"):
        kept.write_text('{"family": "bert", "parameters": "many"}')
    assert network_or_model(_folder(tmp_path, BERT)) == first


def test_a_refusal_of_transformers_is_told_where_it_begins_with_an_empty_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("\nTimmBackbone requires the timm library\nInstall it")

    monkeypatch.setattr(transformers.BertForMaskedLM, "_from_config", refuse)
    with pytest.raises(SpecError, match="ImportError: TimmBackbone requires the timm library'"):
        network_or_model(_folder(tmp_path, BERT))


def test_a_dtype_is_asked_for(tmp_path: Path, predictor: Predictor) -> None:
    """Half the bytes are half the weights, and 16 bits are not slower where both have peaks."""
    for name in ("gpt2", str(_folder(tmp_path, BERT))):
        ranked = {
            dtype: rank_devices(network_or_model(name, dtype), "h200,l4", sequence_length=64,
                                predictor=predictor)
            for dtype in ("fp32", "fp16", "bf16")
        }  # fmt: skip
        assert [r.document()["dtype"] for r in ranked.values()] == ["fp32", "fp16", "bf16"]
        wide, half = (ranked[dtype].document()["weight_bytes"] for dtype in ("fp32", "bf16"))
        assert wide == 2 * half
    for dtype in ("fp16", "bf16"):
        assert _latencies(ranked[dtype]).keys() == _latencies(ranked["fp32"]).keys()
    with pytest.raises(SpecError, match="one of fp32, fp16, bf16; 'foreplan plan serving'"):
        network_or_model("gpt2", "int8")


def test_sixteen_bits_are_faster_where_arithmetic_decides(predictor: Predictor) -> None:
    wide, half = (
        _latencies(rank_devices(network_or_model("gpt2", dtype), "h200,l4,a100-80g", batch=8,
                                sequence_length=512, predictor=predictor))
        for dtype in ("fp32", "bf16")
    )  # fmt: skip
    assert all(half[device] < wide[device] for device in wide)


RESNET = {
    "model_type": "resnet", "architectures": ["ResNetForImageClassification"],
    "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "sides"), [(32, (32, 32)), ([32, 48], (32, 48)), (None, None), ("32", None), (0, None)]
)
def test_images_have_the_size_that_the_folder_states(
    tmp_path: Path, size: object, sides: tuple[int, int] | None
) -> None:
    """A ResNet takes any, so that transformers states none."""
    network = _network(tmp_path, RESNET | ({} if size is None else {"image_size": size}))
    if sides is None:
        with pytest.raises(SpecError, match=r'image_size: got .*add "image_size": 224'):
            network_module(network, batch=3, tokens=8)
        return
    _, inputs = network_module(network, batch=3, tokens=8)
    assert inputs["pixel_values"].shape == (3, 3, *sides)


def test_images_have_the_size_that_is_asked_for(tmp_path: Path) -> None:
    """What has a parameter for each patch is made for them."""
    for fields in (VIT, RESNET):
        network = network_or_model(str(_folder(tmp_path, fields)), image_size=(48, 64))
        module, inputs = network_module(network, batch=2, tokens=1)
        assert inputs["pixel_values"].shape == (2, 3, 48, 64)
        assert capture(module, inputs, eager=True).flops > 0
    with pytest.raises(SpecError, match="image size: got '48 x 64', expected none: bert takes no"):
        network_or_model(str(_folder(tmp_path, BERT)), image_size=(48, 64))
    with pytest.raises(SpecError, match="expected none: vit takes images"):
        rank_devices(_network(tmp_path, VIT), "t4", costs="roofline", sequence_length=8)


def test_relative_positions_bound_nothing(tmp_path: Path) -> None:
    """XLNet says that it has -1 positions, and makes parameters where no device is asked."""
    fields = {"model_type": "xlnet", "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128,
              "vocab_size": 100}  # fmt: skip
    module, inputs = network_module(_network(tmp_path, fields), batch=2, tokens=200)
    assert inputs["input_ids"].shape == (2, 200)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert capture(module, inputs, eager=True).flops > 0


def test_a_scan_token_by_token_bounds_the_tokens(tmp_path: Path) -> None:
    """Every token of every layer has operators of its own; chunks of tokens have not."""
    by_tokens = _network(tmp_path, MAMBA)
    with pytest.raises(SpecError, match="at most 1024 tokens: mamba goes through its layers"):
        network_module(by_tokens, batch=1, tokens=1025)
    by_chunks = _network(tmp_path, MAMBA2)
    module, inputs = network_module(by_chunks, batch=1, tokens=1025)
    calls = capture(module, inputs, eager=True).operators
    assert len(list(calls("linear"))) < 100


@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize(("family", "name"), [
    ("mamba", "MambaForCausalLM"), ("falcon_mamba", "FalconMambaForCausalLM"),
])  # fmt: skip
def test_layers_that_are_alike_are_captured_twice_for_all(
    tmp_path: Path, family: str, name: str, phase: Phase
) -> None:
    fields = MAMBA | {
        "model_type": family, "num_hidden_layers": 5,
        "architectures": [name],
    }  # fmt: skip
    network = _network(tmp_path, fields)
    assert network.layers == 5
    module, inputs = network_module(network, batch=2, tokens=6)
    whole = capture(module, inputs, eager=True, training=phase == "training")
    found = model_steps(network, batch=2, tokens=6, phase=phase)
    assert found == lower(whole, phase)


def test_a_scan_of_many_layers_takes_the_usual_tokens(tmp_path: Path, predictor: Predictor) -> None:
    few, many = (
        rank_devices(
            _network(tmp_path, MAMBA | {"num_hidden_layers": layers}), "h200", predictor=predictor
        )
        for layers in (8, 32)
    )
    assert 3 < many.fastest.device_s / few.fastest.device_s < 4.5


def test_positions_bound_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="at most 64 positions"):
        network_module(_network(tmp_path, BERT), batch=1, tokens=65)
    with pytest.raises(SpecError, match=r"batch: got 'an input of the sizes \[10+, 64\]'"):
        network_module(_network(tmp_path, BERT), batch=10**17, tokens=64)


def test_an_edited_class_of_a_users_own_is_captured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_network.py"
    text = (
        "import torch, transformers\n"
        "class OwnConfig(transformers.PretrainedConfig):\n"
        "    model_type = 'own_network'\n"
        "class OwnModel(transformers.PreTrainedModel):\n"
        "    config_class = OwnConfig\n"
        "    main_input_name = 'input_ids'\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.words = torch.nn.Embedding(100, 32)\n"
        "        self.linear = torch.nn.Linear(32, 32)\n"
        "    def forward(self, input_ids, **kwargs):\n"
        "        return self.linear(self.words(input_ids))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder, seen = _folder(tmp_path, {"model_type": "own_network"}), []
    for edited in (text, text, text.replace("self.linear(s", "self.linear.forward(-s")):
        file.write_text(edited)
        monkeypatch.delitem(sys.modules, "own_network", raising=False)
        importlib.invalidate_caches()
        own: Any = importlib.import_module("own_network")
        transformers.AutoConfig.register("own_network", own.OwnConfig, exist_ok=True)
        transformers.AutoModel.register(own.OwnConfig, own.OwnModel, exist_ok=True)
        network = network_or_model(folder)
        steps, found = stored_steps(network, batch=1, tokens=8, phase="inference")
        seen.append((found, len(steps)))
    assert [found for found, _ in seen] == [False, True, False]
    assert seen[2][1] > seen[1][1]
