"""`DecisionView`: any planner's decision as text, without knowing the planner.

A decision that has ``stages`` (a list of records), or ``replicas`` that each have some, becomes
a table with a row a stage; a list of records of devices that each hold one mapping with the same
keys (the variant of every operator) becomes a table with a column a device, in which keys of equal
values share a row; every other field becomes a name and a value. Two conventions make that
readable: a stage's ``start`` and ``end`` are its layers, and a number called ``..._s`` or
``..._bytes`` has that unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreplan.planner.report.text import compact, figure, plain, runs, words

#: A list of one entry a layer is unreadable in a cell: from so many runs on, values are counted.
_RUNS = 3
_CELL = 120  # characters
_TOLD = 3  # values of a choice that a sentence names
#: A fingerprint tells a reader nothing.
_DIGEST = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage.

    Attributes:
        device: label of its device, or "".
        rank: of the schedule, where no device is named that says it; else ``None``.
        layers: ``0–11`` or "".
        first: its first layer, or 0.
        fields: what else it holds, in the document's order: (name, value).
        by_layer: lists of one entry a layer (bits), as (name, entries).
        details: its mappings (kernels by phase), as (name, ((key, value), ...)).
    """

    device: str
    rank: int | None
    layers: str
    first: int
    fields: tuple[tuple[str, str], ...]
    by_layer: tuple[tuple[str, tuple[str, ...]], ...]
    details: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]

    @property
    def holds(self) -> str:
        """Layers and fields on one line: ``layers 0–11, bits 8``."""
        parts = [f"layers {self.layers}"] if self.layers else []
        return ", ".join([*parts, *(f"{name} {value}" for name, value in self.fields)])


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """What each device was given for every key of a mapping that all of them have.

    Attributes:
        name: of the mapping, ``operators``.
        devices: labels, a column each.
        rows: keys with equal values on every device: (their names, how many, value by device).
    """

    name: str
    devices: tuple[str, ...]
    rows: tuple[tuple[str, int, tuple[str, ...]], ...]

    @property
    def sentence(self) -> str:
        """How many keys have which value, device by device: ``operators 9 int8, 4 bf16 on t4``."""
        told: dict[str, list[str]] = {}
        for column, device in enumerate(self.devices):
            counts: Counter[str] = Counter()
            for _, count, values in self.rows:
                counts[values[column]] += count
            common = [f"{count} {value}" for value, count in counts.most_common(_TOLD)]
            more = len(counts) - len(common)
            text = ", ".join(common) + (f" and {more} more kinds" if more else "")
            told.setdefault(text, []).append(device)
        parts = [
            text if len(told) == 1 else f"{text} on {', '.join(devices)}"
            for text, devices in told.items()
        ]
        return f"{self.name} {'; '.join(parts)}"


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A decision for readers.

    Attributes:
        stages: one entry a stage; empty where the decision has none.
        fields: everything else: (name, value).
        choices: mappings that devices choose values in; empty where the decision has none.
        replicas: how many records of ``replicas`` the stages belong to, or 0.
    """

    stages: tuple[StageView, ...]
    fields: tuple[tuple[str, str], ...]
    choices: tuple[ChoiceTable, ...] = ()
    replicas: int = 0

    @classmethod
    def of(
        cls,
        decision: Mapping[str, Any],
        shorten: Callable[[list[str]], tuple[str, ...]] = tuple,
    ) -> DecisionView:
        """Read a decision as its planner wrote it; ``shorten`` makes device labels column heads."""
        stages = decision.get("stages") or _of_replicas(decision.get("replicas"))
        rows: tuple[StageView, ...] = ()
        replicas = 0
        rest = dict(decision)
        rest.pop("limits_met", None)  # said as a label where it is false
        if isinstance(stages, Sequence) and all(isinstance(s, Mapping) for s in stages):
            rows = tuple(_stage(stage) for stage in stages)
            replicas = len({stage.get("replica") for stage in stages} - {None})
            for name in ("stages", "replicas"):
                rest.pop(name, None)
        choices = []
        for name, value in list(rest.items()):
            if (table := _choices(value, shorten)) is not None:
                choices.append(table)
                del rest[name]
        fields = tuple(_field(name, value) for name, value in rest.items())
        return cls(rows, fields, tuple(choices), replicas)

    @property
    def sentence(self) -> str:
        """What devices chose and the first few settings on one line: ``tau 4, groups 2``."""
        told = [f"{name} {value}" for name, value in self.fields if not _DIGEST.fullmatch(value)]
        return ", ".join([*(table.sentence for table in self.choices), *told[:4]])


def _of_replicas(value: Any) -> list[dict[str, Any]] | None:
    """Stages of a list of records that each have some, with what else their record says."""
    if not isinstance(value, list | tuple) or not value:
        return None
    found: list[dict[str, Any]] = []
    for number, record in enumerate(value):
        stages = record.get("stages") if isinstance(record, Mapping) else None
        if not isinstance(stages, Sequence) or not all(isinstance(s, Mapping) for s in stages):
            return None
        own = {name: record[name] for name in ("batch", "rounds") if name in record}
        found += [{**stage, "replica": number, **own} for stage in stages]
    return found


def _choices(value: Any, shorten: Callable[[list[str]], tuple[str, ...]]) -> ChoiceTable | None:
    """The table of a list of devices' records, if it is one."""
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(record, Mapping) and "device" in record for record in value):
        return None
    maps = [[n for n, v in record.items() if isinstance(v, Mapping)] for record in value]
    if len(maps[0]) != 1 or any(names != maps[0] for names in maps):
        return None
    field = maps[0][0]
    keys = list(value[0][field])
    if not keys or any(set(record[field]) != set(keys) for record in value):
        return None
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        given = tuple(plain(compact(record[field][key]), _CELL) for record in value)
        groups.setdefault(given, []).append(plain(key))
    devices = shorten([plain(record["device"]) for record in value])
    rows = tuple((_names(found), len(found), given) for given, found in groups.items())
    return ChoiceTable(words(field), devices, rows)


def _names(keys: Sequence[str]) -> str:
    """Names on one line; those that differ in numbers alone once, ``blocks.*.up (×2)``.

    Names that are numbers and nothing else stay as they are.
    """
    patterns: dict[str, list[str]] = {}
    for key in keys:
        patterns.setdefault(re.sub(r"\d+", "*", key), []).append(key)
    shown = [
        ", ".join(found) if len(found) == 1 or pattern == "*" else f"{pattern} (×{len(found)})"
        for pattern, found in patterns.items()
    ]
    return plain(", ".join(shown), 2 * _CELL)


def _field(name: str, value: Any) -> tuple[str, str]:
    """A name and a value; of a list of lists, how long each is."""
    nested = isinstance(value, list | tuple) and bool(value)
    if nested and all(isinstance(entry, list | tuple) for entry in value):
        sizes = ", ".join(str(len(entry)) for entry in value)
        return words(name), plain(f"{len(value)} (entries: {sizes})", _CELL)
    return figure(name, value)


def _stage(stage: Mapping[str, Any]) -> StageView:
    rest = dict(stage)
    device = plain(rest.pop("device", ""))
    number = rest.pop("rank", None)
    rank = number if isinstance(number, int) and not device else None
    layers, first, count = "", 0, -1
    start, end = rest.get("start"), rest.get("end")
    if isinstance(start, int) and isinstance(end, int) and end >= start:
        del rest["start"], rest["end"]
        first, count = start, end - start
        layers = "none" if end == start else str(start)
        layers += f"–{end - 1}" if end > start + 1 else ""
    details, fields, by_layer = [], [], []
    for name, value in rest.items():
        if isinstance(value, Mapping):
            entries = tuple((plain(key), compact(item)) for key, item in value.items())
            details.append((words(name), entries))
        elif isinstance(value, list | tuple):
            fields.append((words(name), plain(runs(value, _RUNS), _CELL)))
            if len(value) == count:
                by_layer.append((words(name), tuple(compact(entry) for entry in value)))
        else:
            label, text = figure(name, value)
            fields.append((label, plain(text, _CELL)))
    return StageView(device, rank, layers, first, tuple(fields), tuple(by_layer), tuple(details))
