"""tir-jsonl files, plain and compressed, as written by others and by us."""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreplan.datasets.tir.records import (
    ProgramRecord,
    merge_shards,
    read_records,
    write_records,
)
from foreplan.datasets.tir.task import Task, merge, program_key
from foreplan.datasets.tir.tir_jsonl import (
    read_tasks,
    read_tir_jsonl,
    write_tasks,
    write_tir_jsonl,
)
from foreplan.errors import MissingDataError, SpecError

ROW = {
    "mod": base64.b64encode(zlib.compress(b'{"root_index": 0}')).decode(),
    "median_s": 2e-3,
    "min_s": 1e-3,
    "max_s": 4e-3,
}
LINE = {"key": "ab", "name": "matmul", "nets": [["bert", 3], ["gpt", 1]], "rows": [ROW, ROW]}
RECORD = ProgramRecord(
    task_key="ab", task_name="matmul", program_key="p0", networks=("bert", "gpt"), calls=(3, 1),
    families=("bert", "gpt2"), device="cpu:threads=1,isa=avx2", chip="epyc", target="{}", seed=7,
    module='{"root_index": 0}', trace="[]", status="ok", error="", median_s=2e-3, min_s=1e-3,
    max_s=4e-3, spread=1.5, repetitions=9, calls_per_repetition=4, load=0.5, clock_hz=2.6e9,
    tvm="0.27", ffi="0.1.14", measured_at=1.0,
)  # fmt: skip


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl{}"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_reads_what_others_wrote(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / name.format(suffix)
    text = (json.dumps(LINE) + "\n\n").encode()
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path.write_bytes(pack(text))
    (line,) = read_tir_jsonl(path)
    assert (line.key, line.name, line.nets) == ("ab", "matmul", (("bert", 3), ("gpt", 1)))
    assert [row.module for row in line.rows] == [b'{"root_index": 0}'] * 2
    assert line.rows[0].median_s == 2e-3


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"key": 3}, r":1\.key"),
        ({"nets": [["a"]]}, r":1\.nets"),
        ({"rows": {}}, r":1\.rows"),
        ({"rows": [ROW, {**ROW, "median_s": -1}]}, r"rows\[1\]\.median_s"),
        ({"rows": [{**ROW, "min_s": 1e-300}]}, r"rows\[0\]\.min_s.*of 1e-10 to"),
        ({"rows": [{**ROW, "min_s": 1e3}]}, r"rows\[0\].*min_s <= median_s <= max_s"),
        ({"rows": [{**ROW, "max_s": "fast"}]}, r"rows\[0\]\.max_s"),
        ({"rows": [{**ROW, "mod": None}]}, r"rows\[0\]\.mod"),
    ],
)
def test_says_where_a_line_is_wrong(tmp_path: Path, change: dict[str, Any], place: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**LINE, **change}) + "\n")
    with pytest.raises(SpecError, match=place):
        list(read_tir_jsonl(path))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.xz"
    path.write_bytes(lzma.compress((json.dumps(LINE) + "\n").encode() * 50)[:-20])
    with pytest.raises(SpecError, match="line of JSON"):
        list(read_tir_jsonl(path))
    plain = tmp_path / "data.jsonl"
    plain.write_text(json.dumps(LINE) + "\n{oops\n")
    with pytest.raises(SpecError, match=":2"):
        list(read_tir_jsonl(plain))
    with pytest.raises(MissingDataError):
        list(read_tir_jsonl(tmp_path / "none.jsonl"))
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({**LINE, "rows": [{**ROW, "mod": "!!"}]}) + "\n")
    (line,) = read_tir_jsonl(odd)
    with pytest.raises(SpecError, match="base64 of zlib"):
        _ = line.rows[0].module


def test_records_go_to_parquet_and_back(tmp_path: Path) -> None:
    failed = replace(RECORD, seed=-1, module="", status="fault", median_s=math.nan)
    write_records([RECORD, failed], tmp_path / "a.parquet")
    write_records([replace(RECORD, task_key="aa")], tmp_path / "b.parquet")
    found = list(read_records(tmp_path))
    assert found[0] == RECORD
    assert found[1].status == "fault"
    summary = merge_shards(tmp_path, tmp_path / "merged", files=2)
    assert summary["by_status"] == {"ok": 2, "fault": 1}
    assert [r.task_key for r in read_records(tmp_path / "merged")] == ["aa", "ab", "ab"]


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(SpecError, match="a Parquet file"):
        list(read_records(tmp_path))
    with pytest.raises(MissingDataError, match="no such dataset"):
        list(read_records(tmp_path / "none"))


def test_records_go_to_tir_jsonl(tmp_path: Path) -> None:
    failed = replace(RECORD, status="fault", median_s=math.nan)
    path = tmp_path / "data.jsonl.gz"
    assert write_tir_jsonl([RECORD, failed, RECORD], path) == 2
    (line,) = read_tir_jsonl(path)
    assert line.nets == (("bert", 3), ("gpt", 1))
    assert line.rows[1].module == RECORD.module.encode()
    with pytest.raises(SpecError, match="one device"):
        write_tir_jsonl([RECORD, replace(RECORD, device="cuda:0")], path)


def test_tasks_go_to_a_file_and_back_and_merge(tmp_path: Path) -> None:
    one = Task("k", "a", "{}", {"bert/x": 2}, frozenset({"bert"}))
    two = Task("k", "b", "{}", {"vit/y": 5}, frozenset({"vit"}))
    (merged,) = merge([one, two, one])
    assert merged.calls == {"bert/x": 2, "vit/y": 5}
    write_tasks([merged], tmp_path / "t.jsonl.xz")
    assert read_tasks(tmp_path / "t.jsonl.xz") == [merged]
    assert len(program_key("{}")) == 16
