"""A folder that another machine was profiled into is measured over where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Variant, program
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.datasets.timing.profile_journal import ProfileJournal
from foreplan.datasets.timing.profiling import Progress, measure_profile
from foreplan.errors import SpecError

DEVICE = DeviceName.parse("cpu:threads=1")
EFFORT = Effort(min_s=0.0, min_samples=3, max_s=0.05)
ADD = program("add", Variant("bf16", "bf16", "torch.add"), rows=1, cols=64)


class QuickFigures(Worker):
    """Says at once how fast the device is."""

    def figures(self, timeout_s: float = 120.0) -> dict[str, float]:
        return {"peak_flops.fp32": 1e11, "memory_bandwidth": 1e10, "launch_overhead_s": 1e-6}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with QuickFigures(DEVICE) as found:
        yield found


def _measure(path: Path, worker: Worker, **how: bool) -> tuple[Profile, list[str]]:
    said: list[Progress] = []
    found = measure_profile(
        DEVICE, [ADD], path, rounds=1, effort=EFFORT, worker=worker, on_progress=said.append, **how
    )
    return found, [each.message for each in said if each.message]


def test_another_machines_profile_is_kept_unless_it_is_to_be_replaced(
    tmp_path: Path, worker: Worker
) -> None:
    path = tmp_path / "cpu-threads-1.json"
    mine, _ = _measure(path, worker)
    document = json.loads(path.read_text())
    document["device"]["chip"] = "some other chip"
    path.write_text(json.dumps(document))
    theirs = path.read_bytes()
    with pytest.raises(SpecError, match=r"another machine \(some other chip\).*; .*--replace"):
        _measure(path, worker)
    assert path.read_bytes() == theirs
    assert list(tmp_path.iterdir()) == [path]
    found, said = _measure(path, worker, replace=True)
    assert found.device.chip == mine.device.chip
    assert said == [f"{path.name}: replaced, it was of another machine (some other chip)"]


def test_what_is_no_profile_is_kept_too(tmp_path: Path, worker: Worker) -> None:
    path = tmp_path / "cpu-threads-1.json"
    path.write_text('{"dear": "diary"}')
    with pytest.raises(SpecError, match=r"schema: got nothing.*--replace"):
        _measure(path, worker)
    assert path.read_text() == '{"dear": "diary"}'
    _, said = _measure(path, worker, replace=True)
    assert "replaced" in said[0]


def test_so_is_what_another_machine_has_half_measured(tmp_path: Path, worker: Worker) -> None:
    path = tmp_path / "cpu-threads-1.json"
    journal = tmp_path / f"{path.name}.journal"
    with ProfileJournal(journal) as theirs:
        theirs.resume({"device": str(DEVICE), "chip": "some other chip"})
        theirs.add_figures({"launch_overhead_s": 1.0})
    kept = journal.read_bytes()
    with pytest.raises(SpecError, match=r"json\.journal: got measurements of another machine"):
        _measure(path, worker)
    assert journal.read_bytes() == kept
    _, said = _measure(path, worker, replace=True)
    assert "begun anew" in said[0]
    assert not journal.exists()
