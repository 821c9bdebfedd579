"""Every writing command killed, failed and out of space at every act; see `write_paths`."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from tests.robustness.plan_readers import plan_text
from tests.robustness.write_path_cases import cases
from typer.testing import CliRunner

from foreplan.cli import app
from foreplan.datasets.storage import exclusive
from foreplan.datasets.tir.build_dataset import TASKS_FILE
from foreplan.errors import SpecError


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the fault counter")
def test_nothing_is_lost_whenever_writing_ends() -> None:
    # Every tenth act here; all of them in docs/results/robustness.md.
    command = [sys.executable, "-m", "tests.robustness.write_paths", "--every", "10"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [entry["path"] for entry in told] == list(cases())
    assert all(entry["killed"] and entry["EIO"] and entry["disk full"] for entry in told)


def _hold(path: Path, held: Event, end: Event) -> None:
    with exclusive(path):
        held.set()
        end.wait(60)


def test_a_second_process_is_refused_in_one_line(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "out.json", held, end))
    process.start()
    try:
        assert held.wait(60)
        with (
            pytest.raises(SpecError, match="another process writes"),
            exclusive(tmp_path / "out.json"),
        ):
            pass
    finally:
        end.set()
        process.join(60)
    with exclusive(tmp_path / "out.json"):  # and then it is free
        assert (tmp_path / ".out.json.lock").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["verify", "{plan}", "-o", "{out}/v.json"], "v.json"),
        (["profile", "cpu:threads=1", "--quick", "-o", "{out}"], "cluster.yaml"),
        (["quality", "tiny-llama-random", "-o", "{out}/quality.json"], "quality.json"),
        (["dataset", "build", "--network", "mlp", "--extract-only", "-o", "{out}"], TASKS_FILE),
    ],
)
def test_commands_refuse_what_another_process_writes(
    command: list[str], written: str, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(plan_text("serving"))
    out = tmp_path / "out"
    out.mkdir()
    words = [word.format(plan=tmp_path / "plan.json", out=out) for word in command]
    with exclusive(out / written):  # a lock of another process is refused no differently
        refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, SpecError), refused.output
    assert "another process writes" in str(refused.exception)
    assert written in str(refused.exception)
    assert not list(out.iterdir())


def test_a_lock_of_a_dead_process_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / ".out.json.lock").touch()
    with exclusive(tmp_path / "out.json"):
        pass
