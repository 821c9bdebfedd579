"""Held-out errors of the program predictor, its ablations and its baselines.

Run as ``python -m foreplan.cost_models.programs.program_crossval --data FOLDER [--data FOLDER ...]
-o OUT``, for CDMPP on a machine without TVM as ``--table FILE`` (`released_table`) in place of
``--data``. Every fold's predictions are written as soon as they are made, so a run that is stopped
loses nothing: started again it goes on, and ``--report`` prints tables of what is there. Models are
fitted on a fold's training rows alone; the predictor cuts its own validation from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foreplan.cost_models.programs.baselines import (
    BASELINES,
    CdmppReleased,
    fit_cdmpp_together,
)
from foreplan.cost_models.programs.baselines.cdmpp_training import CYCLE
from foreplan.cost_models.programs.baselines.released_table import ENCODER, read_as_released
from foreplan.cost_models.programs.program_data import read_programs
from foreplan.cost_models.programs.program_fitting import fit_together
from foreplan.cost_models.programs.program_folds import SPLITS, Fold, folds
from foreplan.cost_models.programs.program_predictor import ProgramPredictor
from foreplan.cost_models.programs.program_store import read_table
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets.storage import folder_for, write_atomically
from foreplan.datasets.torch_device import usable
from foreplan.errors import ForeplanError, SpecError

#: Settings of the predictor by name: itself, its halves, and networks without one thing each.
VARIANTS: dict[str, dict[str, Any]] = {
    "foreplan": {},
    "trees": {"networks": 0},
    "networks": {"rounds": 0},
    "no-position": {"rounds": 0, "positional": False},
    "no-bound": {"rounds": 0, "bounded": False},
    "no-cmd": {"rounds": 0, "cmd_weight": 0.0},
}
#: CDMPP's network on our leaf vectors, not on those of its release.
_OUR_LEAVES = "cdmpp-our-leaves"
#: CDMPP with the discrepancies that its release has behind options.
_DISCREPANCIES = {"cdmpp-mmd": "mmd", "cdmpp-cmd": "cmd"}
#: Baselines without random choices of weight.
_ONCE = ("roofline", "xgboost")
_RELEASED = ("cdmpp", *_DISCREPANCIES)
_ON_DEVICE = ("mlp", "tree_lstm", *_RELEASED, _OUR_LEAVES)
#: Steps of CDMPP's networks between two looks at their error (as in its release).
_WATCH = 1000
#: Training programs, at most, that those looks are at.
_TRAINED = 2048


class Job(NamedTuple):
    """One fit.

    Attributes:
        split: of `program_folds`.
        fold: held out and trained on.
        model: one of `VARIANTS` or a baseline.
        seed: of the model.
    """

    split: str
    fold: Fold
    model: str
    seed: int

    @property
    def name(self) -> str:
        """File that the fit's predictions go to, without the ending."""
        return f"{self.split}__{self.fold.name}__{self.model}__{self.seed}"


def jobs(
    table: ProgramTable, splits: Sequence[str], models: Sequence[str], seeds: Sequence[int]
) -> Iterator[Job]:
    """Yield the fits, those of the first seed first; those without random weights have no other."""
    for number, seed in enumerate(seeds):
        for model in models:
            if number and model in _ONCE:
                continue
            for split in splits:
                for fold in folds(table, split):
                    yield Job(split, fold, model, seed)


def make_model(
    name: str,
    *,
    seed: int,
    device: str,
    epochs: int | None,
    threads: int,
    groups: int | None = None,
) -> Any:
    """An unfitted model.

    Raises:
        SpecError: no such model.
    """
    if name in VARIANTS:
        chosen: dict[str, Any] = {**VARIANTS[name], "torch_device": device, "threads": threads}
        if epochs:
            chosen["epochs"] = epochs
        if groups is not None:
            chosen["groups"] = groups
        return ProgramPredictor(seed=seed, **chosen)
    more = (_OUR_LEAVES, *_DISCREPANCIES)
    if name not in (*BASELINES, *more):
        raise SpecError(
            "--models", got=name,
            expected="one of " + ", ".join([*VARIANTS, *sorted(BASELINES), *more]),
        )  # fmt: skip
    settings: dict[str, Any] = {"torch_device": device} if name in _ON_DEVICE else {}
    if name == "xgboost":
        settings["threads"] = threads
    if epochs and name in _ON_DEVICE:
        settings["epochs"] = epochs
    if name in _DISCREPANCIES:
        settings["discrepancy"] = _DISCREPANCIES[name]
    return BASELINES["cdmpp" if name in more else name](seed=seed, **settings)


def _of_device(table: ProgramTable, name: str) -> ProgramTable:
    """Programs of one device, and that device alone.

    Raises:
        SpecError: no such device in the data.
    """
    names = [device.name for device in table.devices]
    if name not in names:
        raise SpecError("--only", got=name, expected="one of " + ", ".join(names))
    number = names.index(name)
    own = table.take(table.device == number)
    return replace(own, device=own.device * 0, devices=(table.devices[number],))


def _as_released(table: ProgramTable, paths: Sequence[Path], only: str | None) -> ProgramTable:
    """The programs of a table with the leaves that CDMPP's release has.

    Raises:
        MissingDataError: no TVM.
        SpecError: a program that TVM cannot lower.
    """
    read = read_as_released(paths)
    found = _of_device(read, only) if only else read
    if not np.array_equal(found.task, table.task):
        raise SpecError("--data", got="other programs", expected="programs that TVM can lower")
    return found


def run(
    jobs: Sequence[Job], table: ProgramTable, models: Sequence[Any], folder: Path,
    max_spread: float, deadline: float = float("inf"), cycles: float = float("inf"),
) -> dict[str, float]:  # fmt: skip
    """Fit and score jobs of one model; noisy labels are tested but not trained on.

    The folds of a predictor are fitted together, and its halves are scored as well. So are CDMPP's:
    they end at the deadline (``time.monotonic``), or with the last whole cycle of their rate before
    it, or after so many cycles. On the way what they predict goes to ``early`` below the folder and
    their errors to their ``curve`` (steps, seconds, mean error of the test and of some training
    programs).

    Returns:
        Mean error of each job.
    """
    quiet = ~(table.spread > max_spread)
    tables = [table.take(job.fold.train & quiet) for job in jobs]
    begun = time.perf_counter()
    if all(isinstance(model, ProgramPredictor) for model in models):
        fit_together(models, tables)
    elif all(isinstance(model, CdmppReleased) for model in models):
        targets = [table.take(job.fold.test) for job in jobs]  # without looking at their labels
        curves: list[list[tuple[int, float, float, float]]] = [[] for _ in jobs]
        (folder / "early").mkdir(exist_ok=True)

        starts: list[float] = []  # of each cycle

        def watch(_: int) -> bool:
            now, steps = time.monotonic(), models[0].steps_
            ended = steps // CYCLE >= len(starts) > 0
            if ended or not starts:
                starts.append(now)
            last = len(starts) > cycles or (ended and now + starts[-1] - starts[-2] > deadline)
            late = last or now > deadline
            if late or ended or steps // _WATCH > (curves[0][-1][0] if curves[0] else 0) // _WATCH:
                spent = time.perf_counter() - begun
                for job, model, own, curve in zip(jobs, models, tables, curves, strict=True):
                    model.curve_ = curve
                    error = _score(job, table, model, folder / "early", len(own), spent)
                    some = own.take(np.arange(0, len(own), -(-len(own) // _TRAINED)))
                    trained = float(np.abs(model.predict(some) / some.latency_s - 1).mean())
                    curve.append((steps, round(spent, 1), error, trained))
            return late

        fit_cdmpp_together(models, tables, targets, on_epoch=watch)
    else:
        for model, own in zip(models, tables, strict=True):
            model.fit(own)
    fit_s = (time.perf_counter() - begun) / len(jobs)
    found = {}
    for job, model, own in zip(jobs, models, tables, strict=True):
        found[job.name] = _score(job, table, model, folder, len(own), fit_s)
        if job.model == "foreplan":
            for half, weight in (("trees", 0.0), ("networks", 1.0)):
                other = copy(model)
                other.weight_ = weight
                _score(job._replace(model=half), table, other, folder, len(own), fit_s)
    return found


def _score(
    job: Job, table: ProgramTable, model: Any, folder: Path, train_rows: int, fit_s: float
) -> float:
    test, begun = table.take(job.fold.test), time.perf_counter()
    low = high = None
    if hasattr(model, "predict_interval"):
        predicted, low, high = model.predict_interval(test)
    else:
        predicted = model.predict(test)
    rows = np.flatnonzero(job.fold.test)
    arrays = {"rows": rows, "predicted_s": predicted}
    if low is not None and high is not None and np.isfinite(low).all():
        arrays |= {"low_s": low, "high_s": high}
    facts = {
        "split": job.split, "fold": job.fold.name, "model": job.model, "seed": job.seed,
        "train_rows": train_rows, "fit_s": fit_s, "predict_s": time.perf_counter() - begun,
        "samples_per_s": [n.samples_per_s for n in getattr(model, "networks_", [model])
                          if hasattr(n, "samples_per_s")],
        "weight": getattr(model, "weight_", None), "curve": getattr(model, "curve_", None),
        "validation": getattr(model, "card_", {}).get("validation"),
    }  # fmt: skip
    np.savez_compressed(folder / f"{job.name}.part.npz", **arrays)
    (folder / f"{job.name}.part.npz").replace(folder / f"{job.name}.npz")
    write_atomically(folder / f"{job.name}.json", json.dumps(facts) + "\n")
    return float(np.abs(predicted / test.latency_s - 1).mean())


def _batches(missing: Sequence[Job], together: int) -> Iterator[list[Job]]:
    """Jobs of one model and seed, at most so many at once."""
    groups: dict[tuple[str, int], list[Job]] = {}
    for job in missing:
        groups.setdefault((job.model, job.seed), []).append(job)
    for group in groups.values():
        for at in range(0, len(group), together):
            yield group[at : at + together]


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the folds that are missing, within the time limit; then print the report."""
    parser = argparse.ArgumentParser(description="Held-out errors of program predictors.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", action="append", type=Path)
    source.add_argument("--table", type=Path, help="programs as CDMPP's release describes them")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--splits", nargs="+", default=["family"], choices=SPLITS)
    parser.add_argument("--models", nargs="+", default=["foreplan"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folds", nargs="+", help="only these, by name")
    parser.add_argument("--only", help="programs of this device alone, by name")
    parser.add_argument("--device", default="cpu", help="where networks are trained, as cuda")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, help="fits for the interval; 0 for none, trees alone")
    parser.add_argument("--epochs", type=int, help="of networks, for a quick look")
    parser.add_argument("--cycles", type=int, help="of CDMPP's rate, at most")
    parser.add_argument("--max-spread", type=float, default=0.5, help="of training labels")
    parser.add_argument("--together", type=int, default=1, help="folds that are fitted at once")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--report", action="store_true", help="only print what is there")
    options = parser.parse_args(None if arguments is None else list(arguments))
    _check(options)
    with folder_for(options.output):
        _work(options)


def _check(options: argparse.Namespace) -> None:
    """Refuse what no fit can be made of, before programs are read.

    Raises:
        SpecError: a count below one, no time, no such model or device, or a model that wants other
            leaves than the table's.
    """
    other = sorted(set(options.models) - set(_RELEASED))
    if options.table and other and not options.report:
        raise SpecError("--models", got=other[0], expected="with --table " + ", ".join(_RELEASED))
    for name in ("threads", "together", "epochs", "cycles"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SpecError(f"--{name}", got=value, expected="at least 1")
    if not options.minutes > 0:
        raise SpecError("--minutes", got=options.minutes, expected="more than 0")
    for name in options.models:
        make_model(name, seed=0, device=options.device, epochs=None, threads=1)
    usable(options.device, "--device")


def _work(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + 60 * options.minutes
    released = None
    if options.table:
        table = released = read_table(options.table, ENCODER)
    else:
        table = read_programs(options.data).table
    if options.only:
        table = _of_device(table, options.only)
        released = table if options.table else None
    if options.device.startswith("cpu"):
        import torch

        torch.set_num_threads(options.threads)
    wanted = [] if options.report else [
        *jobs(table, options.splits, options.models, options.seeds)
    ]  # fmt: skip
    names = {job.fold.name for job in wanted}
    if wanted and options.folds and not names.issuperset(options.folds):
        expected = "among " + ", ".join(sorted(names))
        raise SpecError("--folds", got=options.folds, expected=expected)
    missing = [
        job
        for job in wanted
        if not (options.output / f"{job.name}.json").exists()
        and not (options.folds and job.fold.name not in options.folds)
    ]
    slowest: dict[str, float] = {}
    for batch in _batches(missing, options.together):
        name = batch[0].model
        if time.monotonic() + slowest.get(name, 0.0) > deadline:
            print("no time for " + ", ".join(job.name for job in batch), file=sys.stderr)
            continue
        begun = time.monotonic()
        models = [
            make_model(
                name, seed=job.seed, device=options.device, epochs=options.epochs,
                threads=options.threads, groups=options.groups,
            )
            for job in batch
        ]  # fmt: skip
        if name in _RELEASED and released is None:
            released = _as_released(table, options.data, options.only)
        own = released if name in _RELEASED and released is not None else table
        errors = run(
            batch, own, models, options.output, options.max_spread, deadline,
            options.cycles or float("inf"),
        )  # fmt: skip
        took = time.monotonic() - begun
        slowest[name] = max(took, slowest.get(name, 0.0))
        for job, error in errors.items():
            print(f"{job} {100 * error:.1f} % ({took:.0f} s)", file=sys.stderr, flush=True)
    from foreplan.cost_models.programs.program_report import report

    print(report(table, options.output))


if __name__ == "__main__":
    try:
        main()
    except ForeplanError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
