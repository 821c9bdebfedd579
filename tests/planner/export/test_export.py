import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreplan
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan, targets
from foreplan.planner.export.exporter import exporter
from foreplan.planner.export.handover import Handover, Scheme
from foreplan.planner.export.llama_cpp import layers_by_split
from foreplan.planner.plan import Plan

#: Targets of serving plans; others are in ``test_training_exports.py`` and
#: ``test_mixed_precision_exports.py``.
SERVING = sorted({*targets()} - {"torchtitan", "megatron", "autocast", "torchao"})
WORKLOAD = {"batch": 8, "prompt_tokens": 128, "new_tokens": 16}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return foreplan.plan(
        "serving",
        "llama-3.2-1b",
        "a100-80g,2xl4",
        WORKLOAD | {"bits": (16, 8, 4)},
        costs="roofline",
    )


def with_layers(plan: Plan, sizes: list[int], bits: list[int], **storage: str) -> Plan:
    """The plan with stages of these sizes, on its cluster's ranks in order."""
    words = {16: "bf16/bf16", 8: "int8/bf16", 4: "int4/bf16", 3: "int3/bf16"}
    words |= {int(k.removeprefix("w")): v for k, v in storage.items()}
    ranks, stages, start = plan.cluster.ranks(), [], 0
    for rank, size in enumerate(sizes):
        own = bits[start : start + size]
        kernels = {
            f"{phase}/linear/{b}": f"{words[b]}/torch.linear"
            for phase in ("prefill", "decode")
            for b in set(own)
        }
        stages.append(
            {
                "rank": rank, "device": ranks[rank].label, "start": start, "end": start + size,
                "bits": own, "kernels": kernels,
            }
        )  # fmt: skip
        start += size
    mean = sum(bits[:start]) / start
    decision = plan.decision | {"stages": stages, "average_bits": mean}
    return Plan.model_validate_json(plan.model_copy(update={"decision": decision}).to_json())


@pytest.mark.parametrize("target", SERVING)
def test_every_target_writes_what_it_can_read_back(plan: Plan, target: str, tmp_path: Path) -> None:
    mixed = with_layers(plan, [6, 5, 5], [16] * 4 + [8] * 6 + [4] * 6)
    written = export_plan(mixed, target, tmp_path / "out")
    for name, text in written.files.items():
        assert (tmp_path / "out" / name).read_text() == text
    script = tmp_path / "out" / "launch.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", script], check=True)


def test_what_stops_the_script_stops_the_launcher(plan: Plan, tmp_path: Path) -> None:
    export_plan(plan, "vllm", tmp_path / "out")
    (tmp_path / "vllm").write_text("#!/bin/sh\necho $$\n")
    (tmp_path / "vllm").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m"}
    command = ["bash", tmp_path / "out" / "launch.sh"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.communicate()[0].split() == [str(started.pid)]


@pytest.mark.parametrize("target", [name for name in SERVING if name != "torchrun"])
def test_a_script_hands_on_the_callers_model_and_words(
    plan: Plan, target: str, tmp_path: Path
) -> None:
    export_plan(plan, target, tmp_path / "out")
    for name in ("vllm", "python", "trtllm-serve", "llama-server"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", tmp_path / "out" / "launch.sh", "--word", "two words"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    made = subprocess.run(
        command, env=path | {"MODEL": "/a b/model"}, capture_output=True, text=True, check=True
    )
    words = made.stdout.splitlines()
    assert "/a b/model" in words
    assert words[-2:] == ["--word", "two words"]
    refused = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "of the model" in refused.stderr


def test_torchrun_starts_where_the_plans_relative_paths_do(plan: Plan, tmp_path: Path) -> None:
    made, here = tmp_path / "to day" / "out", tmp_path / "work"
    export_plan(plan, "torchrun", made)
    here.mkdir()
    (tmp_path / "torchrun").write_text("#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    told = subprocess.run(
        ["bash", "../to day/out/launch.sh", "--rounds", "1"], cwd=here, capture_output=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert told[0] == str(here)
    assert (here / told[-3]).samefile(made / "plan.json")
    assert told[-5:-3] == ["-o", "../to day/out/verification.json"]
    assert told[-2:] == ["--rounds", "1"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_round_trip_alters_nothing(plan: Plan, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    count = sum(sizes)
    bits = data.draw(st.lists(st.sampled_from([16, 8, 4]), min_size=count, max_size=count))
    made = with_layers(plan, sizes, bits)
    for target in SERVING:
        found = exporter(target)
        assert found.read(found.write(made).files) == found.expected(made)


def test_vllm_is_told_stages_and_bits(plan: Plan, tmp_path: Path) -> None:
    made = with_layers(plan, [10, 6], [16] * 9 + [8] + [4] * 6)
    export_plan(made, "vllm", tmp_path)
    script = (tmp_path / "launch.sh").read_text()
    assert "VLLM_PP_LAYER_PARTITION=10,6" in script
    assert "--pipeline-parallel-size 2" in script
    assert "CUDA_VISIBLE_DEVICES=0,1" in script
    config = json.loads((tmp_path / "quantization_config.json").read_text())
    assert config["format"] == "mixed-precision"
    eight, four = sorted(config["config_groups"].values(), key=lambda g: -g["weights"]["num_bits"])
    assert eight["targets"] == [r"re:.*layers\.(9)\..*proj$"]
    assert four["weights"]["group_size"] == 64
    assert four["targets"] == [r"re:.*layers\.(10|11|12|13|14|15)\..*proj$"]


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_a_gpu_without_bf16_is_given_fp16(plan: Plan, target: str) -> None:
    """A T4 has no bf16; an A100, of the first plan, has."""
    turing = plan.model_copy(update={"cluster": parse_devices("a100-80g,t4")})
    for made, sizes, told in ((turing, [16], False), (turing, [10, 6], True)):
        written = exporter(target).write(with_layers(made, sizes, [16] * 16))
        assert ("--dtype float16" in written.files["launch.sh"]) == told


@pytest.mark.parametrize(
    ("target", "device", "told"),
    [
        ("vllm", "p4", r"p4 \(compute capability 6.1\)"),
        ("sglang", "v100-32g", r"v100_sxm2_32gb \(compute capability 7.0\)"),
        ("tensorrt-llm", "t4", r"t4 \(compute capability 7.5\).*8.0 or later"),
        ("tensorrt-llm", "mi210", r"mi210 \(AMD's gfx90a\).*export to llama.cpp or torchrun"),
    ],
)
def test_gpus_that_a_server_does_not_run_on_are_refused(
    plan: Plan, target: str, device: str, told: str
) -> None:
    mixed = plan.model_copy(update={"cluster": parse_devices(f"a100-80g,{device}")})
    with pytest.raises(SpecError, match=rf"decision\.stages\[1\]\.device: .*{told}"):
        exporter(target).write(with_layers(mixed, [10, 6], [16] * 16))
    exporter(target).write(with_layers(mixed, [16], [16] * 16))  # of a device left idle


def test_servers_of_amds_gpus_are_written(plan: Plan) -> None:
    amd = plan.model_copy(update={"cluster": parse_devices("2xmi210")})
    written = exporter("vllm").write(with_layers(amd, [10, 6], [16] * 16))
    assert "VLLM_PP_LAYER_PARTITION=10,6" in written.files["launch.sh"]


def test_plans_say_what_bf16_means_where_there_is_none() -> None:
    plan = foreplan.plan("serving", "llama-3.2-1b", "a100-80g,2xt4", WORKLOAD, costs="roofline")
    (note,) = (text for text in plan.assumptions if text.startswith("no bf16"))
    assert "on t4:" in note
    assert "priced as fp16" in note


def test_the_target_s_own_classes_accept_the_configuration(plan: Plan, tmp_path: Path) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    export_plan(with_layers(plan, [8, 8], [16] * 4 + [8] * 6 + [4] * 6), "vllm", tmp_path)
    config = json.loads((tmp_path / "quantization_config.json").read_text())
    read = quantization.QuantizationConfig.model_validate(config)
    assert {s.weights.num_bits for s in read.config_groups.values()} == {4, 8}


def test_three_bits_are_refused_where_nothing_reads_them(plan: Plan, tmp_path: Path) -> None:
    three = with_layers(plan, [8, 8], [3] * 16)
    for target in ("vllm", "sglang", "tensorrt-llm"):
        with pytest.raises(SpecError, match="layer 0"):
            export_plan(three, target, tmp_path / target)
        assert not (tmp_path / target).exists()
    assert "q3_K" in export_plan(three, "llama.cpp", tmp_path).files["tensor_types.txt"]


def test_rounded_activations_are_said_or_refused(plan: Plan, tmp_path: Path) -> None:
    made = with_layers(plan, [8, 8], [8] * 16, w8="fp8/fp8")
    config = json.loads(export_plan(made, "vllm", tmp_path).files["quantization_config.json"])
    group = config["config_groups"]["group_0"]
    assert group["input_activations"]["type"] == "float"
    with pytest.raises(SpecError, match="layer 0"):
        export_plan(made, "llama.cpp", tmp_path)


@pytest.mark.parametrize("device", ["epyc_7742", "cpu:threads=1", "cuda:0/sms=32"])
def test_a_stage_on_a_processor_or_a_slice_is_refused(
    plan: Plan, device: str, tmp_path: Path
) -> None:
    document = json.loads(plan.to_json())
    document["cluster"]["devices"] = [{"name": device, "count": 1}]
    document["cluster"]["tiers"] = []
    document["decision"]["stages"] = document["decision"]["stages"][:1]
    with pytest.raises(SpecError, match="GPU"):
        export_plan(Plan.model_validate_json(json.dumps(document)), "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_torchrun_says_that_its_ranks_cannot_be_devices_of_the_zoo(
    plan: Plan, tmp_path: Path
) -> None:
    (said,) = export_plan(plan, "torchrun", tmp_path).not_expressed
    assert said.startswith("which devices stand for a100_sxm_80gb")
    here = json.loads(plan.to_json())
    here["cluster"]["devices"] = [{"name": "cpu:threads=1", "count": 3, "memory_bytes": 1 << 40}]
    for stage in here["decision"]["stages"]:
        stage["device"] = f"localhost/cpu:threads=1#{stage['rank']}"
    written = export_plan(Plan.model_validate_json(json.dumps(here)), "torchrun", tmp_path)
    assert not written.not_expressed


def test_servers_name_both_kinds_of_plan_that_they_take(plan: Plan, tmp_path: Path) -> None:
    other = plan.model_copy(update={"kind": "bubbles"})
    with pytest.raises(SpecError, match="expected serving or replicas"):
        export_plan(other, "vllm", tmp_path)


def test_an_unknown_target_is_named(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"did you mean vllm"):
        export_plan(plan, "vlm", tmp_path)


@pytest.mark.parametrize("target", [name for name in SERVING if name != "torchrun"])
def test_a_cache_of_integers_is_asked_for_or_said_to_be_missing(
    plan: Plan, target: str, tmp_path: Path
) -> None:
    made = with_layers(plan, [8, 8], [16] * 16)
    eight = made.model_copy(update={"decision": made.decision | {"kv_bits": 8}})
    plainly, written = (export_plan(p, target, tmp_path) for p in (made, eight))
    said = set(written.not_expressed) - set(plainly.not_expressed)
    script = written.files["launch.sh"]
    if target == "llama.cpp":
        assert not said
        assert "--cache-type-k q8_0" in script
        assert "--cache-type-v q8_0" in script
        assert exporter(target).read(written.files).cache_bits == 8
    else:
        assert any("decision.kv_bits" in line for line in said)
        assert written.files == plainly.files


def test_llama_cpp_counts_the_output_as_a_layer() -> None:
    assert layers_by_split([16, 16], 32) == (17, 15)  # what a naive export would give
    assert layers_by_split([16, 17], 32) == (16, 16)


def test_a_scheme_knows_its_bits() -> None:
    assert Scheme("int3").bits == 3
    assert Scheme("fp8", "fp8").group == 0


def test_schemes_follow_the_layers(plan: Plan) -> None:
    handover = Handover.of(with_layers(plan, [2, 1], [16, 8, 4]))
    assert handover.layers == (2, 1)
    assert [s.bits for s in handover.schemes] == [16, 8, 4]
