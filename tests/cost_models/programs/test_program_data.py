"""Measured programs in, folds and errors out: readers, rules, commands, replay, few-shot tuning."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreplan.cost_models.commands import evaluate_file, operator_stats, train_files
from foreplan.cost_models.programs.compact_ast import FEATURE_NAMES, CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.program_commands import load_program_model, train_programs
from foreplan.cost_models.programs.program_crossval import main as crossval
from foreplan.cost_models.programs.program_data import read_programs
from foreplan.cost_models.programs.program_devices import named_device, record_device
from foreplan.cost_models.programs.program_estimate import PART_NAMES, program_estimate
from foreplan.cost_models.programs.program_folds import folds, validation_groups
from foreplan.cost_models.programs.program_replay import search_curve
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.cost_models.programs.program_transfer import copied_errors
from foreplan.cost_models.programs.program_tuning import choose_tasks
from foreplan.datasets import device_zoo
from foreplan.datasets.tir.records import ProgramRecord, write_records
from foreplan.datasets.tir.task import decode_module, program_key
from foreplan.datasets.tir.tir_jsonl import write_tir_jsonl
from foreplan.errors import ForeplanError, MissingDataError, SpecError

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()
_MODULES = [decode_module(json.loads(line)["mod"]).decode() for line in _LINES]


def record(number: int, **fields: Any) -> ProgramRecord:
    """A record of example ``number``, 16 tasks of 4 families."""
    module = _MODULES[number % len(_MODULES)]
    plain: dict[str, Any] = dict.fromkeys(
        ("repetitions", "calls_per_repetition", "load", "clock_hz"), 0
    ) | dict.fromkeys(("trace", "error", "tvm", "ffi", "target"), "")
    median = 1e-5 * (1 + number % 7)
    plain |= {
        "task_key": f"t{number % 16}", "task_name": "x",
        "program_key": f"{program_key(module)}{number}",
        "networks": (f"n{number % 4}/batch=1",), "calls": (1,), "families": (f"f{number % 4}",),
        "device": "cuda:0", "chip": "NVIDIA H200", "seed": number, "module": module,
        "status": "ok", "median_s": median, "min_s": 0.99 * median, "max_s": 1.01 * median,
        "spread": 0.02, "measured_at": 0.0,
    }  # fmt: skip
    return ProgramRecord(**{**plain, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("programs")
    write_records([record(number) for number in range(64)], path / "programs-000.parquet")
    return path


def test_folders_are_read_with_what_failed_left_out(tmp_path: Path) -> None:
    rows = [
        record(0), record(1, median_s=math.nan, status="fault"), record(2, spread=1.5),
        record(3, module="{}"), record(0, spread=0.3), record(0, families=("g",), seed=9,
                                                             program_key="other"),
    ]  # fmt: skip
    write_records(rows, tmp_path / "a.parquet")
    table, unsupported, _ = read_programs([tmp_path])
    assert len(table) == 3  # program 0 once: the quieter of its repetitions
    assert sorted(table.spread.tolist()) == [0.02, 0.02, 1.5]
    assert [item.network for item in unsupported] == ["n3/batch=1"]
    # A task's families are those of all its records.
    assert set(table.family[table.task == "t0"]) == {"f0+g"}
    assert len(read_programs([tmp_path], max_spread=0.5).table) == 2


def test_devices_are_named_by_chip(tmp_path: Path) -> None:
    assert record_device("cuda:0", "NVIDIA H200").name == "h200"
    core = record_device("cpu:threads=1,isa=avx2", "Some CPU", 2e9)
    assert (core.chip, core.isa, core.units) == ("Some CPU", ("avx2",), 1)
    assert core.slice is not None
    assert named_device("x", {"x": core}) is core
    with pytest.raises(SpecError, match="zoo"):
        named_device("cuda:0", {})
    write_records([record(0, device="cpu:threads=1,isa=avx2", chip="C")], tmp_path / "a.parquet")
    write_records([record(1)], tmp_path / "b.parquet")
    table = read_programs([tmp_path]).table
    assert sorted(set(table.chips)) == ["C", "gh100"]


def test_another_session_is_another_device_of_the_chip(tmp_path: Path) -> None:
    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
        write_records(
            [record(0, device="cpu:threads=1,isa=avx2", chip="C")],
            tmp_path / name / "a.parquet",
        )
    note = tmp_path / "beside" / "session.json"
    note.write_text('{"name": "beside=8"}')
    table = read_programs([tmp_path / "alone", tmp_path / "beside"]).table
    assert [d.name for d in table.devices] == [
        "C/cpu:threads=1,isa=avx2", "C/cpu:threads=1,isa=avx2,beside=8",
    ]  # fmt: skip
    assert table.device.tolist() == [0, 1]
    assert set(table.chips) == {"C"}
    note.write_text("[]")
    with pytest.raises(SpecError, match=r"session\.json"):
        read_programs([tmp_path / "beside"])


def test_no_task_is_on_both_sides_of_a_fold(folder: Path) -> None:
    table = read_programs([folder]).table
    shared = table.family.astype("<U8")
    shared[table.task == "t1"] = "f1+f2"
    object.__setattr__(table, "family", shared)
    for split in ("family", "task"):
        tested = np.zeros(len(table), dtype=bool)
        for fold in folds(table, split):
            assert not fold.train[fold.test].any()
            assert not set(table.task[fold.train]) & set(table.task[fold.test])
            tested |= fold.test
            groups = validation_groups(table.take(fold.train), 2)
            parts = [set(table.take(fold.train).task[groups == g]) for g in np.unique(groups)]
            assert not set.intersection(*parts)
        assert tested.all()
    held = {fold.name: fold for fold in folds(table, "family")}
    for name in ("f1", "f2"):
        assert held[name].test[table.task == "t1"].all()
    easy = next(folds(table, "every-fifth"))
    assert easy.test.sum() == len(table) // 5
    with pytest.raises(SpecError, match="left to train"):
        list(folds(table, "chip"))


def test_programs_of_no_family_are_always_trained_on(folder: Path) -> None:
    table = read_programs([folder]).table
    families = table.family.astype("<U8")
    synthetic = table.task == "t2"
    families[synthetic] = ""
    object.__setattr__(table, "family", families)
    found = list(folds(table, "family"))
    assert len(found) > 2
    for fold in found:
        assert fold.train[synthetic].all()
        assert not fold.test[synthetic].any()
        rest = table.take(fold.train)
        groups = validation_groups(rest, 1)
        assert (groups[rest.family == ""] == -1).all()
        assert (groups[rest.family != ""] >= 0).all()


def test_evaluate_and_train_by_command(folder: Path, tmp_path: Path) -> None:
    from foreplan.cost_models.programs import program_commands

    small = {"rounds": 10, "groups": 2, "networks": 1, "epochs": 1, "width": 16, "layers": 1}
    card = program_commands.train_programs(
        [folder], ["foreplan"], tmp_path / "m", hold_out=["f3"], settings=small
    )
    assert card["rows"] == 48
    assert card["held_out"] == ["f3"]
    found: dict[str, Any] = evaluate_file(str(tmp_path / "m"), folder, "foreplan")
    assert found["overall"]["count"] == 64
    assert list(found["by_device"]) == ["h200"]
    assert sorted(found["by_op"]) == [f"n{n}/batch=1" for n in range(4)]
    assert found["by_device_op"]["h200"]["n0/batch=1"]["count"] == 16
    assert 0 < found["noise_floor"]["median"] < 0.05
    path = tmp_path / "x.jsonl.xz"
    write_tir_jsonl([record(number) for number in range(8)], path)
    lines = evaluate_file(str(tmp_path / "m"), path, "tir-jsonl", device="h200")
    assert lines["by_device"]["h200"]["count"] == 8  # type: ignore[index]
    assert lines["unsupported"] == 0
    broken = tmp_path / "y.jsonl"
    write_tir_jsonl([record(0), record(1, module="{}")], broken)
    lost = evaluate_file("roofline", broken, "tir-jsonl", device="t4")
    assert lost["unsupported"] == 1
    assert lost["unsupported_by"] == {"t4/n1/batch=1": 1}
    with pytest.raises(SpecError, match="--device"):
        evaluate_file("roofline", broken, "tir-jsonl")
    with pytest.raises(SpecError, match="programs"):
        evaluate_file("pretrained:ops", folder, "foreplan")
    with pytest.raises(SpecError, match="hold-out"):
        train_files([folder], ["foreplan"], tmp_path / "n", hold_out=["nobody"])
    with pytest.raises(MissingDataError):
        evaluate_file("roofline", tmp_path / "none", "tir-jsonl", device="t4")


def test_programs_fine_tune_a_model_by_command(folder: Path, tmp_path: Path) -> None:
    small = {"rounds": 10, "groups": 0, "networks": 0}
    train_programs([folder], ["foreplan"], tmp_path / "m", settings=small)
    said = load_program_model(str(tmp_path / "m")).predict(read_programs([folder]).table)
    slow = tmp_path / "slow"
    slow.mkdir()
    write_records(
        [record(n, median_s=3 * float(s)) for n, s in enumerate(said)], slow / "a.parquet"
    )
    start, mine = str(tmp_path / "m"), tmp_path / "mine"
    card: dict[str, Any] = train_files([slow], ["foreplan"], mine, start=start)
    assert card["tuning"]["programs"] == 64
    assert card["tuning"]["tasks"] == 16
    assert card["tuning"]["mape_unseen"] < 0.3 * card["tuning"]["mape_before"]
    errors: list[Any] = [evaluate_file(name, slow, "foreplan") for name in (start, str(mine))]
    before, after = (found["overall"]["mape"] for found in errors)
    assert card["tuning"]["mape_before"] == pytest.approx(before)
    assert after < 0.5 * before
    assert card["left_out"] == {"noisy": 0, "unsupported": 0}
    for name in ("roofline", "pretrained:ops"):
        with pytest.raises(SpecError, match="--start"):
            train_files([slow], ["foreplan"], tmp_path / "none", start=name)
    assert not (tmp_path / "none").exists()


def test_what_is_not_trained_on_is_counted(folder: Path, tmp_path: Path) -> None:
    def trained_on(path: Path, **rest: Any) -> dict[str, Any]:
        settings = {"rounds": 10, "groups": 0, "networks": 0}
        return train_programs([path], ["foreplan"], tmp_path / "m", settings=settings | rest)

    noisy = [record(n, spread=0.6) for n in range(3)]
    odd = [record(n, module="{}") for n in range(3, 5)]
    some, all_noisy = tmp_path / "some", tmp_path / "all"
    for place, rows in ((some, [*noisy, *odd, *map(record, range(5, 20))]), (all_noisy, noisy)):
        place.mkdir()
        write_records(rows, place / "a.parquet")
    assert trained_on(some)["left_out"] == {"noisy": 3, "unsupported": 2}
    with pytest.raises(MissingDataError, match=r"each program in .*all spread by more than 0\.5"):
        trained_on(all_noisy)
    with pytest.raises(SpecError, match=r"--torch-device: got 'banana', expected a device of"):
        trained_on(folder, torch_device="banana")


def test_a_new_chip_is_no_known_one_with_the_same_instruction_set(tmp_path: Path) -> None:
    word = {"device": "cpu:threads=1,isa=avx2", "target": json.dumps({"kind": "llvm"})}
    chips = ("old", "older", "new")
    for chip in chips:
        (tmp_path / chip).mkdir()
        rows = [record(number, chip=chip, **word) for number in range(64)]
        write_records(rows, tmp_path / chip / "a.parquet")
    small = {"rounds": 10, "groups": 0, "networks": 0}
    train_programs(
        [tmp_path / "old", tmp_path / "older"], ["foreplan"], tmp_path / "m", settings=small
    )
    start = str(tmp_path / "m")
    train_files([tmp_path / "new"], ["foreplan"], tmp_path / "mine", start=start)
    found: dict[str, Any] = evaluate_file(str(tmp_path / "mine"), tmp_path / "new", "foreplan")
    card = json.loads((tmp_path / "mine" / "card.json").read_text())
    named = [f"{chip}/{word['device']}" for chip in chips]
    assert [device["name"] for device in card["devices"]] == named
    assert list(found["by_device"]) == named[2:]


@pytest.mark.parametrize("model", ["roofline", "pretrained:programs"])
def test_a_file_of_programs_that_cannot_be_encoded_is_counted(tmp_path: Path, model: str) -> None:
    path = tmp_path / "odd.jsonl"
    write_tir_jsonl([record(0, module="{}"), record(1, module="{}")], path)
    found: dict[str, Any] = evaluate_file(model, path, "tir-jsonl", device="t4")
    assert found["unsupported"] == 2
    assert found["overall"]["count"] == found["by_device"]["t4"]["count"] == 0
    assert found["unsupported_by"] == {"t4/n0/batch=1": 1, "t4/n1/batch=1": 1}
    assert sum(found["unsupported_reasons"].values()) == 2


def test_a_folder_is_of_programs_also_where_none_can_be_read(tmp_path: Path) -> None:
    write_records([record(0, module="{}")], tmp_path / "a.parquet")
    found: dict[str, Any] = evaluate_file("roofline", tmp_path, "foreplan")
    assert (found["unsupported"], found["overall"]["count"]) == (1, 0)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for attempt in (lambda: evaluate_file("roofline", tmp_path, "foreplan"),
                    lambda: operator_stats(tmp_path, "foreplan")):  # fmt: skip
        with pytest.raises(SpecError, match=r"a\.parquet: got .*, expected a Parquet file"):
            attempt()


def test_stats_of_programs_are_of_what_ran(tmp_path: Path) -> None:
    rows = [*map(record, range(8)), record(8, status="timeout", median_s=math.nan)]
    write_records(rows, tmp_path / "a.parquet")
    found: dict[str, Any] = operator_stats(tmp_path, "foreplan")
    (device,) = found["by_device_op"]
    assert sum(found["by_device_op"][device].values()) == found["rows"] == 8
    assert found["chips"][device] in device
    assert found["failed"] == {"timeout": 1}
    path = tmp_path / "x.jsonl.gz"
    write_tir_jsonl([record(number) for number in range(8)], path)
    lines: dict[str, Any] = operator_stats(path, "tir-jsonl")
    assert lines["rows"] == 8
    assert sum(lines["by_device_op"]["not said"].values()) == 8


def test_a_network_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / "plus.jsonl"
    write_tir_jsonl([replace(record(0), networks=("bert+head", "gpt"), calls=(1, 2))], path)
    found: dict[str, Any] = evaluate_file("roofline", path, "tir-jsonl", device="t4")
    assert sorted(found["by_op"]) == ["bert+head", "gpt"]


def test_crossval_keeps_what_it_did_and_reports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--data", str(folder), "-o", str(tmp_path), "--seeds", "0", "--models", "roofline"]
    crossval([*command, "--folds", "f0"])
    first = (tmp_path / "family__f0__roofline__0.npz").stat().st_mtime_ns
    crossval(command)
    assert (tmp_path / "family__f0__roofline__0.npz").stat().st_mtime_ns == first
    assert len(list(tmp_path.glob("*.npz"))) == 4
    assert "## family: h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--models", "cdmp"], "--models"),
        (["--folds", "f0", "zebra"], "--folds"),
        (["--only", "zebra"], "--only"),
        (["--device", "cuda:99"], "--device"),
        (["--together", "0"], "--together"),
        (["--minutes", "nan"], "--minutes"),
        (["-o", __file__], "--output"),
    ],
)
def test_crossval_refuses_bad_input_and_leaves_nothing(
    folder: Path, tmp_path: Path, changed: list[str], named: str
) -> None:
    output = tmp_path / "new" / "out"
    command = ["--data", str(folder), "-o", str(output), "--models", "roofline", *changed]
    with pytest.raises(ForeplanError, match=named):
        crossval(command)
    assert not output.parent.exists()


def test_a_refusal_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    for module, more in (
        ("program_crossval", ["-o", "out"]),
        ("program_transfer", ["--target", "x"]),
    ):
        line = [
            sys.executable,
            "-m",
            f"foreplan.cost_models.programs.{module}",
            "--data",
            "nowhere",
            *more,
        ]
        ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == MissingDataError.exit_code
        assert len(ended.stderr.splitlines()) == 1
        assert "nowhere" in ended.stderr


def test_transfer_to_a_new_device(folder: Path) -> None:
    from foreplan.cost_models.programs.program_predictor import ProgramPredictor
    from foreplan.cost_models.programs.program_transfer import transfer_errors

    table = read_programs([folder]).table
    model = ProgramPredictor(rounds=30, networks=0, groups=2).fit(table)
    slow = table.take(np.arange(len(table)))
    object.__setattr__(slow, "latency_s", 5 * model.predict(table))
    before = model.predict(slow)
    found = transfer_errors(model, slow, [8], draws=1)
    assert found["untuned"]["0"][0] == pytest.approx(0.8)
    assert found["kmeans"]["8"][0] < 0.4
    assert found["random"]["8"][0] < 0.4
    np.testing.assert_array_equal(model.predict(slow), before)  # the model itself is not tuned


def test_programs_of_a_chip_are_not_taken_for_another_of_its_instruction_set(
    tmp_path: Path,
) -> None:
    from foreplan.cost_models.programs import program_commands

    for chip in "ABC":
        (tmp_path / chip).mkdir()
        write_records(
            [record(n, device="cpu:threads=1,isa=avx2", chip=chip) for n in range(32)],
            tmp_path / chip / "a.parquet",
        )
    small = {"rounds": 4, "groups": 0, "networks": 0}
    trained = [tmp_path / "A", tmp_path / "B"]
    program_commands.train_programs(trained, ["foreplan"], tmp_path / "m", settings=small)
    for chip in "BC":  # one that was trained on, and one that was not
        found: Any = evaluate_file(str(tmp_path / "m"), tmp_path / chip, "foreplan")
        assert list(found["by_device"]) == [f"{chip}/cpu:threads=1,isa=avx2"]


def test_times_copied_from_a_device_that_ran_the_same_programs(folder: Path) -> None:
    table = read_programs([folder]).table
    target = table.take(np.arange(len(table)))
    object.__setattr__(target, "latency_s", 3 * table.latency_s)
    found = copied_errors(target, table, least=1)["h200"]
    # Programs of a task with equal leaves count once.
    distinct = {
        (t, table.leaves[a:b].tobytes())
        for t, a, b in zip(table.task, table.offsets, table.offsets[1:], strict=False)
    }
    assert found.programs == len(distinct)
    assert found.factor == pytest.approx(3)
    assert found.error == pytest.approx(0)
    assert copied_errors(target, table, least=len(distinct) + 1) == {}
    other = table.take(np.arange(len(table)))
    object.__setattr__(other, "task", np.char.add(table.task, "'"))
    assert copied_errors(target, other, least=1) == {}  # equal leaves of another task


def test_transfer_command_fits_once_for_all_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreplan.cost_models.programs import program_transfer

    rows = [
        record(number, device=f"cpu:threads=1,isa={isa}", chip=chip)
        for number in range(64)
        for isa, chip in (("avx2", "A"), ("avx512", "A"), ("avx2", "B"))
    ]
    write_records(rows, tmp_path / "programs-000.parquet")
    fitted: list[tuple[ProgramTable, dict[str, Any]]] = []
    fit = program_transfer.ProgramPredictor.fit

    def noted(model: Any, table: ProgramTable) -> Any:
        fitted.append((table, model.get_params()))
        return fit(model.set_params(rounds=4), table)

    monkeypatch.setattr(program_transfer.ProgramPredictor, "fit", noted)
    targets = ["A/cpu:threads=1,isa=avx2", "A/cpu:threads=1,isa=avx512"]
    command = ["--data", str(tmp_path), "--counts", "2", "--draws", "1", "--target"]
    program_transfer.main([*command, *targets])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["target"] for line in lines] == targets
    assert all({"copied", "untuned", "kmeans", "random"} <= set(line) for line in lines)
    (table, settings), *more = fitted
    assert not more
    assert set(table.chips) == {"B"}
    assert settings["groups"] == 0  # no interval is asked for, so nothing is fitted for it
    with pytest.raises(SpecError, match="--target"):
        program_transfer.main([*command, "avx2"])  # of which chip?
    with pytest.raises(SpecError, match="--folds"):
        program_transfer.main([*command, *targets, "--folds", "6"])


def test_replay_of_a_search() -> None:
    generator = np.random.default_rng(0)
    latency = generator.uniform(1, 2, 40)
    task = np.repeat(["a", "b"], 20)
    perfect = search_curve(latency, latency, task, [1, 3])
    np.testing.assert_allclose(perfect["model"], 1)
    drawn = [
        np.mean([latency[task == t][generator.permutation(20)[:3]].min() / latency[task == t].min()
                 for t in "ab"])
        for _ in range(4000)
    ]  # fmt: skip
    assert perfect["random"][1] == pytest.approx(np.mean(drawn), rel=0.01)  # type: ignore[index]
    worst = search_curve(-latency, latency, task, [1, 20])
    assert worst["model"][0] > perfect["random"][0]  # type: ignore[index]
    np.testing.assert_allclose(worst["random"][1], 1)  # type: ignore[index]


def test_tasks_are_chosen_from_different_clusters() -> None:
    centres = np.array([[0, 0], [9, 0], [0, 9]], dtype=np.float32)
    task = np.array([f"{c}{n}" for c in range(3) for n in range(4)])
    noise = np.random.default_rng(0).normal(0, 0.1, (12, 2)).astype(np.float32)
    chosen = choose_tasks(np.repeat(centres, 4, 0) + noise, task, 3)
    assert {name[0] for name in chosen} == {"0", "1", "2"}
    assert len(set(choose_tasks(np.zeros((12, 2), np.float32), task, 1))) == 1
    with pytest.raises(SpecError):
        choose_tasks(np.zeros((12, 2), np.float32), task, 13)


def test_gpu_counts_of_a_kernel() -> None:
    """Lanes, requests and reuse of the example with thread bindings, from the encoder."""
    names = [json.loads(line)["name"] for line in _LINES]
    ast: CompactAst = CompactAstEncoder().encode(_MODULES[names.index("cuda")])
    found = {
        name: 2 ** ast.leaves[:, FEATURE_NAMES.index(f"gpu.{name}")] - 1
        for name in ("warps", "sectors", "requests")
    }
    assert np.all(found["warps"] >= 1)
    # A request of a warp is at least one sector and at most one for each lane.
    total = found["sectors"].sum()
    assert found["requests"].sum() * 32 >= total > 0
    table = ProgramTable.from_asts([ast], device_zoo.device("h200"))
    estimate = program_estimate(table)
    assert np.all(estimate.parts >= 0)
    assert estimate.parts[0, PART_NAMES.index("gpu.l1")] > 0
    assert not estimate.parts[0, [n.startswith("cpu.") for n in PART_NAMES]].any()
    faster = device_zoo.device("h200").model_copy(update={"clock_hz": 2 * 1.98e9})
    quick = program_estimate(ProgramTable.from_asts([ast], faster))
    at = PART_NAMES.index("gpu.l1")
    assert quick.parts[0, at] == pytest.approx(estimate.parts[0, at] / 2)


def test_every_family_goes_to_one_group() -> None:
    pairs = list(itertools.product(range(8), range(5)))
    asts = [CompactAstEncoder().encode(_MODULES[0])] * len(pairs)
    table = ProgramTable.from_asts(
        asts, device_zoo.device("t4"), task=[f"{f}/{n}" for f, n in pairs],
        family=[f"f{f}" for f, _ in pairs],
    )  # fmt: skip
    groups = validation_groups(table, 4)
    assert np.bincount(groups).tolist() == [10, 10, 10, 10]
    assert all(len(set(groups[table.family == f"f{f}"])) == 1 for f in range(8))


def test_shipped_weights_fit_their_features_and_the_folder(folder: Path) -> None:
    from foreplan.cost_models.model_store import model_folder, read_card

    where = model_folder("pretrained:programs")
    assert (where / "weights.safetensors").stat().st_size <= 16 << 20
    assert read_card(where)["kind"] == "programs"
    found: dict[str, Any] = evaluate_file("pretrained:programs", folder, "foreplan")
    assert found["overall"]["count"] == 64
    assert 0 <= found["interval_90"]["coverage"] <= 1
