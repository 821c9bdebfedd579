"""Programs in a file: they come back as they were, and other files are refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.programs.baselines.released_table import ENCODER
from foreplan.cost_models.programs.baselines.released_table import main as write_released
from foreplan.cost_models.programs.compact_ast import TOTAL_NAMES, CompactAst
from foreplan.cost_models.programs.program_crossval import main as crossval
from foreplan.cost_models.programs.program_store import read_table, write_table
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets import device_zoo
from foreplan.errors import MissingDataError, SpecError


def _table() -> ProgramTable:
    generator = np.random.default_rng(0)
    tables = []
    for name in ("h200", "a100-sxm-40gb"):
        asts = [
            CompactAst(generator.random((count, 164), np.float32),
                       np.arange(1, count + 1, dtype=np.int32), np.full(count, 2, np.int32),
                       generator.random(len(TOTAL_NAMES)))
            for count in (1, 2, 1, 2, 1, 2, 1, 2)
        ]  # fmt: skip
        tables.append(ProgramTable.from_asts(
            asts, device_zoo.device(name), latency_s=(1e-5 + generator.random(8)).tolist(),
            task=[f"t{k // 4}" for k in range(8)], family=[f"f{k // 4}" for k in range(8)],
            network=["ä+b"] * 8,
        ))  # fmt: skip
    return ProgramTable.join(tables)


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    table, path = _table(), tmp_path / "programs.npz"
    write_table(table, path, "some")
    found = read_table(path, "some")
    for field in fields(ProgramTable):
        one, two = (getattr(item, field.name) for item in (table, found))
        if field.name == "devices":
            assert one == two
        else:
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one, two)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "programs.npz"
    write_table(_table(), path, "some")
    with pytest.raises(SpecError, match="some"):
        read_table(path, "other")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    for broken in (path, tmp_path / "none", tmp_path):
        with pytest.raises(SpecError, match=broken.name):
            read_table(broken, "some")
    np.savez(path, document=np.array("1"))
    with pytest.raises(SpecError, match=r"programs\.npz"):
        read_table(path, "some")


def test_folds_are_fitted_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "programs.npz", tmp_path / "out"
    write_table(_table(), path, ENCODER)
    command = ["--table", str(path), "-o", str(output), "--seeds", "0", "--models"]
    with pytest.raises(SpecError, match="--models"):
        crossval([*command, "trees"])
    assert not output.exists()
    crossval([*command, "cdmpp", "--epochs", "1", "--folds", "f1", "--only", "h200"])
    facts = json.loads((output / "family__f1__cdmpp__0.json").read_text())
    assert facts["train_rows"] == 4
    assert np.load(output / "family__f1__cdmpp__0.npz")["rows"].tolist() == [4, 5, 6, 7]
    assert "## family: h200" in capsys.readouterr().out


def test_what_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises((MissingDataError, SpecError)):
        write_released(["--data", str(tmp_path / "none"), "-o", str(tmp_path / "programs.npz")])
    assert not (tmp_path / "programs.npz").exists()
