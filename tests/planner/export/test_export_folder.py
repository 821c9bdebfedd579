"""A folder of an export holds one plan, and all of it."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

import foreplan
from foreplan.datasets import storage
from foreplan.errors import SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.export.export_record import RECORD_FILE
from foreplan.planner.plan import Plan

WORKLOAD = {
    "batch": 4, "prompt_tokens": 64, "new_tokens": 8, "prefill_microbatch": 4,
    "decode_microbatch": 4,
}  # fmt: skip


def made(*bits: int) -> Plan:
    return foreplan.plan(
        "serving", "llama-3.2-1b", "l4", WORKLOAD | {"bits": bits}, costs="roofline"
    )


@pytest.fixture(scope="module")
def mixed() -> Plan:
    return made(8)


@pytest.fixture(scope="module")
def plain() -> Plan:
    return made(16)


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_files_of_an_earlier_plan_do_not_stay(
    mixed: Plan, plain: Plan, target: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    first = export_plan(mixed, target, tmp_path).files
    second = export_plan(plain, target, tmp_path).files
    assert len(second) < len(first)
    assert {path.name for path in tmp_path.iterdir()} == {*second, RECORD_FILE, "notes.txt"}


def test_files_of_an_earlier_target_do_not_stay(mixed: Plan, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in ("torchrun", "vllm", "tensorrt-llm", "llama.cpp", "sglang", "torchrun"):
        files = export_plan(mixed, target, tmp_path).files
        assert {path.name for path in tmp_path.iterdir()} == {*files, RECORD_FILE, "notes.txt"}
        check = ["sha256sum", "--check", "--strict", "--quiet", RECORD_FILE]
        subprocess.run(check, cwd=tmp_path, check=True)


def test_what_was_edited_or_never_written_stays(mixed: Plan, plain: Plan, tmp_path: Path) -> None:
    export_plan(mixed, "tensorrt-llm", tmp_path)
    (tmp_path / "llm_args.yaml").write_text("mine: 1")
    beside = tmp_path.parent / f"{tmp_path.name}.txt"
    beside.write_text("")
    nothing = hashlib.sha256(b"").hexdigest()
    with (tmp_path / RECORD_FILE).open("a") as record:
        record.write(f"{nothing}  ../{beside.name}\n{nothing}  gone\nno line of a record\n")
    export_plan(plain, "torchrun", tmp_path)
    assert beside.exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"launch.sh", "plan.json", "llm_args.yaml", RECORD_FILE}
    # Edited, it is a plan of its own.
    (tmp_path / "plan.json").write_text(mixed.to_json())
    with pytest.raises(SpecError, match="an edited file"):
        export_plan(plain, "torchrun", tmp_path)


def test_what_was_edited_is_not_written_over(mixed: Plan, plain: Plan, tmp_path: Path) -> None:
    export_plan(mixed, "vllm", tmp_path)
    script = tmp_path / "launch.sh"
    written = script.read_text()
    script.write_text(f"{written}# mine\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for plan, target in ((mixed, "vllm"), (plain, "vllm"), (plain, "llama.cpp")):
        with pytest.raises(SpecError, match=r"launch\.sh: got 'an edited file'.*folder of its own"):
            export_plan(plan, target, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    script.write_text(written)
    export_plan(plain, "vllm", tmp_path)
    assert script.read_text() != written
    (
        tmp_path / RECORD_FILE
    ).unlink()  # what no record names may be anybody's, unless it is the same
    export_plan(plain, "vllm", tmp_path)
    (tmp_path / RECORD_FILE).unlink()
    with pytest.raises(SpecError, match=r"launch\.sh: got 'another file'"):
        export_plan(mixed, "vllm", tmp_path)


def test_another_plan_is_not_written_over(mixed: Plan, plain: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(mixed.to_json())
    with pytest.raises(SpecError, match=r"plan\.json: got 'another file'.*folder of its own"):
        export_plan(plain, "torchrun", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert file.read_text() == mixed.to_json()
    file.write_text("no plan")
    with pytest.raises(SpecError, match="another file"):
        export_plan(mixed, "torchrun", tmp_path)
    # The same plan may lie there, whatever its spaces, and an earlier export is replaced.
    file.write_text(json.dumps(json.loads(mixed.to_json()), indent=7))
    export_plan(mixed, "torchrun", tmp_path)
    export_plan(plain, "torchrun", tmp_path)
    assert file.read_text() == plain.to_json()


def test_a_full_disk_leaves_no_half_of_an_export(
    mixed: Plan, plain: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_plan(plain, "vllm", tmp_path)
    before = (tmp_path / "launch.sh").read_text()
    whole, count = storage._aside, []

    def full(target: Path, data: bytes, permissions: int | None) -> Path:
        count.append(target)
        if len(count) == 2:
            raise OSError(28, "No space left on device")
        return whole(target, data, permissions)

    monkeypatch.setattr(storage, "_aside", full)
    with pytest.raises(SpecError, match="No space left"):
        export_plan(mixed, "vllm", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"launch.sh", RECORD_FILE}
    assert (tmp_path / "launch.sh").read_text() == before
