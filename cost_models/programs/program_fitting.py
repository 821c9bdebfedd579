"""fit_together: fit program predictors: groups kept out, weights of the halves, the interval.

Training rows are dealt to groups of whole families (`program_folds.validation_groups`). What is
fitted on the other groups predicts each; on that the weight of the networks is chosen and the
interval calibrated (conformal, by kind of device and range of predicted latency).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.known_programs import KnownPrograms
from foreplan.cost_models.programs.program_folds import validation_groups
from foreplan.cost_models.programs.program_inputs import (
    ProgramInputs,
    fit_scale,
    on_cpus,
    program_inputs,
)
from foreplan.cost_models.programs.program_predictor import (
    RANGES_S,
    ProgramPredictor,
    program_seconds,
)
from foreplan.cost_models.programs.program_scale import ProgramScale
from foreplan.cost_models.programs.program_table import Floats, ProgramTable
from foreplan.cost_models.programs.program_training import TrainingRows, train_together
from foreplan.cost_models.programs.program_transformer import ProgramTransformer
from foreplan.cost_models.programs.program_trees import ProgramTrees

#: Rows from which a range has an interval of its own: convention, four of them beyond a coverage of
#: 90 %; with fewer, the interval would hang on one or two programs.
_LEAST_ROWS = 40


class _Group(NamedTuple):
    """A group of families kept out: what is fitted on the others, and what that says of it."""

    held: NDArray[np.bool_]
    rows: TrainingRows
    out: ProgramTable
    outside: ProgramInputs
    scale: ProgramScale
    network: ProgramTransformer | None


def fit_together(
    models: Sequence[ProgramPredictor],
    tables: Sequence[ProgramTable],
    seconds: Sequence[Floats] | None = None,
) -> list[ProgramPredictor]:
    """Fit several predictors of one size, each on its own table; all their networks train at once.

    Args:
        models: that differ in seeds and in what networks are given alone.
        tables: of each.
        seconds: labels of each; the tables' own by default.
    """
    labels = [t.latency_s for t in tables] if seconds is None else list(seconds)
    with ThreadPoolExecutor(max(1, models[0].threads)) as pool:
        drafts = list(pool.map(_groups, models, tables, labels))
        # Trees are fitted on processors while networks train, which may be on a GPU.
        trees = [
            [pool.submit(m.fit_trees, g.rows.inputs, g.rows.seconds) for g in draft]
            if m.rounds
            else []
            for m, draft in zip(models, drafts, strict=True)
        ]
        learning = [g for draft in drafts for g in draft if g.network is not None]
        if learning:
            networks = [g.network for g in learning if g.network is not None]
            rate = train_together(
                networks, [g.rows for g in learning], epochs=models[0].epochs,
                learning_rate=models[0].learning_rate,
            )  # fmt: skip
            for network in networks:
                network.samples_per_s = rate
        for m, t, y in zip(models, tables, labels, strict=True):
            m.scale_ = fit_scale(t, y)
        last = [
            pool.submit(m.fit_trees, program_inputs(t, m.scale_), y) if m.rounds else None
            for m, t, y in zip(models, tables, labels, strict=True)
        ]
        for m, t, y, draft, own, final in zip(
            models, tables, labels, drafts, trees, last, strict=True
        ):
            m.shift_ = 0.0
            m.known_, m.copies_ = KnownPrograms.of(t, y), {}
            m.trees_ = [] if final is None else [final.result()]
            _finish(m, t, y, draft, [future.result() for future in own])
    return list(models)


def _groups(model: ProgramPredictor, table: ProgramTable, seconds: Floats) -> list[_Group]:
    found: list[_Group] = []
    if model.groups == 0:
        return found
    group = validation_groups(table, model.groups)
    for number in np.unique(group[group >= 0]):
        held = group == number
        rest, out = table.take(~held), table.take(held)
        scale = fit_scale(rest, seconds[~held])
        inside = program_inputs(rest, scale)
        network = None
        if len(found) < model.networks:
            network = ProgramTransformer.untrained(model.settings(int(number)), rest, inside)
            network.scales["parts"] = scale.weights.astype(np.float32)
        rows = TrainingRows(rest, inside, seconds[~held])
        found.append(_Group(held, rows, out, program_inputs(out, scale), scale, network))
    return found


def _finish(
    model: ProgramPredictor, table: ProgramTable, seconds: Floats, groups: Sequence[_Group],
    trees: Sequence[ProgramTrees],
) -> None:  # fmt: skip
    """Choose the weight of the halves and calibrate the interval on what groups did not see."""
    by_trees, by_network = np.full(len(table), np.nan), np.full(len(table), np.nan)
    floor = np.zeros(len(table))
    model.networks_ = []
    for number, item in enumerate(groups):
        floor[item.held] = model.floor(item.outside)
        if trees:
            corrected = np.exp(trees[number].predict(item.outside))
            by_trees[item.held] = np.log(
                program_seconds(item.outside, item.outside.leaf_s * corrected)
            )
        if item.network is not None:
            model.networks_.append(item.network)
            by_network[item.held] = item.network.predict(item.out, item.outside)[0]
    model.weight_ = _weight(model, by_trees, by_network, np.log(seconds))
    both = np.isfinite(by_network) & np.isfinite(by_trees)
    alone = by_trees if model.rounds else by_network
    mixed = (1 - model.weight_) * by_trees + model.weight_ * by_network
    logs = np.where(both, mixed, alone)
    kept = np.isfinite(logs)
    kept_s = np.maximum(np.exp(logs[kept]), floor[kept])
    on_cpu = on_cpus(table)
    model.quantiles_ = (
        _quantiles(kept_s, seconds[kept], on_cpu[kept], model.coverage)
        if kept.any()
        else np.full((2, len(RANGES_S)), np.nan)
    )
    error = np.abs(kept_s / seconds[kept] - 1)
    model.card_ = {
        "rows": len(table),
        "tasks": len(set(table.task.tolist())),
        "devices": [device.model_dump(mode="json") for device in table.devices],
        "families": sorted(set("+".join(table.family.tolist()).split("+")) - {""}),
        "validation": {
            "rule": "groups of families, each predicted by a fit on the others",
            "mape": float(error.mean()) if kept.any() else None,
            "median_ape": float(np.median(error)) if kept.any() else None,
            "mape_trees": _mape(by_trees, seconds), "mape_networks": _mape(by_network, seconds),
        },
        "parts": model.scale_.named(),
    }  # fmt: skip


def _weight(model: ProgramPredictor, by_trees: Floats, by_network: Floats, target: Floats) -> float:
    """Weight of the networks that makes the error of both together least."""
    if model.rounds == 0 or model.networks == 0:
        return 1.0 if model.rounds == 0 else 0.0
    both = np.isfinite(by_network)
    trees, network, wanted = by_trees[both], by_network[both], target[both]
    errors = {
        share: np.abs(np.expm1((1 - share) * trees + share * network - wanted)).mean()
        for share in (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
    }
    return min(errors, key=lambda share: errors[share])


def _mape(logs: Floats, seconds: Floats) -> float | None:
    known = np.isfinite(logs)
    if not known.any():
        return None
    return float(np.abs(np.exp(logs[known]) / seconds[known] - 1).mean())


def _quantiles(
    predicted_s: Floats, seconds: Floats, cpu: NDArray[np.bool_], coverage: float
) -> Floats:
    """Quantile of abs(ln error) by kind and range; of all of a kind where a range has few rows."""
    errors = np.abs(np.log(predicted_s / seconds))
    where = np.searchsorted(RANGES_S, predicted_s)

    def quantile(values: Floats) -> float:
        level = min(1.0, coverage * (1 + 1 / len(values)))
        return float(np.quantile(values, level, method="higher"))

    found = np.empty((2, len(RANGES_S)))
    for row, kind in enumerate((~cpu, cpu)):
        for number in range(len(RANGES_S)):
            rows = kind & (where == number)
            wider = kind if kind.any() else np.ones_like(kind)
            found[row, number] = quantile(errors[rows if rows.sum() >= _LEAST_ROWS else wider])
    return found
