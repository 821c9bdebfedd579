"""Precision plans in the words of torch.autocast and torchao."""

import json
from pathlib import Path

import pytest

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan

WORKLOAD = {
    "batch": 32, "network": "byte_lm", "steps": 1, "calibration_batches": 1,
    "network_options": {"context": 32, "width": 64, "layers": 1, "heads": 2},
}  # fmt: skip
FP32, BF16 = "fp32/fp32/torch.linear", "fp32/bf16/torch.linear"
INT8, LOOK_UP = "fp32/int8/torch.int_mm+bf16", "fp32/fp32/torch.embedding"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return foreplan.plan("precision", None, "1xa100-80g,1xt4", WORKLOAD, costs="roofline")


def with_variants(plan: Plan, *rows: dict[str, str]) -> Plan:
    """The plan with these variants of its linears, rank by rank; look-ups in fp32."""
    workers = [
        worker | {"operators": {name: row.get(name, row["else"]) if "embedding" not in text
                                else LOOK_UP for name, text in worker["operators"].items()}}
        for worker, row in zip(plan.decision["workers"], rows, strict=True)
    ]  # fmt: skip
    return plan.model_copy(update={"decision": plan.decision | {"workers": workers}})


def test_autocast_gets_a_file_a_rank(plan: Plan, tmp_path: Path) -> None:
    mixed = with_variants(plan, {"else": FP32}, {"else": BF16, "head": FP32})
    written = export_plan(mixed, "autocast", tmp_path)
    assert sorted(written.files) == ["rank0.json", "rank1.json"]
    first, second = (json.loads((tmp_path / name).read_text()) for name in sorted(written.files))
    assert not first["autocast"]["enabled"]
    assert first["autocast"]["dtype"] == "bfloat16"
    # A T4 has no bf16, and was priced with fp16 in its place.
    assert second["autocast"] == {"device_type": "cuda", "dtype": "float16", "enabled": True}
    assert any("GradScaler" in note for note in written.not_expressed)
    assert second["fp32_modules"] == ["head"]
    assert "blocks.0.up" in second["modules"]


def test_torchao_converts_what_is_8_bit(plan: Plan, tmp_path: Path) -> None:
    mixed = with_variants(plan, {"else": FP32}, {"else": BF16, "blocks.0.up": INT8})
    written = export_plan(mixed, "torchao", tmp_path)
    second = json.loads(written.files["rank1.json"])
    assert second["int8"]["modules"] == ["blocks.0.up"]
    assert any("memory" in note for note in written.not_expressed)


def test_what_a_tool_cannot_express_is_refused(plan: Plan, tmp_path: Path) -> None:
    for target, mixed, message in (
        ("autocast", with_variants(plan, {"else": INT8}, {"else": BF16}), "nothing like it"),
        ("torchao", with_variants(plan, {"else": f"{INT8[:-4]}fp32"}, {"else": BF16}), "operator"),
    ):
        with pytest.raises(SpecError, match=message):
            export_plan(mixed, target, tmp_path / target)
        assert not (tmp_path / target).exists()
    on_cpu = plan.decision["workers"][0] | {"device": "localhost/cpu:threads=1"}
    workers = [on_cpu, plan.decision["workers"][1]]
    moved = plan.model_copy(update={"decision": plan.decision | {"workers": workers}})
    with pytest.raises(SpecError, match="a GPU"):
        export_plan(moved, "torchao", tmp_path / "cpu")


def test_plans_of_other_kinds_are_refused(tmp_path: Path) -> None:
    serving = foreplan.plan("serving", "llama-3.2-1b", "1xa100-80g",
                            {"batch": 1, "prompt_tokens": 16, "new_tokens": 2},
                            costs="roofline")  # fmt: skip
    with pytest.raises(SpecError, match="precision"):
        export_plan(serving, "autocast", tmp_path)
