"""Errors on a new device after fine-tuning on few of its tasks, chosen by KMeans or at random.

Run as ``python -m foreplan.cost_models.program_transfer --data FOLDER ... --target NAME``. The
model is fitted without the target (``--hold-out`` takes more out, such as the target's whole chip),
a fifth of the target's tasks are tested, and tasks to measure come from the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np

from foreplan.cost_models.program_commands import TRAINING_SPREAD, without
from foreplan.cost_models.program_data import read_programs
from foreplan.cost_models.program_folds import folds
from foreplan.cost_models.program_predictor import ProgramPredictor
from foreplan.cost_models.program_table import ProgramTable
from foreplan.cost_models.program_tuning import choose_tasks
from foreplan.errors import ForeplanError, SpecError


def transfer_errors(
    model: ProgramPredictor, target: ProgramTable, counts: Sequence[int], *, draws: int = 3
) -> dict[str, dict[str, list[float]]]:
    """Errors on tasks of a new device that were never measured.

    Args:
        model: fitted without the device; it is not changed.
        target: programs of the device.
        counts: numbers of tasks to measure.
        draws: random choices, and seeds of KMeans.

    Returns:
        ``untuned``, ``kmeans`` and ``random``: number of tasks (as text) to mean absolute relative
        errors, one a draw.
    """
    fold = next(folds(target, "task"))
    test, pool = target.take(fold.test), target.take(fold.train)
    embedding, names = model.embed(pool), np.unique(pool.task)

    def error(tuned: ProgramPredictor) -> float:
        return float(np.abs(tuned.predict(test) / test.latency_s - 1).mean())

    found: dict[str, dict[str, list[float]]] = {"untuned": {"0": [error(model)]}}
    for count in counts:
        for seed in range(draws):
            drawn = np.random.default_rng(seed).permutation(names)[:count].tolist()
            for rule, tasks in (
                ("kmeans", choose_tasks(embedding, pool.task, count, seed=seed)),
                ("random", drawn),
            ):
                rows = np.isin(pool.task, tasks)
                tuned = deepcopy(model).continue_fit(pool.take(rows))
                found.setdefault(rule, {}).setdefault(str(count), []).append(error(tuned))
    return found


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the errors as JSON."""
    parser = argparse.ArgumentParser(description="Fine-tuning on few tasks of a new device.")
    parser.add_argument("--data", action="append", required=True, type=Path)
    parser.add_argument("--target", required=True, help="device, by name or the end of it")
    parser.add_argument("--hold-out", nargs="*", default=[])
    parser.add_argument("--counts", nargs="+", type=int, default=[10, 30, 100])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--networks", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where networks are trained")
    options = parser.parse_args(None if arguments is None else list(arguments))
    table = read_programs(options.data, max_spread=TRAINING_SPREAD).table
    names = [item.name for item in table.devices]
    chosen = [n for n, name in enumerate(names) if name.endswith(options.target)]
    if len(chosen) != 1:
        raise SpecError("--target", got=options.target, expected="one of " + ", ".join(names))
    model = ProgramPredictor(networks=options.networks, torch_device=options.device).fit(
        without(table, [names[chosen[0]], *options.hold_out])
    )
    target = table.take(table.device == chosen[0])
    errors = transfer_errors(model, target, options.counts, draws=options.draws)
    print(json.dumps({"target": names[chosen[0]], "held_out": options.hold_out, **errors}))


if __name__ == "__main__":
    try:
        main()
    except ForeplanError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
