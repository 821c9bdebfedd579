"""Errors on a new device after fine-tuning on few of its tasks, chosen by KMeans or at random.

Run as ``python -m foreplan.cost_models.programs.program_transfer --data FOLDER ... --target NAME
...``. The model is fitted once without the targets (``--hold-out`` takes more out, such as their
whole chip). A fifth of a target's tasks are tested (``--folds``: each fifth in turn), and tasks to
measure come from the others. Beside those
errors stands what the target's own times would be taken for if each program's time on a device
that was trained on were copied (`copied_errors`), which no model of that device alone can know.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foreplan.cost_models.programs.program_commands import TRAINING_SPREAD, without
from foreplan.cost_models.programs.program_data import read_programs
from foreplan.cost_models.programs.program_folds import TASK_FOLDS, folds
from foreplan.cost_models.programs.program_predictor import ProgramPredictor
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.cost_models.programs.program_tuning import choose_tasks
from foreplan.errors import ForeplanError, SpecError

#: Programs in common from which copied times are reported: convention.
_LEAST_COMMON = 50


def transfer_errors(
    model: ProgramPredictor,
    target: ProgramTable,
    counts: Sequence[int],
    *,
    draws: int = 3,
    fold_count: int = 1,
) -> dict[str, dict[str, list[float]]]:
    """Errors on tasks of a new device that were never measured.

    Args:
        model: fitted without the device; it is not changed.
        target: programs of the device.
        counts: numbers of tasks to measure.
        draws: random choices, and seeds of KMeans.
        fold_count: fifths of the tasks that are tested in turn, 1 to 5.

    Returns:
        ``untuned``, ``kmeans`` and ``random``: number of tasks (as text) to mean absolute relative
        errors, one a fold and draw, the first fold's first.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for fold in islice(folds(target, "task"), fold_count):
        test, pool = target.take(fold.test), target.take(fold.train)
        embedding, names = model.embed(pool), np.unique(pool.task)

        def note(rule: str, count: int, own: ProgramPredictor, test: ProgramTable = test) -> None:
            error = float(np.abs(own.predict(test) / test.latency_s - 1).mean())
            found.setdefault(rule, {}).setdefault(str(count), []).append(error)

        note("untuned", 0, model)
        for count in counts:
            for seed in range(draws):
                drawn = np.random.default_rng(seed).permutation(names)[:count].tolist()
                for rule, tasks in (
                    ("kmeans", choose_tasks(embedding, pool.task, count, seed=seed)),
                    ("random", drawn),
                ):
                    rows = np.isin(pool.task, tasks)
                    note(rule, count, deepcopy(model).continue_fit(pool.take(rows)))
    return found


class Copied(NamedTuple):
    """How well times of another device say those of a target.

    Attributes:
        programs: that both have timed.
        factor: median ratio of the target's time to the other's.
        error: mean absolute relative error of the other's time times the factor.
        median_error: the median of the same.
    """

    programs: int
    factor: float
    error: float
    median_error: float


def copied_errors(
    target: ProgramTable, trained: ProgramTable, *, least: int = _LEAST_COMMON
) -> dict[str, Copied]:
    """Errors of times copied from devices that timed the same programs, by name of the device.

    Programs are the same if they are of one task and have equal leaves; of several such, the median
    time is taken. The factor is the median over all programs that both have, so the labels of the
    tested tasks are in it: a bound, not a prediction.

    Args:
        target: programs of one device.
        trained: programs of other devices.
        least: programs in common below which a device is left out.
    """
    own, found = _times(target), {}
    for number, device in enumerate(trained.devices):
        other = _times(trained.take(trained.device == number))
        common = [key for key in own if key in other]
        if len(common) < least:
            continue
        seconds = np.array([other[key] for key in common])
        ratio = np.array([own[key] for key in common]) / seconds
        error = np.abs(float(np.median(ratio)) / ratio - 1)
        found[device.name] = Copied(
            len(common), float(np.median(ratio)), float(error.mean()), float(np.median(error))
        )
    return found


def _times(table: ProgramTable) -> dict[tuple[str, bytes], float]:
    """Median seconds by task and leaves."""
    seconds: dict[tuple[str, bytes], list[float]] = defaultdict(list)
    for row, task in enumerate(table.task.tolist()):
        leaves = table.leaves[table.offsets[row] : table.offsets[row + 1]]
        digest = hashlib.blake2b(leaves.tobytes(), digest_size=16).digest()
        seconds[task, digest].append(float(table.latency_s[row]))
    return {key: float(np.median(values)) for key, values in seconds.items()}


def main(arguments: Iterable[str] | None = None) -> None:
    """Print a line of JSON for each target."""
    parser = argparse.ArgumentParser(description="Fine-tuning on few tasks of a new device.")
    parser.add_argument("--data", action="append", required=True, type=Path)
    parser.add_argument(
        "--target", required=True, nargs="+", help="devices, each by its name or the end of it"
    )
    parser.add_argument(
        "--hold-out", nargs="*", default=[],
        help="chips, devices or families that nothing is fitted on either: a chip's other "
        "instruction sets and sessions say much of a target",
    )  # fmt: skip
    parser.add_argument("--counts", nargs="+", type=int, default=[10, 30, 100])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--folds", type=int, default=1, help="fifths of the tasks tested, 1 to 5")
    parser.add_argument("--seed", type=int, default=0, help="of the fit without the targets")
    parser.add_argument("--networks", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where networks are trained")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if not 1 <= options.folds <= TASK_FOLDS:
        raise SpecError("--folds", got=options.folds, expected=f"1 to {TASK_FOLDS}")
    table = read_programs(options.data, max_spread=TRAINING_SPREAD).table
    names = [item.name for item in table.devices]
    chosen = [_named(names, target) for target in options.target]
    trained = without(table, [names[number] for number in chosen] + options.hold_out)
    # Groups of families kept out are for networks and intervals, of which trees alone need none.
    model = ProgramPredictor(
        networks=options.networks, groups=4 if options.networks else 0,
        torch_device=options.device, seed=options.seed,
    ).fit(trained)  # fmt: skip
    for number in chosen:
        target = table.take(table.device == number)
        found = {
            "target": names[number], "held_out": options.hold_out,
            "copied": {k: v._asdict() for k, v in copied_errors(target, trained).items()},
            **transfer_errors(
                model, target, options.counts, draws=options.draws, fold_count=options.folds
            ),
        }  # fmt: skip
        print(json.dumps(found), flush=True)


def _named(names: Sequence[str], target: str) -> int:
    """Number of the one device whose name ends so.

    Raises:
        SpecError: none, or more than one.
    """
    chosen = [number for number, name in enumerate(names) if name.endswith(target)]
    if len(chosen) != 1:
        raise SpecError("--target", got=target, expected="one of " + ", ".join(names))
    return chosen[0]


if __name__ == "__main__":
    try:
        main()
    except ForeplanError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
