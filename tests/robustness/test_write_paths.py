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
from tests.robustness.write_path_cases import cases

from foreplan.datasets.storage import exclusive
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


def test_a_lock_of_a_dead_process_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / ".out.json.lock").touch()
    with exclusive(tmp_path / "out.json"):
        pass
