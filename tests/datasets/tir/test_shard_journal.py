"""A killed run goes on: what is noted is on the disk, and a torn line is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.datasets.tir.test_tir_jsonl import RECORD

from foreplan.datasets.tir.records import read_records
from foreplan.datasets.tir.shard_journal import ShardJournal
from foreplan.datasets.tir.target import TargetDevice
from foreplan.errors import SpecError

DEVICE = TargetDevice("cpu:threads=1", "llvm", 0, "epyc", {"kind": "llvm"})
MINE = replace(RECORD, target=DEVICE.target)


def test_a_run_goes_on_by_what_was_written(tmp_path: Path) -> None:
    journal = ShardJournal(tmp_path, DEVICE)
    assert (journal.done, journal.timed) == (frozenset(), frozenset())
    journal.keep(MINE)
    journal.keep(replace(MINE, program_key="p1", chip="xeon"))
    journal.keep(replace(MINE, program_key="", status="no_sample"))
    journal.finish("ab/0")
    assert not any(tmp_path.rglob("*.parquet"))  # in memory still
    journal.flush()
    jobs = journal.shards / "jobs.txt"
    jobs.write_text(jobs.read_text() + "ab/1 was torn")
    again = ShardJournal(tmp_path, DEVICE)
    assert again.done == {"ab/0"}
    assert jobs.read_text() == "ab/0\n"
    # Known is what any device ran; timed what this one did.
    assert again.known("ab") == ["", "p0", "p1"]
    assert again.timed == {"", "p0"}
    assert again.counts() == {}
    assert journal.counts() == {"no_sample": 1, "ok": 2}


def test_records_are_written_before_their_job_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreplan.datasets.tir.shard_journal._SHARD_ROWS", 1)
    journal = ShardJournal(tmp_path, DEVICE)
    jobs = journal.shards / "jobs.txt"
    jobs.mkdir()
    journal.keep(MINE)
    with pytest.raises(SpecError, match=r"jobs\.txt"):
        journal.finish("ab/0")
    assert [record.program_key for record in read_records(journal.shards)] == ["p0"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("")
    with pytest.raises(SpecError, match="a folder to make"):
        ShardJournal(tmp_path, DEVICE)
