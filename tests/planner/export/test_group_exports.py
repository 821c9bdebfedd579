"""Stages of several GPUs in launchers' words: one degree of tensor parallelism, or a refusal."""

from pathlib import Path

import pytest

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.export.handover import Handover
from foreplan.planner.plan import Plan

WORKLOAD = {
    "batch": 8, "prompt_tokens": 128, "new_tokens": 16, "bits": 16, "tensor_parallel": 2,
    "prefill_microbatch": 2, "decode_microbatch": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return foreplan.plan("serving", "llama-3.2-1b", "4xl4", WORKLOAD, costs="roofline")


@pytest.mark.parametrize(
    ("target", "file", "words"),
    [
        ("vllm", "launch.sh", "--tensor-parallel-size 2"),
        ("sglang", "launch.sh", "--tp-size 2"),
        ("tensorrt-llm", "llm_args.yaml", "tensor_parallel_size: 2"),
    ],
)
def test_servers_get_the_degree_and_the_gpus_stage_by_stage(
    plan: Plan, target: str, file: str, words: str, tmp_path: Path
) -> None:
    handover = Handover.of(plan)
    assert handover.degree == 2
    assert len(handover.gpus) == 2 * len(handover.layers)
    written = export_plan(plan, target, tmp_path / target)  # reads back what it wrote
    assert words in written.files[file]


def test_llama_cpp_and_unlike_degrees_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"stages\[0\]\.peers.*2 GPUs"):
        export_plan(plan, "llama.cpp", tmp_path / "out")
    first = plan.decision["stages"][0]
    cut = first["end"] // 2
    last = plan.decision["stages"][-1]
    stages = [
        first | {"end": cut, "bits": first["bits"][:cut]},
        last | {"start": cut, "end": 16, "bits": [16] * (16 - cut), "rank": 3, "peers": []},
    ]
    unlike = plan.model_copy(update={"decision": plan.decision | {"stages": stages}})
    with pytest.raises(SpecError, match=r"stages\[1\]\.peers.*tensor_parallel=2"):
        export_plan(unlike, "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
