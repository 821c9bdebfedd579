"""read_programs: measured programs of Parquet folders and tir-jsonl files as one `ProgramTable`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from foreplan.cost_models.programs.compact_ast import CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.program_devices import named_device, record_device
from foreplan.cost_models.programs.program_table import BETWEEN_NETWORKS, ProgramTable
from foreplan.datasets.device import Device
from foreplan.datasets.tir.records import ProgramRecord, read_records
from foreplan.datasets.tir.tir_jsonl import read_tir_jsonl
from foreplan.errors import MissingDataError, SpecError

FORMATS = ("foreplan", "tir-jsonl")


class Encoder(Protocol):
    """What makes leaves of a program's text; `CompactAstEncoder` is one."""

    def encode(self, text: bytes | str, where: str = "program") -> CompactAst:
        """Encode one program.

        Raises:
            SpecError: a program that cannot be encoded.
        """
        ...


class Unsupported(NamedTuple):
    """A measured program that cannot be encoded.

    Attributes:
        device: name of its device.
        network: networks that call it, joined by `BETWEEN_NETWORKS`.
        reason: why, in words.
    """

    device: str
    network: str
    reason: str


class ProgramData(NamedTuple):
    """What was read.

    Attributes:
        table: programs that ran and can be encoded.
        unsupported: programs that ran and cannot.
        noisy: number of those that were left out for their spread.
    """

    table: ProgramTable
    unsupported: tuple[Unsupported, ...]
    noisy: int = 0


@dataclass
class _Rows:
    """Programs of one device on their way into a table."""

    asts: list[CompactAst] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    task: list[str] = field(default_factory=list)
    family: list[str] = field(default_factory=list)
    network: list[str] = field(default_factory=list)

    def table(self, device: Device) -> ProgramTable:
        return ProgramTable.from_asts(
            self.asts, device, latency_s=self.latency_s, spread=self.spread, task=self.task,
            family=self.family, network=self.network,
        )  # fmt: skip


class _Reader:
    """Encodes programs; keeps apart what cannot be encoded."""

    def __init__(self, encoder: Encoder | None = None) -> None:
        self._encoder = encoder or CompactAstEncoder()
        self.unsupported: list[Unsupported] = []

    def add(
        self, rows: _Rows, module: str | bytes, where: str, device: str, *, seconds: float,
        spread: float, task: str, families: Iterable[str], networks: Sequence[str],
    ) -> None:  # fmt: skip
        network = BETWEEN_NETWORKS.join(networks)
        try:
            rows.asts.append(self._encoder.encode(module, where))
        except SpecError as error:
            self.unsupported.append(Unsupported(device, network, error.expected))
            return
        rows.latency_s.append(seconds)
        rows.spread.append(spread)
        rows.task.append(task)
        rows.family.append("+".join(sorted(families)))
        rows.network.append(network)


def read_programs(
    paths: Sequence[Path],
    format_name: str = "foreplan",
    *,
    device: str | None = None,
    known: Mapping[str, Device] | None = None,
    max_spread: float | None = None,
    encoder: Encoder | None = None,
    count_all: bool = False,
) -> ProgramData:
    """Read measured programs of any number of files, folders and devices.

    Args:
        paths: Parquet shards or folders of them (``foreplan``), or tir-jsonl files. The name in a
            folder's ``session.json`` is added to those of its devices.
        format_name: one of `FORMATS`.
        device: what every row ran on; needed for tir-jsonl, which does not say.
        known: devices that the zoo lacks, by name.
        max_spread: programs whose repetitions spread more are left out: a machine that others used
            while it measured spreads by more than one.
        encoder: what makes the leaves; ours by default.
        count_all: give an empty table where programs ran and none can be encoded.

    Raises:
        MissingDataError: no such file or folder, no program that ran (and can be encoded), or all
            of them spread more.
        SpecError: a file that cannot be read, an unknown device or format.
    """
    if format_name not in FORMATS:
        raise SpecError("--format", got=format_name, expected="one of " + ", ".join(FORMATS))
    reader = _Reader(encoder)
    named = None if device is None else named_device(device, known or {})
    if format_name == "tir-jsonl":
        if named is None or device is None:
            raise SpecError(
                "--device", got=None, expected="what the programs ran on: tir-jsonl does not say"
            )
        tables = _tir_jsonl(reader, paths, device, named)
    else:
        tables = _records(reader, paths, named, known or {})
    if not tables and reader.unsupported and count_all:
        tables = [ProgramTable.empty(*([] if named is None else [named]))]
    if not tables:
        raise MissingDataError(
            f"no measured program that can be encoded in {_listed(paths)}",
            fix="foreplan dataset build",
        )
    table = ProgramTable.join(tables)
    noisy = np.zeros(len(table), dtype=np.bool_)
    if max_spread is not None:
        noisy = table.spread > max_spread
    if noisy.any() and noisy.all():
        raise MissingDataError(
            f"repetitions of each program in {_listed(paths)} spread by more than {max_spread:g} of"
            " their median: others used the machine",
            fix="measure them again on a quiet one, with foreplan dataset build --programs",
        )
    return ProgramData(table.take(~noisy), tuple(reader.unsupported), int(noisy.sum()))


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)


def _tir_jsonl(
    reader: _Reader, paths: Sequence[Path], name: str, device: Device
) -> list[ProgramTable]:
    rows = _Rows()
    for path in paths:
        for line in read_tir_jsonl(path):
            networks = [network for network, _ in line.nets]
            for row in line.rows:
                reader.add(
                    rows, row.module, row.where, name, seconds=row.median_s,
                    spread=(row.max_s - row.min_s) / row.median_s, task=line.key, families=(),
                    networks=networks,
                )  # fmt: skip
    return [rows.table(device)] if rows.asts else []


def _records(
    reader: _Reader, paths: Sequence[Path], device: Device | None, known: Mapping[str, Device]
) -> list[ProgramTable]:
    groups: dict[tuple[str, str, str], _Rows] = defaultdict(_Rows)
    clocks: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    families: dict[str, set[str]] = defaultdict(set)
    for session, record in _ran(paths):
        key = (record.device, record.chip, session)
        families[record.task_key].update(record.families)
        clocks[key].append(record.clock_hz)
        reader.add(
            groups[key], record.module, f"{record.task_key}/{record.seed}", record.device,
            seconds=record.median_s, spread=record.spread, task=record.task_key,
            families=record.families, networks=record.networks,
        )  # fmt: skip
    tables = []
    for key, rows in groups.items():
        name, chip, session = key
        if not rows.asts:
            continue
        # Two folders may know different callers of one task; folds must see them all.
        rows.family = ["+".join(sorted(families[task])) for task in rows.task]
        clock = np.array(clocks[key], dtype=float)
        middle = float(np.median(clock[clock > 0])) if (clock > 0).any() else float("nan")
        found = device or known.get(chip) or known.get(name)
        if found is None:
            found = record_device(name, chip, middle)
            if session:
                found = found.model_copy(update={"name": f"{found.name},{session}"})
        tables.append(rows.table(found))
    return tables


def _ran(paths: Iterable[Path]) -> Iterable[tuple[str, ProgramRecord]]:
    """Records that ran, with sessions, each program of a task and device once: the quietest."""
    best: dict[tuple[str, str, str, str, str], ProgramRecord] = {}
    for path in paths:
        session = _session(path)
        for record in read_records([path]):
            if not record.median_s > 0:
                continue
            key = (session, record.device, record.chip, record.task_key, record.program_key)
            seen = best.get(key)
            if seen is None or record.spread < seen.spread:
                best[key] = record
    return [(key[0], record) for key, record in best.items()]


def _session(path: Path) -> str:
    """What a folder's ``session.json`` calls its circumstances, empty where it has none.

    A core whose neighbours are busy is slower than the same core alone, so it is another device.

    Raises:
        SpecError: a file that is no object with a ``name``.
    """
    file = path / "session.json"
    if not file.is_file():
        return ""
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["name"]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise SpecError(
            str(file), got=type(error).__name__, expected='an object with a "name"'
        ) from error
    return str(name)
