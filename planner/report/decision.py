"""`DecisionView`: any planner's decision as text, without knowing the planner.

A decision that has ``stages`` (a list of records) becomes a table with a row a stage; every other
field becomes a name and a value. Two conventions make that readable: a stage's ``start`` and
``end`` are its layers, and a number called ``..._s`` or ``..._bytes`` has that unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreplan.planner.report.text import compact, figure, plain, runs, words

#: A list of one entry a layer is unreadable in a cell: from so many runs on, values are counted.
_RUNS = 3
_CELL = 120  # characters


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage.

    Attributes:
        device: label of its device, or "".
        layers: ``0–11`` or "".
        first: its first layer, or 0.
        fields: what else it holds, in the document's order: (name, value).
        by_layer: lists of one entry a layer (bits), as (name, entries).
        details: its mappings (kernels by phase), as (name, ((key, value), ...)).
    """

    device: str
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
class DecisionView:
    """A decision for readers.

    Attributes:
        stages: one entry a stage; empty where the decision has none.
        fields: everything else: (name, value).
    """

    stages: tuple[StageView, ...]
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, decision: Mapping[str, Any]) -> DecisionView:
        """Read a decision as its planner wrote it."""
        stages = decision.get("stages")
        rows: tuple[StageView, ...] = ()
        rest = dict(decision)
        rest.pop("limits_met", None)  # said as a label where it is false
        if isinstance(stages, Sequence) and all(isinstance(s, Mapping) for s in stages):
            rows = tuple(_stage(stage) for stage in stages)
            rest.pop("stages")
        return cls(rows, tuple(figure(name, value) for name, value in rest.items()))

    @property
    def sentence(self) -> str:
        """The first few settings on one line: ``tau 4, groups 2``."""
        return ", ".join(f"{name} {value}" for name, value in self.fields[:4])


def _stage(stage: Mapping[str, Any]) -> StageView:
    rest = dict(stage)
    device = plain(rest.pop("device", ""))
    rest.pop("rank", None)  # the device's label says it
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
    return StageView(device, layers, first, tuple(fields), tuple(by_layer), tuple(details))
