from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.measurement import Measurement
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.datasets.timing.profile_grid import ProfileGrid
from foreplan.datasets.timing.profile_journal import ProfileJournal
from foreplan.datasets.timing.profiling import Progress, measure_profile
from foreplan.errors import SpecError

DEVICE = DeviceName.parse("cpu:threads=1")
EFFORT = Effort(min_s=0.0, min_samples=3, max_s=0.05)
ADD = Variant("bf16", "bf16", "torch.add")
PROGRAMS = [program("add", ADD, rows=rows, cols=64) for rows in (1, 2, 4, 8)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _row(item: Program, median: float = 1e-3) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="ok",
        low_s=median * 0.9, median_s=median, high_s=median * 1.1, samples=9,
    )  # fmt: skip


def _document(**changes: Any) -> dict[str, Any]:
    device = {"name": "cpu", "chip": "c", "vendor": "v", "kind": "cpu"}
    rows = [_row(p).model_dump(exclude_none=True) for p in PROGRAMS]
    software = {"torch": "2.13"}
    return {
        "schema": "foreplan.profile/1", "device": device, "software": software, "rows": rows,
        **changes,
    }  # fmt: skip


def _write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


class FiguresOnce(Worker):
    """Measures the device, which takes seconds, once and not before each round."""

    @functools.cached_property
    def _first(self) -> dict[str, float]:
        return super().figures()

    def figures(self, timeout_s: float = 120.0) -> dict[str, float]:
        return self._first


def test_measure_write_read_and_do_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    seen: list[Progress] = []
    failing = Program("add", (3, 3), Variant("bf16", "bf16", "torch.none"))
    with FiguresOnce(DEVICE) as worker:
        profile = measure_profile(
            DEVICE, [*PROGRAMS, failing], path, effort=EFFORT, on_progress=seen.append,
            worker=worker,
        )  # fmt: skip
    assert seen[-1].done == seen[-1].total == 10
    assert Profile.load(path) == profile
    assert profile.device.name == str(DEVICE)
    assert profile.device.memory_bandwidth
    assert profile.device.launch_overhead_s
    assert profile.device.peak("fp32")
    assert profile.device.reread_bandwidth
    assert profile.device.reread_bandwidth[0][0] == 1 << 18
    assert profile.device.reread_bandwidth[-1][0] >= 1 << 26
    assert profile.device.sources["reread_bandwidth"] == "measured"
    assert len(profile.cores) == 1
    assert profile.software["torch"]
    for item in PROGRAMS:
        row = profile.by_program[item]
        assert row.median_s is not None
        assert row.rounds == 2
        assert row.samples >= 6
    failed = profile.by_program[failing]
    assert failed.status == "failed"
    assert failed.median_s is None
    assert profile.usable("add") == [ADD]
    assert list(tmp_path.iterdir()) == [path]

    more = program("add", ADD, rows=16, cols=64)
    seen.clear()
    again = measure_profile(DEVICE, [*PROGRAMS, more], path, effort=EFFORT, on_progress=seen.append)
    assert [p.program for p in seen if p.program] == [more, more]
    assert again.by_program[PROGRAMS[0]] == profile.by_program[PROGRAMS[0]]
    assert again.by_program[failing] == failed
    assert again.device == profile.device

    seen.clear()
    measure_profile(DEVICE, [*PROGRAMS, failing], path, effort=EFFORT, on_progress=seen.append)
    assert [p.program for p in seen if p.program] == [failing, failing]  # something may be mended


def test_figures_are_the_median_of_the_time_in_which_programs_are_measured(tmp_path: Path) -> None:
    """A machine that is slow while half of the programs are timed is not described by its best."""
    takes = iter((1.0, 9.0, 2.0))
    calls: list[str] = []

    class Changing(Worker):
        def figures(self) -> dict[str, float]:
            calls.append("figures")
            value = next(takes)
            return {"memory_bandwidth": value * 1e9, "launch_overhead_s": value * 1e-6}

    def tell(progress: Progress) -> None:
        if progress.program:
            calls.append("program")

    with Changing(DEVICE) as worker:
        profile = measure_profile(
            DEVICE, PROGRAMS, tmp_path / "cpu.json", effort=EFFORT, worker=worker, on_progress=tell
        )
    count = ["program"] * len(PROGRAMS)
    assert calls == ["figures", *count, "figures", *count, "figures"]
    assert profile.device.memory_bandwidth == 2e9
    assert profile.device.launch_overhead_s == 2e-6


def test_killed_and_run_again_it_measures_only_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    code = (
        "import sys\n"
        "from foreplan.datasets.device_name import DeviceName\n"
        "from foreplan.datasets.timing.measuring import Effort, Worker\n"
        "from foreplan.datasets.timing.profiling import measure_profile\n"
        "from foreplan.datasets.program import Variant, program\n"
        "class Known(Worker):\n"
        "    def figures(self):\n"
        "        print(0, flush=True)\n"
        "        return {'memory_bandwidth': 1e10, 'launch_overhead_s': 1e-6}\n"
        "add = Variant('bf16', 'bf16', 'torch.add')\n"
        "programs = [program('add', add, rows=r, cols=64) for r in range(1, 21)]\n"
        "def tell(p):\n"
        "    if p.program: print(p.program.dims['rows'], flush=True)\n"
        "effort = Effort(min_s=0.02, min_samples=3, max_s=0.05)\n"
        "with Known(DeviceName.parse('cpu:threads=1')) as worker:\n"
        "    measure_profile(worker.device, programs, sys.argv[1], effort=effort,\n"
        "                    worker=worker, on_progress=tell)\n"
    )
    measured: list[int] = []
    for attempt in range(3):
        run = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], env=ENVIRONMENT, stdout=subprocess.PIPE
        )
        assert run.stdout is not None
        for count, line in enumerate(run.stdout, 1):
            measured.append(int(line))
            if attempt < 2 and count == 4 + attempt:
                time.sleep(random.Random(attempt).uniform(0, 0.02))
                run.send_signal(signal.SIGKILL)
                break
        measured += [int(line) for line in run.stdout]
        run.stdout.close()
        run.wait()
    assert run.returncode == 0
    # A kill between the journal and the message loses the message, never a measurement.
    assert all(measured.count(rows) <= 2 for rows in range(1, 21))
    assert measured.count(0) == 3, "the device: before each round and at the end, by whichever run"
    assert 40 - 2 <= len(measured) - 3 <= 40
    assert len(Profile.load(path).rows) == 20
    assert list(tmp_path.iterdir()) == [path]


def test_the_journal_survives_kills_at_random_moments(tmp_path: Path) -> None:
    path = tmp_path / "j"
    code = (
        "import sys\n"
        "from foreplan.datasets.timing.measurement import Measurement\n"
        "from foreplan.datasets.timing.profile_journal import ProfileJournal\n"
        "from foreplan.datasets.program import Variant, program\n"
        "add = Variant('bf16', 'bf16', 'torch.add')\n"
        "with ProfileJournal(sys.argv[1]) as journal:\n"
        "    assert journal.resume({'device': 'x'}) is None\n"
        "    print(len(journal.parts), flush=True)\n"
        "    for i in range(1, 100000):\n"
        "        item = program('add', add, rows=i, cols=1)\n"
        "        if (item, 0) not in journal.parts:\n"
        "            journal.add(item, 0, Measurement((float(i),), 1))\n"
        "            print(i, flush=True)\n"
    )
    confirmed: set[int] = set()
    dice = random.Random(0)
    for _ in range(8):
        run = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], env=ENVIRONMENT, stdout=subprocess.PIPE
        )
        assert run.stdout is not None
        resumed = int(run.stdout.readline())
        assert resumed >= len(confirmed)
        time.sleep(dice.uniform(0.0, 0.05))
        run.send_signal(signal.SIGKILL)
        new = [int(line) for line in run.stdout.read().split()]
        run.stdout.close()
        run.wait()
        assert not confirmed & set(new), "measured twice"
        confirmed |= set(new)
    with ProfileJournal(path) as journal:
        journal.resume({"device": "x"})
        assert {p.dims["rows"] for p, _ in journal.parts} >= confirmed
        assert all(r.times_s == (float(p.dims["rows"]),) for (p, _), r in journal.parts.items())


@pytest.mark.parametrize("torn", [b'{"op": "ad', b"\x00\x00\xff", b"[1]\n", b'"x"'])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "j"
    with ProfileJournal(path) as journal:
        journal.resume({"device": "x"})
        journal.add(PROGRAMS[0], 0, Measurement((1.0,), 1))
        journal.add_figures({"launch_overhead_s": 1e-6})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with ProfileJournal(path) as journal:
        assert journal.resume({"device": "x"}) is None
        assert set(journal.parts) == {(PROGRAMS[0], 0)}
        assert journal.figures == {"launch_overhead_s": 1e-6}
        journal.add(PROGRAMS[1], 0, Measurement((2.0,), 1))
    with ProfileJournal(path) as journal:
        journal.resume({"device": "x"})
        assert set(journal.parts) == {(PROGRAMS[0], 0), (PROGRAMS[1], 0)}


def test_other_software_begins_anew_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with ProfileJournal(path) as journal:
        journal.resume({"device": "x", "software": {"torch": "2.11"}})
        journal.add(PROGRAMS[0], 0, Measurement((1.0,), 1))
    with ProfileJournal(path) as journal:
        message = journal.resume({"device": "x", "software": {"torch": "2.13"}})
        assert message is not None
        assert "torch was '2.11' and is '2.13'" in message
        assert not journal.parts
    path.write_text("nonsense\n")
    with ProfileJournal(path) as journal:
        assert journal.resume({"device": "x"}) is None


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with (
        ProfileJournal(path) as journal,
        pytest.raises(SpecError, match="another process"),
        ProfileJournal(path),
    ):
        pass
    journal.remove()
    with ProfileJournal(path):
        pass
    with pytest.raises(SpecError, match="written"), ProfileJournal(tmp_path / "no" / "j"):
        pass


def test_document_round_trips_in_the_same_bytes(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.json", _document())
    profile = Profile.load(path)
    profile.save(path)
    first = path.read_bytes()
    Profile.load(path).save(path)
    assert path.read_bytes() == first
    assert profile.by_program[PROGRAMS[1]].median_s == 1e-3
    assert str(profile.name) == "cpu"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"schema": "foreplan.profile/9"}, "foreplan profile"),
        ({"colour": 1}, "colour"),
        ({"rows": [{"op": "add"}]}, r"rows\[0\]"),
        ({"rows": [{**_row(PROGRAMS[0]).model_dump(exclude_none=True), "median_s": -1.0}]}, "med"),
        ({"rows": [{**_row(PROGRAMS[0]).model_dump(exclude_none=True), "low_s": 5.0}]}, "order"),
        (
            {"rows": [{**_row(PROGRAMS[0]).model_dump(exclude_none=True), "high_s": 1e300}]},
            "of 1e-10 to 1e",
        ),
        ({"rows": [{**_row(PROGRAMS[0]).model_dump(exclude_none=True), "variant": "x"}]}, "STOR"),
        ({"rows": [{**_row(PROGRAMS[0]).model_dump(exclude_none=True), "dims": {"a": 1}}]}, "dims"),
        ({"rows": [_row(PROGRAMS[0]).model_dump(exclude_none=True)] * 2}, "twice"),
    ],
)
def test_wrong_documents_are_one_clear_line(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    path = _write(tmp_path / "p.json", _document(**changes))
    with pytest.raises(SpecError, match=match) as caught:
        Profile.load(path)
    assert "\n" not in str(caught.value)


def test_grid_keeps_programs_of_one_weight_together() -> None:
    grid = ProfileGrid.generic("cpu")
    assert len(grid) == len(set(grid))
    weights = [(p.sizes[1:], p.variant.storage) for p in grid if p.op == "linear"]
    changes = sum(a != b for a, b in itertools.pairwise(weights))
    assert changes < 45
    exact = ProfileGrid.exact([PROGRAMS[2], PROGRAMS[0], PROGRAMS[2]])
    assert list(exact) == [PROGRAMS[0], PROGRAMS[2]]
    assert len(exact.with_programs([PROGRAMS[1]])) == 3
    assert all(p.variant.compute != "fp8" for p in grid)
    assert any(p.variant.compute == "fp8" for p in ProfileGrid.generic("cuda"))
    with pytest.raises(SpecError, match="tpu"):
        ProfileGrid.generic("tpu")
