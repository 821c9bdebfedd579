"""Folds of measured programs, by rule: equal data, equal folds, on every machine.

=============  ===================================================================================
``family``     one fold a network family f: test = programs of tasks that f's networks call,
               training = all others. A task that two families call is in both tests and, whenever
               either is held out, in no training set. Programs of no family, those of
               synthetic tasks, are in every training set and in no test
``task``       five folds: blake2b(task key, 8 bytes) modulo 5
``chip``       one fold a chip: all its slices and instruction sets together
``every-fifth``  CDMPP's easier split: labels of a device sorted, every fifth program is tested, so
               other schedules of the same task are trained on
=============  ===================================================================================

Validation and calibration are cut from training rows alone, by `validation_groups`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.errors import SpecError

SPLITS = ("family", "task", "chip", "every-fifth")

#: Families that choices of features, sizes and rates were made on. The others were scored once the
#: choices stood; results give both apart.
DEVELOPMENT_FAMILIES = ("mobilenet", "qwen", "unet", "vit")

#: Of the split by tasks.
TASK_FOLDS = 5
Mask = NDArray[np.bool_]


class Fold(NamedTuple):
    """One fold.

    Attributes:
        name: what is held out.
        train: rows to fit on (N).
        test: rows to score (N); never overlaps ``train``.
    """

    name: str
    train: Mask
    test: Mask


def families_of(table: ProgramTable) -> dict[str, Mask]:
    """Rows (N) that networks of a family call, by family."""
    names = sorted({name for joined in set(table.family) for name in joined.split("+") if name})
    parts = {joined: set(joined.split("+")) for joined in set(table.family)}
    return {
        name: np.array([name in parts[joined] for joined in table.family], dtype=np.bool_)
        for name in names
    }


def folds(table: ProgramTable, split: str) -> Iterator[Fold]:
    """Yield the folds of a split; see the module.

    Raises:
        SpecError: no such split, or one that leaves nothing to train on.
    """
    if split not in SPLITS:
        raise SpecError("--split", got=split, expected="one of " + ", ".join(SPLITS))
    if split == "family":
        tests = families_of(table)
    elif split == "chip":
        tests = {str(chip): table.chips == chip for chip in sorted(set(table.chips))}
    elif split == "task":
        numbers = np.array([_hashed(task) % TASK_FOLDS for task in table.task])
        tests = {f"task-{number}": numbers == number for number in range(TASK_FOLDS)}
    else:
        tests = {"every-fifth": _every_fifth(table)}
    if not tests:
        raise SpecError("--split", got=split, expected="programs that name their families")
    for name, test in tests.items():
        if not test.any():
            continue
        if test.all():
            raise SpecError(
                "--split", got=split, expected=f"something left to train on without {name}"
            )
        yield Fold(name, ~test, test)


def validation_groups(table: ProgramTable, count: int) -> NDArray[np.int64]:
    """Group of each training row (N), 0 to ``count`` - 1, such that a task is in one group.

    Families are dealt to groups, so a group's programs are unseen as a held-out family's are; a
    task of several families goes with the first of them. Rows of no family are in no group, -1:
    they are always trained on, as when a family is held out. Without families tasks are dealt.
    """
    names = np.array([joined.split("+")[0] for joined in table.family])
    if len(set(names) - {""}) < 2 * count:
        return np.array([_hashed("group/" + task) % count for task in table.task], dtype=np.int64)
    sizes = {str(name): int((names == name).sum()) for name in set(names) - {""}}
    load, group = [0] * count, {"": -1}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):  # greatest first, to the emptiest
        group[name] = min(range(count), key=lambda g: (load[g], g))
        load[group[name]] += sizes[name]
    return np.array([group[str(name)] for name in names], dtype=np.int64)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _every_fifth(table: ProgramTable) -> Mask:
    test = np.zeros(len(table), dtype=np.bool_)
    for number in range(len(table.devices)):
        rows = np.flatnonzero(table.device == number)
        test[rows[np.argsort(table.latency_s[rows], kind="stable")][4::5]] = True
    return test
