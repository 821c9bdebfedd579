"""tir-jsonl: scheduled programs with latencies as JSON lines, plain, .gz or .xz.

What a file is, its first bytes say.

One line is a task: ``{"key", "name", "nets": [[network, calls], ...], "rows": [...]}``, a row is
``{"mod", "median_s", "min_s", "max_s"}`` with ``mod`` = base64(zlib(``tvm.ir.save_json`` of the
scheduled module)).
Files of tasks alone (``foreplan dataset build --tasks``) are of the same form with no rows, the
unscheduled module beside them and the networks' families.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from foreplan.datasets import latency_range
from foreplan.datasets.storage import write_atomically
from foreplan.datasets.tir.records import ProgramRecord
from foreplan.datasets.tir.task import Task, decode_module, encode_module
from foreplan.errors import MissingDataError, SpecError

#: Characters of a line; a program takes a few thousand.
_MAX_LINE = 16 << 20


@dataclass(frozen=True, slots=True)
class MeasuredProgram:
    """One row of a line.

    Attributes:
        packed: base64 of zlib of the module's JSON text.
        where: file and line, for errors.
        median_s: seconds; likewise ``min_s`` and ``max_s``.
    """

    packed: str
    where: str
    median_s: float
    min_s: float
    max_s: float

    @property
    def module(self) -> bytes:
        """JSON text of the scheduled module, UTF-8.

        Raises:
            SpecError: not what it should be.
        """
        return decode_module(self.packed, self.where)


@dataclass(frozen=True, slots=True)
class TirLine:
    """One line: a task and its programs.

    Attributes:
        key: the task's key, as in the file.
        name: what a reader calls it.
        nets: (network, calls) of each caller.
        rows: programs with latencies.
    """

    key: str
    name: str
    nets: tuple[tuple[str, int], ...]
    rows: tuple[MeasuredProgram, ...]


def read_tir_jsonl(path: Path) -> Iterator[TirLine]:
    """Yield the lines of a file; empty lines are skipped.

    Raises:
        MissingDataError: no such file.
        SpecError: a line that is no JSON or lacks a field, or a damaged archive; names the line.
    """
    for where, document in _documents(path):
        rows = _get(document, "rows", list, where)
        yield TirLine(
            key=_get(document, "key", str, where),
            name=str(document.get("name", "")),
            nets=_nets(document, where),
            rows=tuple(_row(row, f"{where}.rows[{n}]") for n, row in enumerate(rows)),
        )


def write_tir_jsonl(records: Iterable[ProgramRecord], path: Path) -> int:
    """Write measured programs, those that ran, and return how many.

    Args:
        records: of one device; those of a task need not stand together.
        path: ends in ``.gz`` or ``.xz`` where it is to be compressed.

    Raises:
        SpecError: records of several devices, or a path that cannot be written.
    """
    lines: dict[str, dict[str, Any]] = {}
    devices, count = set(), 0
    for record in records:
        if not record.median_s > 0:
            continue
        devices.add(record.device)
        if len(devices) > 1:
            raise SpecError(
                "records",
                got=sorted(devices),
                expected="one device, for which tir-jsonl has no column",
            )
        line = lines.setdefault(
            record.task_key,
            {
                "key": record.task_key,
                "name": record.task_name,
                "nets": [list(pair) for pair in zip(record.networks, record.calls, strict=True)],
                "rows": [],
            },
        )
        line["rows"].append(
            {
                "mod": encode_module(record.module),
                "median_s": record.median_s,
                "min_s": record.min_s,
                "max_s": record.max_s,
            }
        )
        count += 1
    _write(lines.values(), path)
    return count


def write_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Write tasks without measurements.

    Raises:
        SpecError: the path cannot be written.
    """
    _write(
        (
            {
                "key": task.key,
                "name": task.name,
                "nets": [list(pair) for pair in task.calls.items()],
                "families": sorted(task.families),
                "task": encode_module(task.module),
                "rows": [],
            }
            for task in tasks
        ),
        path,
    )


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks of a file that `write_tasks` wrote.

    Raises:
        MissingDataError: no such file.
        SpecError: as `read_tir_jsonl`, or a line without the unscheduled module.
    """
    return [
        Task(
            key=_get(document, "key", str, where),
            name=str(document.get("name", "")),
            module=_text(decode_module(_get(document, "task", str, where), f"{where}.task"), where),
            calls=MappingProxyType(dict(_nets(document, where))),
            families=frozenset(_families(document, where)),
        )
        for where, document in _documents(path)
    ]


def _write(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text, mtime=0)  # equal content, equal bytes
    elif path.suffix == ".xz":
        text = lzma.compress(text)
    write_atomically(path, text)


def _open(path: Path) -> TextIO:
    with path.open("rb") as stream:
        magic = stream.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(path, "rt", encoding="utf-8")
    if magic == b"\xfd7zXZ\x00":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with _open(path) as stream:
            # A few bytes of an archive can stand for a line without end.
            for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE), ""), 1):
                where = f"{path}:{number}"
                if len(line) == _MAX_LINE:
                    raise SpecError(where, got=f"{line[:20]}...", expected="a shorter line")
                if line.strip():
                    document = _parse(line, where)
                    if not isinstance(document, dict):
                        raise SpecError(where, got=document, expected="a JSON object")
                    yield where, document
    except FileNotFoundError as error:
        raise MissingDataError(f"no such file: {path}", fix="check the path") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise _no_line(f"{path}:{number + 1}", error) from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_line(where, error) from error


def _no_line(where: str, error: Exception) -> SpecError:
    return SpecError(
        where, got=str(error)[:100], expected="a line of JSON", fix="fetch the file again"
    )


def _get(document: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = document.get(key)
    if not isinstance(value, kind):
        raise SpecError(f"{where}.{key}", got=value, expected=f"a JSON {kind.__name__}")
    return value


def _nets(document: Mapping[str, Any], where: str) -> tuple[tuple[str, int], ...]:
    pairs: Sequence[Any] = _get(document, "nets", list, where)
    try:
        return tuple((str(name), int(calls)) for name, calls in pairs)
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"{where}.nets", got=pairs, expected="[[network, calls], ...]") from error


def _families(document: Mapping[str, Any], where: str) -> Sequence[str]:
    families = document.get("families", [])
    if not isinstance(families, list) or not all(isinstance(name, str) for name in families):
        raise SpecError(f"{where}.families", got=families, expected="a list of texts")
    return families


def _text(module: bytes, where: str) -> str:
    try:
        return module.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{where}.task", got=str(error), expected="UTF-8") from error


def _row(row: Any, where: str) -> MeasuredProgram:
    if not isinstance(row, dict):
        raise SpecError(where, got=row, expected="a JSON object")
    times = []
    for name in ("median_s", "min_s", "max_s"):
        value = row.get(name)
        expected = latency_range.expected(1.0, "s")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{where}.{name}", got=value, expected=expected)
        if not latency_range.LEAST_S <= value <= latency_range.MOST_S:
            raise SpecError(f"{where}.{name}", got=value, expected=expected)
        times.append(float(value))
    median_s, min_s, max_s = times
    if not min_s <= median_s <= max_s:
        raise SpecError(where, got=times, expected="min_s <= median_s <= max_s")
    return MeasuredProgram(_get(row, "mod", str, where), f"{where}.mod", *times)
