"""report: Markdown tables of what `program_crossval` has written."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_evaluation import noise_floor
from foreplan.cost_models.programs.program_folds import DEVELOPMENT_FAMILIES
from foreplan.cost_models.programs.program_replay import search_curve
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

_BUDGETS = (1, 2, 3, 5)


class Scored(NamedTuple):
    """Predictions of one fit.

    Attributes:
        facts: its JSON document.
        rows: rows of the table that were predicted (n).
        error: absolute relative errors (n).
        inside: whether the interval holds the label (n), empty where there is none.
        predicted_s: predictions (n).
    """

    facts: Mapping[str, Any]
    rows: NDArray[np.int64]
    error: Floats
    inside: NDArray[np.bool_]
    predicted_s: Floats


def read_scores(table: ProgramTable, folder: Path) -> list[Scored]:
    """Read every finished fit of a folder."""
    found = []
    for path in sorted(folder.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            rows, predicted = arrays["rows"], arrays["predicted_s"]
            measured = table.latency_s[rows]
            inside = np.zeros(0, dtype=np.bool_)
            if "low_s" in arrays:
                inside = (arrays["low_s"] <= measured) & (measured <= arrays["high_s"])
        found.append(Scored(facts, rows, np.abs(predicted / measured - 1), inside, predicted))
    return found


def report(table: ProgramTable, folder: Path) -> str:
    """Tables by split, device and fold, of mean errors in percent over seeds."""
    scores = read_scores(table, folder)
    parts = []
    for split in sorted({s.facts["split"] for s in scores}):
        for number, device in enumerate(table.devices):
            parts.append(_table(table, [s for s in scores if s.facts["split"] == split], number))
            parts[-1] = f"## {split}: {device.name}\n\n{parts[-1]}"
    parts += [
        f"## search: {device.name}\n\n{_search(table, scores, number)}"
        for number, device in enumerate(table.devices)
    ]
    return "\n\n".join(parts)


def _search(table: ProgramTable, scores: list[Scored], device: int) -> str:
    """Best found over best of the pool, by model and number of measurements."""
    lines = [
        "| ranked by | tasks | " + " | ".join(f"{k} measured" for k in _BUDGETS) + " |",
        "|" + "---|" * (2 + len(_BUDGETS)),
    ]
    seen: dict[str, dict[str, Any]] = {}
    for model in sorted({s.facts["model"] for s in scores}):
        curves = []
        for item in scores:
            facts = item.facts
            if facts["split"] != "family" or facts["model"] != model or facts["seed"]:
                continue
            here = table.device[item.rows] == device
            rows = item.rows[here]
            if not len(rows):
                continue
            try:
                curves.append(
                    search_curve(
                        item.predicted_s[here], table.latency_s[rows], table.task[rows], _BUDGETS
                    )
                )
            except SpecError:  # a fold of small tasks only
                continue
        if curves:
            weight = np.array([curve["tasks"] for curve in curves], dtype=float)
            seen[model] = {
                name: np.average([curve[name] for curve in curves], axis=0, weights=weight)
                for name in ("model", "random")
            } | {"tasks": int(weight.sum())}
    for model, curve in seen.items():
        lines.append(_row(model, curve["tasks"], curve["model"]))
    if seen:
        last = next(iter(seen.values()))
        lines.append(_row("random order", last["tasks"], last["random"]))
    return "\n".join(lines)


def _row(label: str, tasks: int, values: Floats) -> str:
    return f"| {label} | {tasks} | " + " | ".join(f"{value:.3f}" for value in values) + " |"


def _table(table: ProgramTable, scores: list[Scored], device: int) -> str:
    cells: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    inside: dict[tuple[str, str], list[NDArray[np.bool_]]] = defaultdict(list)
    rows: dict[str, NDArray[np.int64]] = {}
    for item in scores:
        here = table.device[item.rows] == device
        if not here.any():
            continue
        fold, model = item.facts["fold"], item.facts["model"]
        cells[fold, model].append(item.error[here])
        rows[fold] = item.rows[here]
        if len(item.inside):
            inside[fold, model].append(item.inside[here])
    if not cells:
        return "Nothing here."
    names = sorted({fold for fold, _ in cells})
    models = sorted({model for _, model in cells}, key=lambda m: (m != "foreplan", m != "trees", m))
    first = models[0]
    head = ["held out", "programs", *models, f"median of {first}", "±", "coverage", "noise"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]

    def mean(fold: str, model: str, of: Callable[[Floats], Any] = np.mean) -> float:
        runs = cells.get((fold, model), [])
        return float(np.mean([of(run) for run in runs])) if runs else float("nan")

    def line(label: str, chosen: list[str]) -> str:
        count = sum(len(rows[fold]) for fold in chosen)
        values = [np.mean([mean(fold, model) for fold in chosen]) for model in models]
        middle = np.mean([mean(fold, first, np.median) for fold in chosen])
        seeds = min((len(cells.get((fold, first), [])) for fold in chosen), default=0)
        by_seed = [
            np.mean([cells[fold, first][seed].mean() for fold in chosen]) for seed in range(seeds)
        ]
        covered = [np.mean(inside[fold, first]) for fold in chosen if inside[fold, first]]
        floor = [noise_floor(table.take(rows[fold]))["mean"] or float("nan") for fold in chosen]
        shown = [*values, middle, np.ptp(by_seed) if seeds > 1 else float("nan"),
                 np.mean(covered) if covered else float("nan"), np.mean(floor)]  # fmt: skip
        text = ["-" if not np.isfinite(v) else f"{100 * v:.1f}" for v in shown]
        return "| " + " | ".join([label, str(count), *text]) + " |"

    lines += [line(fold, [fold]) for fold in names]
    chosen = [fold for fold in names if fold in DEVELOPMENT_FAMILIES]
    if chosen and len(chosen) < len(names):
        lines.append(line("**mean of development folds**", chosen))
        lines.append(line("**mean of other folds**", [f for f in names if f not in chosen]))
    lines.append(line("**mean**", names))
    return "\n".join(lines)
