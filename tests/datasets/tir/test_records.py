"""Shards of measured programs that somebody else wrote, or damaged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from foreplan.datasets.tir.records import SCHEMA, ProgramRecord, read_records, write_records
from foreplan.errors import MissingDataError, SpecError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

RECORD = ProgramRecord(
    task_key="t", task_name="x", program_key="p", networks=("n",), calls=(1,), families=(),
    device="cuda:0", chip="NVIDIA H200", target="{}", seed=0, module="{}", trace="", status="ok",
    error="", median_s=1e-5, min_s=1e-5, max_s=2e-5, spread=1.0, repetitions=2,
    calls_per_repetition=1, load=0.0, clock_hz=math.nan, tvm="", ffi="", measured_at=0.0,
)  # fmt: skip


def changed(path: Path, column: str, values: Any) -> None:
    """Two records with a column of other values, or without it."""
    write_records([RECORD, RECORD], path)
    table = pq.read_table(path)
    metadata = table.schema.metadata
    place = table.column_names.index(column)
    table = table.remove_column(place)
    if values is not None:
        table = table.add_column(place, column, pa.array(values))
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    changed(path, "task_name", ["x", "x"])  # as another writer has it, without a dictionary
    assert [repr(record) for record in read_records(path)] == [repr(RECORD)] * 2


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("clock_hz", None, rf"columns: got \['clock_hz'\], expected those of {SCHEMA}"),
        ("median_s", ["fast", "slow"], "column median_s: got 'string', expected double"),
        ("median_s", [1e-5, None], "column median_s: got nothing, expected a value in every row"),
        ("median_s", [1e-5, -1.0], r"column median_s: got -1\.0, expected a latency of 1e-10"),
        ("median_s", [math.inf, 1.0], "column median_s: got inf, expected a latency of 1e-10"),
        ("networks", [["n"], None], "column networks: got nothing"),
        ("networks", [["n"], [None]], "column networks: got nothing"),
        ("module", ["{}", None], "column module: got nothing"),
    ],
)
def test_a_damaged_shard_is_named(tmp_path: Path, column: str, values: Any, message: str) -> None:
    path = tmp_path / "a.parquet"
    changed(path, column, values)
    with pytest.raises(SpecError, match=f"a.parquet: {message}"):
        list(read_records(tmp_path))


def test_a_build_that_was_interrupted_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_records([RECORD], tmp_path / "shards" / "a.parquet")
    with pytest.raises(MissingDataError, match=f"{tmp_path} holds a build that was interrupted"):
        list(read_records(tmp_path))
