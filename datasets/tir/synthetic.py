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
MOST_TEXT = 150_000
#: Multiplications below which hardly any convolution is small enough to be drawn.
_LEAST_PRODUCTS = 1e6
#: Graphs without a task of the wanted names after which there is none: convention.
_PATIENCE = 100


def synthetic_tasks(
    count: int,
    *,
    seed: int = 0,
    known: Collection[str] = (),
    kinds: Collection[str] = (),
    most_products: float | None = None,
    named: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Task]:
    """Return distinct tasks of random graphs.

    Args:
        count: at least so many, and no more than the last graph's beyond it.
        seed: equal seed and versions of torch and TVM, equal tasks.
        known: task keys that are left out: those of networks.
        kinds: of graphs, as `_synthetic_blocks.KINDS` names them; all by default.
        most_products: most multiplications of a convolution or product; by default what a slow
            schedule does in a second on a core.
        named: only tasks with one of these in their names, which are those of their operators; a
            graph of convolutions and products also gives casts and layouts. All by default.
        progress: called with a line for people, now and then.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version, no such kind, or a hundred graphs without a task.
    """
    load_tvm()  # before torch, see there
    from foreplan.datasets.tir._synthetic_blocks import draw
    from foreplan.datasets.tir._synthetic_dice import MOST_PRODUCTS

    products = MOST_PRODUCTS if most_products is None else most_products

    found: dict[str, Task] = {}
    refused: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    number = 0
    while len(found) < count:
        module, inputs, kind, trained = draw(seed * 1_000_003 + number, kinds, products)
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
            wanted = not named or any(word in task.name for word in named)
            if wanted and task.key not in known and len(task.module) <= MOST_TEXT:
                drawn[kind] += task.key not in found
                found[task.key] = merge([found[task.key], task])[0] if task.key in found else task
        if not found and number >= _PATIENCE:
            raise SpecError(
                "--named", got=list(named), expected=f"names of tasks; none in {number} graphs"
            )
        if number % 50 == 0:
            progress(f"{len(found)} tasks of {number} graphs, refused {dict(refused)}")
    progress(f"{len(found)} tasks of {number} graphs: {dict(drawn)}, refused {dict(refused)}")
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
    parser.add_argument("--kinds", nargs="+", default=[], help="of graphs, as convolution linear")
    parser.add_argument("--most-products", type=float, help="multiplications of one, at most")
    parser.add_argument("--named", nargs="+", default=[], help="tasks so named, as conv matmul")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    try:
        if chosen.count < 1:
            raise SpecError("--count", got=chosen.count, expected="at least 1")
        if chosen.most_products is not None and not chosen.most_products >= _LEAST_PRODUCTS:
            raise SpecError(
                "--most-products", got=chosen.most_products, expected=f"at least {_LEAST_PRODUCTS}"
            )
        known = known_keys(chosen.without)
        # A path that cannot be written is found before the work.
        with exclusive(chosen.output, file=True):
            tasks = synthetic_tasks(
                chosen.count, seed=chosen.seed, known=known, kinds=chosen.kinds,
                most_products=chosen.most_products, named=chosen.named,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )  # fmt: skip
            write_tasks(tasks, chosen.output)
    except ForeplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
