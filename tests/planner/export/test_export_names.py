"""Exports name the modules that a launcher has, and files where it finds them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan

#: Half of the layers keep 16 bits.
MIXED = {"min_average_bits": 12, "bits": (16, 8), "prefill_microbatch": 4, "decode_microbatch": 4}
WORKLOAD = {"batch": 4, "prompt_tokens": 64, "new_tokens": 8}
#: Linears of a layer by family, as vLLM's and SGLang's modules are called.
LINEARS = {
    "gpt2": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    "opt-1.3b": (
        "model.decoder.layers",
        ["self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2"],
    ),
    "llama-3.2-1b": ("model.layers", ["self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]),
}


def made(model: str, **workload: object) -> Plan:
    return foreplan.plan("serving", model, "l4", WORKLOAD | MIXED | workload, costs="roofline")


@pytest.fixture(scope="module")
def mixed() -> Plan:
    return made("llama-3.2-1b")


@pytest.mark.parametrize("model", LINEARS)
def test_every_linear_is_a_group_s_or_ignored(model: str, tmp_path: Path) -> None:
    plan = made(model)
    written = export_plan(plan, "vllm", tmp_path)
    document = json.loads(written.files["quantization_config.json"])
    (target,) = document["config_groups"]["group_0"]["targets"]
    (ignored,) = (word for word in document["ignore"] if word.startswith("re:"))
    stem, names = LINEARS[model]
    bits = foreplan.decision_of(plan, foreplan.ServingDecision).bits
    assert set(bits) == {8, 16}
    for layer, wanted in enumerate(bits):
        for name in names:
            word = f"{stem}.{layer}.{name}"
            assert bool(re.match(target[3:], word)) == (wanted == 8), word
            assert bool(re.match(ignored[3:], word)) == (wanted == 16), word


@pytest.mark.parametrize(
    ("model", "target"), [("opt-1.3b", "llama.cpp"), ("opt-1.3b", "tensorrt-llm"),
                          ("gpt2", "tensorrt-llm")]
)  # fmt: skip
def test_a_family_that_the_launcher_lacks_is_refused(
    model: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"model\.family: .*export to vllm"):
        export_plan(made(model), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_llama_cpp_is_told_the_layers_of_16_bits(mixed: Plan, tmp_path: Path) -> None:
    """``llama-quantize`` follows overrides beside a quantised type only."""
    lines = export_plan(mixed, "llama.cpp", tmp_path).files["tensor_types.txt"].splitlines()
    named = {line.rpartition("=")[2]: re.findall(r"\d+", line.partition(")")[0]) for line in lines}
    assert set(named) == {"q8_0", "bf16"}
    assert sorted(int(n) for numbers in named.values() for n in numbers) == list(range(16))
    assert "--tensor-type-file tensor_types.txt" in (tmp_path / "launch.sh").read_text()


def test_tensorrt_llm_finds_its_arguments_from_anywhere(mixed: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    export_plan(mixed, "tensorrt-llm", folder)
    (tmp_path / "trtllm-serve").write_text('#!/bin/sh\ncat "$3"\n')
    (tmp_path / "trtllm-serve").chmod(0o755)
    shown = subprocess.run(
        [folder / "launch.sh"], cwd="/", env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "m"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == (folder / "llm_args.yaml").read_text()
    assert "max_num_tokens" not in shown.stdout


def test_tensorrt_llm_takes_prompts_as_long_as_the_plan_s(tmp_path: Path) -> None:
    long = made("llama-3.2-1b", batch=1, prompt_tokens=9000, prefill_microbatch=1,
                decode_microbatch=1)  # fmt: skip
    assert (
        "max_num_tokens: 9000" in export_plan(long, "tensorrt-llm", tmp_path).files["llm_args.yaml"]
    )
