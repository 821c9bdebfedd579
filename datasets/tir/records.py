"""ProgramRecord: one measured (or failed) scheduled program, kept as Parquet shards.

A shard is written whole or not at all; a folder of shards is a dataset. Module texts are kept as
they are: programs of a task are alike, and Parquet's compression of the column finds that, which
base64 would hide.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from foreplan.datasets import latency_range
from foreplan.datasets.parquet import open_parquet, plain
from foreplan.datasets.storage import write_atomically
from foreplan.errors import MissingDataError, SpecError

#: Version of the table's columns; stands in each file's metadata.
SCHEMA = "foreplan.programs/1"

STATUSES = ("ok", "slow", "build_failed", "run_failed", "fault", "timeout", "no_sample")


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One scheduled program on one device.

    Attributes:
        task_key: key of the unscheduled task.
        task_name: what a reader calls the task.
        program_key: hash of the module's text, empty where there is none.
        networks: networks at a shape that call the task.
        calls: calls in one pass, one number for each of ``networks``.
        families: families of those networks.
        device: device name (``cpu:threads=1,isa=avx2``).
        chip: the silicon.
        target: TVM target, JSON.
        seed: number of the draw.
        module: JSON text of the scheduled module.
        trace: JSON text of the trace that makes it from the task's module.
        status: ``ok``, ``slow`` (ran once, not repeated), or how it failed (`STATUSES`).
        error: why it failed, else empty.
        median_s: median over repetitions of the time of one call; NaN if it never ran.
        min_s: least.
        max_s: greatest.
        spread: (max - min) / median.
        repetitions: repetitions kept.
        calls_per_repetition: calls that one repetition averages over; arguments stay in place.
        load: load average of the machine over the last minute.
        clock_hz: clock right after the run, NaN where the system does not tell.
        tvm: version of apache-tvm.
        ffi: version of apache-tvm-ffi.
        measured_at: seconds since 1970.
    """

    task_key: str
    task_name: str
    program_key: str
    networks: tuple[str, ...]
    calls: tuple[int, ...]
    families: tuple[str, ...]
    device: str
    chip: str
    target: str
    seed: int
    module: str
    trace: str
    status: str
    error: str
    median_s: float
    min_s: float
    max_s: float
    spread: float
    repetitions: int
    calls_per_repetition: int
    load: float
    clock_hz: float
    tvm: str
    ffi: str
    measured_at: float


def _schema() -> Any:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    kinds = {
        "str": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "tuple[str, ...]": pa.list_(pa.string()),
        "tuple[int, ...]": pa.list_(pa.int64()),
    }
    columns = [pa.field(item.name, kinds[str(item.type)]) for item in fields(ProgramRecord)]
    return pa.schema(columns, metadata={"schema": SCHEMA})


def write_records(records: Sequence[ProgramRecord], path: Path) -> int:
    """Write one shard and return its bytes.

    Raises:
        SpecError: the path cannot be written.
    """
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    rows = [asdict(record) for record in records]
    buffer = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist(rows, schema=_schema()),
        buffer,
        compression="zstd",
        compression_level=9,
        use_dictionary=[
            "task_key", "task_name", "device", "chip", "target", "status", "tvm", "ffi",
            "networks.list.element", "families.list.element",
        ],
        data_page_size=8 << 20,
    )  # fmt: skip
    write_atomically(path, buffer.getvalue())
    return buffer.tell()


def read_records(paths: Path | Iterable[Path]) -> Iterator[ProgramRecord]:
    """Yield the records of a shard, of a folder of shards, or of several, in order of file names.

    Raises:
        MissingDataError: a folder without shards, or no such file.
        SpecError: a file that is no Parquet or of another schema, or a value that is missing or of
            another kind.
    """
    for path in _shards([paths] if isinstance(paths, Path) else list(paths)):
        try:
            with open_parquet(path, nested=True) as file:
                found = (file.schema_arrow.metadata or {}).get(b"schema", b"").decode()
                if found != SCHEMA:
                    raise SpecError(f"{path}: schema", got=found, expected=SCHEMA)
                for batch in file.iter_batches(256):
                    for row in _checked(plain(batch, str(path)), str(path)).to_pylist():
                        for name in ("networks", "calls", "families"):
                            row[name] = tuple(row[name])
                        yield ProgramRecord(**row)
        except OSError as error:  # pyarrow's ArrowInvalid is one, too
            raise SpecError(str(path), got=str(error)[:80], expected="a Parquet file") from error
        except ValueError as error:
            raise SpecError(str(path), got=str(error)[:80], expected="a Parquet file") from error


def _checked(batch: Any, where: str) -> Any:
    """A batch with the columns of `ProgramRecord`, no cell of which is empty.

    Raises:
        SpecError: other columns, a cell that is empty or of another kind, or a time that is none.
    """
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    schema, found = _schema(), batch.schema.names
    if sorted(found) != sorted(schema.names):
        odd = sorted(set(found) ^ set(schema.names)) or found
        raise SpecError(f"{where}: columns", got=odd, expected=f"those of {SCHEMA}, each once")
    columns = []
    for field in schema:
        place = f"{where}: column {field.name}"
        column = batch.column(field.name)
        try:
            column = column.cast(field.type)
        except pa.ArrowException as error:
            raise SpecError(place, got=str(column.type), expected=str(field.type)) from error
        if column.null_count or (pa.types.is_list(field.type) and column.flatten().null_count):
            raise SpecError(place, got=None, expected="a value in every row")
        columns.append(column)
    batch = type(batch).from_arrays(columns, schema=schema)
    seconds = batch.column("median_s").to_numpy()
    # NaN: it never ran.
    wrong = (seconds < latency_range.LEAST_S) | (seconds > latency_range.MOST_S)
    if wrong.any():
        raise SpecError(
            f"{where}: column median_s", got=float(seconds[wrong][0]),
            expected=f"{latency_range.expected(1.0, 's')}, or NaN of what never ran",
        )  # fmt: skip
    return batch


def _shards(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise MissingDataError(f"no such dataset: {path}", fix="foreplan dataset build")
        if not path.is_dir():
            yield path
            continue
        shards = sorted(path.glob("*.parquet"))
        if not shards and any((path / "shards").glob("*.parquet")):  # see `shard_journal`
            raise MissingDataError(
                f"{path} holds a build that was interrupted",
                fix="the same foreplan dataset build again, which resumes it",
            )
        if not shards:
            raise MissingDataError(
                f"no measured programs (*.parquet) in the folder {path}",
                fix=f"measure some: foreplan dataset build -o {path}",
            )
        yield from shards


def merge_shards(source: Path, target: Path, *, files: int = 6) -> dict[str, Any]:
    """Rewrite a folder of shards as at most ``files`` files, sorted by task, and count them.

    Sorting brings programs of a task together, which compresses several times better.

    Returns:
        Document with ``rows``, ``by_status``, ``measured_tasks``, ``files`` and ``bytes``.

    Raises:
        MissingDataError: no shards.
        SpecError: a shard that cannot be read, or a path that cannot be written.
    """
    records = sorted(read_records(source), key=lambda r: (r.device, r.task_key, r.seed))
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(str(target), got=error.strerror, expected="a folder to make") from error
    size = max(2000, -(-len(records) // files))
    names = [f"programs-{number:03d}.parquet" for number in range(-(-len(records) // size))]
    written = [
        write_records(records[number * size : (number + 1) * size], target / name)
        for number, name in enumerate(names)
    ]
    for stale in target.glob("programs-*.parquet"):
        if stale.name not in names:
            try:
                stale.unlink()
            except OSError as error:
                raise SpecError(
                    str(stale), got=error.strerror, expected="a file to remove"
                ) from error
    by_status: dict[str, int] = {}
    for record in records:
        by_status[record.status] = by_status.get(record.status, 0) + 1
    summary = {
        "rows": len(records),
        "by_status": by_status,
        "measured_tasks": len({record.task_key for record in records}),
        "files": len(written),
        "bytes": sum(written),
    }
    write_atomically(target / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary
