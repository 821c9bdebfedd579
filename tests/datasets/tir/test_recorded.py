"""Programs of a measured folder, timed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from foreplan.datasets.tir import toolchain
from foreplan.datasets.tir.build_dataset import build_dataset
from foreplan.datasets.tir.measure import MeasureOptions, measure
from foreplan.datasets.tir.recorded import recorded_programs
from foreplan.datasets.tir.records import read_records, write_records
from foreplan.datasets.tir.site import LocalSite
from foreplan.datasets.tir.target import target_device
from foreplan.errors import MissingDataError, SpecError

try:
    toolchain.require_tvm()
except (MissingDataError, SpecError) as error:
    pytest.skip(f"needs TVM: {error}", allow_module_level=True)

torch = pytest.importorskip("torch")
DEVICE = "cpu:threads=1,isa=avx2"
OPTIONS = MeasureOptions(samples=2, build_timeout_s=300, time_timeout_s=300)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three programs of one task."""
    from foreplan.datasets.tir.extract import extract_module

    folder = tmp_path_factory.mktemp("measured")
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval()
    tasks = extract_module(model, (torch.zeros(8, 32),), "one-layer")
    options = replace(OPTIONS, samples=3)
    measure(tasks[:1], LocalSite([target_device(DEVICE, chip="one")]), folder, options)
    return folder


def test_the_same_programs_are_timed_on_another_device_and_a_second_run_adds_nothing(
    measured: Path, tmp_path: Path
) -> None:
    first = {r.program_key: r for r in read_records(measured)}
    for _ in range(2):
        found = build_dataset(
            tmp_path, programs=measured, devices=[DEVICE], options=OPTIONS, chip="other"
        )
        assert (found["tasks"], found["rows"], found["refused"]) == (1, len(first), {})
        again = {r.program_key: r for r in read_records(tmp_path)}
        assert again.keys() == first.keys()
    for key, record in again.items():
        assert (record.chip, record.status) == ("other", "ok")
        was = first[key]
        assert (record.seed, record.module, record.trace) == (was.seed, was.module, was.trace)
        assert (record.networks, record.calls, record.families) == (
            was.networks, was.calls, was.families
        )  # fmt: skip


def test_a_run_goes_on_with_other_chunks_and_beside_draws(measured: Path, tmp_path: Path) -> None:
    records = sorted(read_records(measured), key=lambda record: record.seed)
    shards = tmp_path / "shards"
    shards.mkdir()
    # One is timed already, another one on another chip; draws of the task were numbered 0.
    there = [replace(records[0], chip="other"), replace(records[1], chip="third")]
    write_records(there, shards / "shard-1.parquet")
    (shards / "jobs.txt").write_text(f"{records[0].task_key}/0\n")
    for samples in (1, 3):
        build_dataset(
            tmp_path, programs=measured, devices=[DEVICE],
            options=replace(OPTIONS, samples=samples), chip="other",
        )  # fmt: skip
        timed = [record for record in read_records(tmp_path) if record.chip == "other"]
        assert sorted(r.program_key for r in timed) == sorted(r.program_key for r in records)


@pytest.mark.parametrize("wrong", [{"target": "llvm"}, {"target": "{}"}, {"calls": (1, 2)}])
def test_a_damaged_record_is_named(
    measured: Path, wrong: dict[str, object], tmp_path: Path
) -> None:
    (first, *_) = read_records(measured)
    write_records([replace(first, **wrong)], tmp_path / "a.parquet")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"program {first.program_key}: got"):
        recorded_programs(tmp_path, target_device(DEVICE, chip="one"))


def test_programs_for_another_instruction_set_are_left_out(measured: Path, tmp_path: Path) -> None:
    other = target_device("cpu:threads=1,isa=avx512", chip="one")
    with pytest.raises(SpecError, match=r"isa=avx2.*expected programs for .*isa=avx512"):
        recorded_programs(measured, other)
    records = list(read_records(measured))
    mixed = [*records, *(replace(r, target=other.target, device=other.name) for r in records[:1])]
    write_records(mixed, tmp_path / "programs-000.parquet")
    tasks, programs = recorded_programs(tmp_path, other)
    assert [len(programs[task.key]) for task in tasks] == [1]


def test_what_cannot_be_asked_together_is_refused(measured: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--programs"):
        build_dataset(tmp_path, programs=measured, networks=["bert-tiny"], devices=[DEVICE])
    with pytest.raises(MissingDataError, match="no such dataset"):
        build_dataset(tmp_path, programs=measured / "none", devices=[DEVICE])
