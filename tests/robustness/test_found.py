"""What fuzzing, faults and reading found, one case each; docs/results/robustness.md lists them."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.robustness.guard import bounded, outcome
from tests.robustness.measurement_readers import NEUSIGHT
from tests.robustness.plan_readers import plan_text
from tests.robustness.readers import readers
from tests.robustness.spoken import TOKEN
from typer.testing import CliRunner

from foreplan.cli import app
from foreplan.cost_models.programs.compact_ast import CompactAstEncoder
from foreplan.cost_models.schedule import MOST_ACTIONS
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.importers import read_operators
from foreplan.datasets.specs import load_document, validate
from foreplan.datasets.timing.profile_journal import SCHEMA, ProfileJournal
from foreplan.datasets.tir.records import SCHEMA as SHARD_SCHEMA
from foreplan.datasets.tir.records import read_records
from foreplan.datasets.tir.task import decode_module
from foreplan.errors import ForeplanError, SpecError
from foreplan.planner.bubbles.actions import parse_order
from foreplan.planner.bubbles.execution.order_csv import read_orders
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.export.exporter import export_plan
from foreplan.planner.plan import Plan
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.verify.answers import device_of
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.wire import WireGarbled, parse_endpoint

READERS = readers()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", '{"a": ' + "9" * 5000 + "}"),  # ValueError of int()
        ("x.yaml", "a: " + "9" * 5000),
        ("x.json", '{"a": ' + "[" * 300 + "]" * 300 + "}"),  # PydanticSerializationError
        ("x.yaml", "a: &a [*a]"),  # a list that holds itself
        ("x.yaml", "a0: &a0 [0]\n" + "".join(
            f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)
        )),  # 3^39 values
        ("x.json", '{"a": [' + "{}," * (1 << 20) + "{}]}"),  # gigabytes of errors
        ("x.json", '{"a": "' + "x" * (17 << 20) + '"}'),
    ],
    ids=["digits", "digits-yaml", "deep", "cycle", "laughs", "values", "long"],
)  # fmt: skip
def test_documents_beyond_what_is_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert outcome(lambda: load_document(tmp_path / name))


def test_a_document_without_end() -> None:
    assert "more than" in str(outcome(lambda: load_document("/dev/zero")))


def test_half_a_character() -> None:
    assert outcome(lambda: validate(BubblesWorkload, {"a": "\ud800"}, "w"))


def test_a_hundred_thousand_errors_are_one_line() -> None:
    data = {"encoders": [{}] * 100_000, "sequence_length": 1, "microbatches": 1}
    assert outcome(lambda: validate(BubblesWorkload, data, "w"))


def test_messages_are_short_and_plain() -> None:
    line = str(ForeplanError("a\x1b[2J\n\ud800" + "x" * 10_000))
    assert line.startswith("a\\x1b[2J \\ud800x")
    assert len(line) < 2000


@pytest.mark.parametrize("value", [4, None, {"x": 1}])
def test_precisions_of_another_type(value: object) -> None:
    with pytest.raises(SpecError, match="precisions"):
        validate(PrecisionWorkload, {"batch": 1, "precisions": value}, "w")


@pytest.mark.parametrize("order", ["e0.0-999999999999F0", "1F" + "9" * 5000, "e0.0-4000F0 " * 300])
def test_orders_of_any_length(order: str) -> None:
    with bounded(), pytest.raises(SpecError):
        parse_order(order)


def test_trees_that_have_no_end() -> None:
    leaf = {"roots": [0], "feature": [0, -1, -1], "value": [0.0] * 3, "missing_left": [0] * 3}
    for left in ([0, -1, -1], [7, -1, -1], [2, -1, -1]):
        with pytest.raises(ValueError, match="trees"):
            TreeEnsemble({k: np.array(v) for k, v in {**leaf, "left": left}.items()})
    sound = TreeEnsemble({k: np.array(v) for k, v in {**leaf, "left": [1, -1, -1]}.items()})
    with pytest.raises(SpecError, match="features"):
        sound.predict(np.zeros((1, 0), dtype=np.float32))


@pytest.mark.parametrize(
    "nodes",
    [
        [{"type": "ffi.Array", "data": "DATA"}],
        [{"type": "ffi.Map", "data": {"a": 2**31 - 1, "b": 2**31 - 1}}],
        [{"type": "ir.IRModule", "data": {"functions": 0}}, {"type": "ffi.Array"}],
    ],
)
@pytest.mark.parametrize("members", ["[1}", "[1,,,{", "[[[[", '["'])
def test_modules_that_are_none(nodes: list[Any], members: str) -> None:
    """The compiled reader wrote behind its arrays at ``[1}``: a segmentation fault."""
    text = json.dumps({"root_index": 0, "nodes": nodes}).replace('"DATA"', members + " " * 40)
    encoder = CompactAstEncoder()
    for cut in range(0, len(text), 7):
        with pytest.raises(SpecError):
            encoder.encode(text[:cut])
    with pytest.raises(SpecError):
        encoder.encode(text)


def test_archives_that_grow(tmp_path: Path) -> None:
    packed = b64encode(zlib.compress(bytes(100 << 20), 9)).decode()
    with bounded(), pytest.raises(SpecError, match="more than"):
        decode_module(packed)
    path = tmp_path / "n.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(260):
            stream.write(bytes(1 << 20))
    with bounded(), pytest.raises(SpecError, match="bytes of text"):
        read_operators(path, "neusight")


@pytest.mark.parametrize("cell", ["1e999", "-inf", "1e300", "nan"])
def test_sizes_that_overflow(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text(NEUSIGHT.replace(",128,", f",{cell},"))
    with pytest.raises(SpecError):
        read_operators(path, "neusight")


@pytest.mark.parametrize(
    "change",
    [{"times_s": ["x"]}, {"times_s": [-1.0]}, {"times_s": []}, {"times_s": 5}, {"extra": 1}],
)
def test_a_journal_line_of_another_shape_is_measured_again(
    change: dict[str, Any], tmp_path: Path
) -> None:
    data = READERS["journal"].valid_bytes().split(b"\n")
    line = json.loads(data[2])
    line["result"] |= change
    path = tmp_path / "j"
    path.write_bytes(b"\n".join([*data[:2], json.dumps(line).encode(), b""]))
    with ProfileJournal(path) as journal:
        journal.resume({"a": 1})
        assert not journal.parts
    assert SCHEMA.encode() in path.read_bytes()


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "x" * 5000, "a\0b", "/etc/passwd", "sub/a.safetensors"]
)
def test_an_index_names_files_beside_it(name: str, tmp_path: Path) -> None:
    reader = READERS["safetensors-index"]
    assert reader.document is not None
    broken = json.loads(json.dumps(reader.document()).replace("a.safetensors", "NAME"))
    broken["weight_map"] = dict.fromkeys(broken["weight_map"], name)
    said = outcome(partial(reader.attempt, tmp_path / "m", json.dumps(broken).encode()))
    assert said is not None
    assert "beside the index" in said


@pytest.mark.parametrize("name", ["ops-weights", "programs-weights", "safetensors"])
def test_damaged_weights_are_refused(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    whole = reader.valid_bytes()
    reader.attempt(tmp_path / "m", whole)
    for data in (whole[:-1], b"no", b""):
        assert outcome(partial(reader.attempt, tmp_path / "m", data)) is not None
    if name != "safetensors":  # a checkpoint has no checksum
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        assert "damaged" in str(outcome(partial(reader.attempt, tmp_path / "m", flipped)))


#: Mutants that failed when they were first made; they name a mutator's output, so that a change of
#: the mutators leaves them as further random cases.
SEEDS = [
    ("plan-serving", 10), ("plan-bubbles", 38), ("plan-gpus", 16), ("workload-precision", 4),
    ("verification", 52), ("cluster-json", 30), ("profile", 16), ("profile", 36), ("profile", 37),
    ("config-llama", 26), ("config-llama", 74), ("config-gpt2", 45), ("safetensors", 0),
    ("safetensors-header", 1), ("safetensors-index", 0), ("safetensors-index", 35),
    ("tir-jsonl-gz", 0), ("operators-parquet", 16), ("operators-parquet", 43),
    ("neusight-csv", 15), ("aiconfigurator-attention", 0), ("aiconfigurator-attention", 17),
    ("helix-csv", 46), ("helix-table", 235), ("ops-card", 4), ("ops-card", 6), ("ops-card", 272),
    ("programs-card", 2), ("programs-card", 6), ("programs-card", 20), ("programs-card", 42),
    ("programs-weights", 1), ("steps", 2), ("steps", 66), ("journal", 67), ("tir-module", 95),
    ("tir-module", 1214),
]  # fmt: skip


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_seeds_that_failed_once(name: str, seed: int, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.attempt(tmp_path / "x", reader.valid_bytes())
    outcome(partial(reader.attempt, tmp_path / "x", reader.mutant(seed)))


def test_the_bound_of_a_schedule_is_the_documented_one() -> None:
    assert MOST_ACTIONS == 2_000_000


def test_words_too_long_for_a_file_name() -> None:
    from foreplan.planner.load_workload import load_workload

    assert "batch" in str(outcome(lambda: load_workload("serving", "batch=" + "9" * 5000)))
    assert outcome(lambda: parse_endpoint("host:" + "9" * 5000))


def test_a_cell_without_end() -> None:
    assert "short cells" in str(outcome(lambda: read_orders("1" * 200_000, "")))


@pytest.fixture
def leader() -> Iterator[Fleet]:
    plan = Plan.model_validate_json(plan_text("serving"))
    fleet = Fleet(plan, plan.cluster.ranks(), (), TOKEN)
    yield fleet
    fleet.close()


HELLO = {"hello": "member", "member": 0, "token": TOKEN}


@pytest.mark.parametrize(
    "lines",
    [
        [b'{"token": "\xc3\xa9"}'],  # compare_digest knows ASCII texts alone
        [b"[" * 60_000],  # RecursionError
        [b"9" * 60_000],
        [b'{"hello": "member", "token": "x"}', json.dumps(HELLO).encode()],
        [json.dumps(HELLO | {"member": "x"}).encode()],
        [json.dumps(HELLO | {"hello": "job", "job": [], "rank": 0}).encode()],
        [json.dumps({"hello": "host", "token": TOKEN}).encode()],
        [json.dumps(HELLO).encode(), b'{"loaded": 1}'],
        [json.dumps(HELLO).encode(), b'{"loaded": 1, "free_bytes": "all"}'],
        [json.dumps(HELLO).encode(), b'{"exited": null}'],
        [b"x" * (1 << 20)],  # held 256 MiB for somebody who had not yet said the word
    ],
    ids=lambda lines: str(lines[-1][:40]),
)
def test_a_stranger_does_not_end_the_leader(leader: Fleet, lines: list[bytes]) -> None:
    with socket.create_connection(leader.endpoint, timeout=5.0) as speaker:
        with contextlib.suppress(OSError):  # the leader may have hung up on it
            speaker.sendall(b"".join(line + b"\n" for line in lines))
        for _ in range(20):
            leader.pump(0.05)
            if leader._members == {} and len(leader._selector.get_map()) == 1:
                break
    assert len(leader._selector.get_map()) == 1, "the leader still listens to it"
    with socket.create_connection(leader.endpoint, timeout=5.0) as speaker:
        speaker.sendall(json.dumps(HELLO).encode() + b"\n")
        for _ in range(20):
            leader.pump(0.05)
            if leader._members:
                break
    assert list(leader._members) == [0], "and takes in a worker"


@pytest.mark.parametrize(
    "words",
    [
        ["cuda:63"],
        ["cuda:63", "--fit"],
        ["cpu:threads=9999"],
        ["cpu:threads=1", "--fit", "--tasks", "1"],
        ["cpu:threads=1", "--fit", "--tasks", "0"],
        ["--serve", "no.such.host.invalid:99", "--peer", "x"],
    ],
    ids=" ".join,
)
def test_a_profile_that_cannot_be_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    result = CliRunner().invoke(app, ["profile", *words, "-o", str(output)])
    assert isinstance(result.exception, ForeplanError)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_journal_outlives_a_device_that_cannot_be_opened(tmp_path: Path) -> None:
    data = READERS["journal"].valid_bytes()
    (tmp_path / "cuda-63.json.journal").write_bytes(data)
    result = CliRunner().invoke(app, ["profile", "cuda:63", "-o", str(tmp_path)])
    assert isinstance(result.exception, ForeplanError)
    assert (tmp_path / "cuda-63.json.journal").read_bytes() == data


def test_an_export_that_cannot_be_written_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise SpecError("x", got="full", expected="room")

    monkeypatch.setattr("foreplan.planner.export.exporter.write_together", full)
    plan = Plan.model_validate_json(plan_text("serving"))
    with pytest.raises(SpecError):
        export_plan(plan, "torchrun", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def _parquet(path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")


def test_a_dictionary_that_stands_for_terabytes(tmp_path: Path) -> None:
    """One text of 4 MiB, a million times: a file of some kilobytes, 4 TB once written out."""
    import pyarrow as pa

    rows, path = 1_000_000, tmp_path / "o.parquet"
    ones = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * (4 << 20)])
    _parquet(path, {"op": ones, "latency_s": pa.array([1.0] * rows)})
    assert path.stat().st_size < 1 << 20
    with bounded(), pytest.raises(SpecError, match="bytes of text"):
        read_operators(path, "foreplan")
    _parquet(path, {"task_name": ones.slice(0, 2000)}, {"schema": SHARD_SCHEMA})
    with bounded(), pytest.raises(SpecError, match="bytes of text"):
        list(read_records(path))


def test_numbers_that_stand_for_gigabytes(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "o.parquet"
    _parquet(path, {f"c{n}": pa.array(np.ones(1_000_000)) for n in range(24)})
    assert path.stat().st_size < 1 << 20
    with bounded(), pytest.raises(SpecError, match="cells"):
        read_operators(path, "foreplan")
    _parquet(path, {"l": pa.array([[1.0] * 1000] * 10)})
    with pytest.raises(SpecError, match="lists"):
        read_operators(path, "foreplan")


def test_a_parquet_footer_that_ends_the_interpreter(tmp_path: Path) -> None:
    """Asking pyarrow for a damaged column's facts was ``std::terminate``."""
    reader = READERS["operators-parquet-bytes"]
    for seed in (187, 188, 189):
        outcome(partial(reader.attempt, tmp_path / "x", reader.mutant(seed)))


def test_half_a_character_in_what_a_rank_says() -> None:
    told = {"torch": "\ud800", "threads": 1, "cores": [0], "cpu_capability": "AVX2", "gpu": None}
    with pytest.raises(WireGarbled):
        device_of({"ready": told}, "x/cpu")
    assert device_of({"ready": told | {"torch": "2"}}, "x/cpu").cores == (0,)
