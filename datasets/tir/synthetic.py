"""Synthetic tasks: fused operators of random small graphs, to train on beside those of networks.

More tasks lower the error on networks that were not trained on, more programs of the same task
hardly do, and there are only as many networks as there are; what synthetic ones are worth stands in
``docs/results/programs.md``. The
graphs go the same road as networks do (torch.export, Relax, fusion). A synthetic task belongs to no
family, so it is in every training set and in no test of held-out families; tasks that a network
calls are left out, or a family's tasks would be trained on while it is held out.

Run as ``python -m foreplan.datasets.tir.synthetic -o tasks.jsonl.xz --without NETWORK_TASKS``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from foreplan.datasets.storage import exclusive
from foreplan.datasets.tir.extract import extract_module
from foreplan.datasets.tir.records import read_records
from foreplan.datasets.tir.task import Task, merge
from foreplan.datasets.tir.tir_jsonl import read_tasks, write_tasks
from foreplan.datasets.tir.toolchain import load_tvm
from foreplan.errors import ForeplanError, SpecError

#: Largest module text of a task. Beyond it stand graphs whose index arithmetic took over.
_MOST_TEXT = 150_000


def synthetic_tasks(
    count: int,
    *,
    seed: int = 0,
    known: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Task]:
    """Return distinct tasks of random graphs.

    Args:
        count: at least so many, and no more than the last graph's beyond it.
        seed: equal seed and versions of torch and TVM, equal tasks.
        known: task keys that are left out: those of networks.
        progress: called with a line for people, now and then.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version.
    """
    load_tvm()  # before torch, see there
    from foreplan.datasets.tir._synthetic_blocks import draw

    found: dict[str, Task] = {}
    refused: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    number = 0
    while len(found) < count:
        module, inputs, kind, trained = draw(seed * 1_000_003 + number)
        label = f"synthetic/seed={seed},graph={number}"
        number += 1
        try:
            if trained:
                from foreplan.datasets.tir.backward import gradient

                module, inputs = gradient(module, inputs)
                label += "/training"
            tasks = extract_module(module, inputs, label, family=None)
        except ForeplanError:
            refused[kind + ("/training" if trained else "")] += 1
            continue
        for task in tasks:
            if task.key not in known and len(task.module) <= _MOST_TEXT:
                kinds[kind] += task.key not in found
                found[task.key] = merge([found[task.key], task])[0] if task.key in found else task
        if number % 50 == 0:
            progress(f"{len(found)} tasks of {number} graphs, refused {dict(refused)}")
    progress(f"{len(found)} tasks of {number} graphs: {dict(kinds)}, refused {dict(refused)}")
    return list(found.values())


def known_keys(paths: Sequence[Path]) -> set[str]:
    """Keys of the tasks in files of tasks and in folders of measured programs.

    Raises:
        MissingDataError: no such file.
        SpecError: a file of another kind.
    """
    keys: set[str] = set()
    for path in paths:
        if path.is_dir() or path.suffix == ".parquet":
            keys.update(record.task_key for record in read_records(path))
        else:
            keys.update(task.key for task in read_tasks(path))
    return keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="tasks or programs")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    try:
        if chosen.count < 1:
            raise SpecError("--count", got=chosen.count, expected="at least 1")
        known = known_keys(chosen.without)
        # A path that cannot be written is found before the work.
        with exclusive(chosen.output, file=True):
            tasks = synthetic_tasks(
                chosen.count, seed=chosen.seed, known=known,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )  # fmt: skip
            write_tasks(tasks, chosen.output)
    except ForeplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
