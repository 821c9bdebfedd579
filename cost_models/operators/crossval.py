"""Leave-one-chip-out folds of the operator predictor and its baselines.

Run as ``python -m foreplan.cost_models.operators.crossval --data FILE --format F [--data ...]``.
Every row of a chip (all boards) is out of training when it is predicted. The predictor's experts
are independent, so it is fitted once a seed and each fold leaves the chip's experts out; baselines
are fitted anew in each fold. Coverage is that of intervals whose widths come from the other chips
only (each in turn held out beside the fold's chip).

``--tune 1 8 64`` adds, apart from the zero-shot errors, those after `TunedExperts` saw so many rows
of each operator class, data type and library of the held-out device; with ``0.05`` that share of
them. They are drawn anew for each seed from the rows that are not scored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.baselines import baseline
from foreplan.cost_models.operators.conformal import unseen_quantiles
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.tuned_experts import TunedExperts
from foreplan.datasets.importers import read_operators
from foreplan.datasets.sweeps.operator_table import OperatorTable
from foreplan.errors import told

Floats = NDArray[np.float64]


def cross_validate(
    table: OperatorTable,
    *,
    seeds: Sequence[int],
    baselines: Sequence[str] = (),
    tune: Sequence[float] = (),
    score_rows: int = 40_000,
    train_rows: int = 60_000,
) -> dict[str, object]:
    """Hold every chip out in turn.

    Args:
        table: measured rows of several chips.
        seeds: of training.
        baselines: names for `baselines.baseline`, fitted with the first seed only.
        tune: rows of the held-out device that a tuned variant sees in each group; below 1, the
            share of them.
        score_rows: most rows that are scored; a random choice, the same for every model.
        train_rows: most rows a *baseline* is fitted on in a fold (the predictor takes all).

    Returns:
        ``cells``: ``device|op|dtype`` to ``rows``, ``mape`` by model (the predictor: mean over
        seeds, with ``spread``), and ``coverage`` of the nominal 90 % interval; ``chips``: the same
        of all rows of a chip.
    """
    rng = np.random.default_rng(0)
    order = rng.permutation(len(table))
    scored = table.take(np.sort(order[:score_rows]))
    # Rows to tune with, never scored; a small table is scored whole and has none.
    spare = table.take(np.sort(order[score_rows:]))
    chips, spare_chips = scored.chips, spare.chips
    errors: dict[str, list[Floats]] = {"foreplan": []}
    errors |= {_tuned_name(rows): [] for rows in tune}
    inside = np.full(len(scored), np.nan)
    for seed in seeds:
        print(f"seed {seed}", file=sys.stderr, flush=True)
        model = OperatorPredictor(seed=seed).fit(table)
        error = np.full(len(scored), np.nan)
        few = {rows: np.full(len(scored), np.nan) for rows in tune}
        for chip in sorted(set(chips)):
            rows = np.flatnonzero(chips == chip)
            part, fold = scored.take(rows), model.without({chip})
            predicted = fold.predict(part)
            error[rows] = np.abs(predicted / part.latency_s - 1)
            for count in tune:
                shown = _draw(spare.take(spare_chips == chip), count, seed, table)
                found = TunedExperts.fit(fold, shown, seed=seed).predict(part)
                few[count][rows] = np.abs(found / part.latency_s - 1)
            if seed == seeds[0]:
                others = scored.take(chips != chip)
                width = unseen_quantiles(fold, others, others.latency_s)
                limit = np.array([width.get(kind, 0.7) for kind in part.kind])
                inside[rows] = np.abs(np.log(predicted / part.latency_s)) <= limit
        errors["foreplan"].append(error)
        for count in tune:
            errors[_tuned_name(count)].append(few[count])
    table_chips = table.chips
    for name in baselines:
        print(f"baseline {name}", file=sys.stderr, flush=True)
        error = np.full(len(scored), np.nan)
        for chip in sorted(set(chips)):
            rows = np.flatnonzero(chips == chip)
            outside = np.flatnonzero(table_chips != chip)
            kept = outside if name == "roofline" else rng.permutation(outside)[:train_rows]
            fitted = baseline(name, seed=seeds[0]).fit(table.take(kept))
            predicted = fitted.predict(scored.take(rows))
            error[rows] = np.abs(predicted / scored.latency_s[rows] - 1)
        errors[name] = [error]
    classes = np.where(scored.kind == "elementwise", "elementwise", scored.op)
    cells = [f"{d}|{c}|{t}" for d, c, t in zip(scored.device, classes, scored.dtype, strict=True)]
    return {
        "cells": _cells(np.array(cells), errors, inside),
        "chips": _cells(chips, errors, inside),
        "seeds": list(seeds),
        "scored": len(scored),
    }


def _tuned_name(rows: float) -> str:
    return f"foreplan, {rows:.0%} of rows" if rows < 1 else f"foreplan, {rows:.0f} rows"


def _groups(table: OperatorTable) -> dict[tuple[str, ...], list[int]]:
    """Rows of each device, library, data type and kind."""
    groups: dict[tuple[str, ...], list[int]] = {}
    keys = zip(table.device, table.library, table.dtype, table.kind, strict=True)
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return groups


def _draw(spare: OperatorTable, count: float, seed: int, table: OperatorTable) -> OperatorTable:
    """``count`` random rows of each group of ``spare``; below 1, that share of ``table``'s."""
    rng, groups = np.random.default_rng(seed), _groups(spare)
    sizes = {key: len(rows) for key, rows in _groups(table).items()} if count < 1 else {}
    chosen = [
        rng.permutation(groups[key])[: int(count * sizes[key]) if count < 1 else int(count)]
        for key in sorted(groups)
    ]
    return spare.take(np.concatenate(chosen).astype(np.int64))


def _cells(
    names: NDArray[Any], errors: dict[str, list[Floats]], inside: Floats
) -> dict[str, object]:
    """Errors of the rows that have one name, by name."""
    cells: dict[str, object] = {}
    for name in sorted(set(names)):
        rows = names == name
        means = {
            model: np.array([_mean(run[rows]) for run in runs], dtype=np.float64)
            for model, runs in errors.items()
        }
        cells[str(name)] = {
            "rows": int(rows.sum()),
            "mape": {model: _mean(values) for model, values in means.items()},
            "spread": float(np.ptp(np.nan_to_num(means["foreplan"]))),
            "coverage": _mean(inside[rows]),
        }
    return cells


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the document of `cross_validate` as JSON."""
    parser = argparse.ArgumentParser(description="Leave-one-chip-out errors of operator models.")
    parser.add_argument("--data", action="append", required=True, type=Path)
    parser.add_argument("--format", action="append", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--baselines", nargs="*", default=[])
    parser.add_argument("--tune", nargs="*", type=float, default=[])
    parser.add_argument("--score-rows", type=int, default=40_000)
    parser.add_argument("--train-rows", type=int, default=60_000)
    options = parser.parse_args(None if arguments is None else list(arguments))
    formats = options.format * len(options.data) if len(options.format) == 1 else options.format
    table = OperatorTable.concat(
        read_operators(path, name) for path, name in zip(options.data, formats, strict=True)
    )
    result = cross_validate(
        table, seeds=options.seeds, baselines=options.baselines, tune=options.tune,
        score_rows=options.score_rows, train_rows=options.train_rows,
    )  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    with told():
        main()
