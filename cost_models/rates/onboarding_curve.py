"""How well a fit predicts the tasks of a device that it was not given, by their number and choice.

``python -m foreplan.cost_models.rates.onboarding_curve PROFILE [PROFILE ...]`` takes profiles with
many programs (plain or ``.xz``), splits each at random into a test third and a
pool, chooses tasks from the pool at random and by KMeans, fits, and prints the mean relative error
on the test third by family, beside the roofline, the rescaled roofline and (for several profiles)
the rows of the next profile, rescaled: the "nearest device". With ``--known PROFILE ...`` of other
chips also what their rates say without a task, and the fit that starts from them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.operator_rates import family
from foreplan.cost_models.rates.rate_model import RateModel
from foreplan.cost_models.rates.rescaled_roofline import RescaledRoofline
from foreplan.cost_models.rates.task_choice import choose_tasks
from foreplan.cost_models.roofline import RooflineSource
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program
from foreplan.errors import told

Floats = NDArray[np.float64]

#: Numbers of tasks, and seeds of their choice.
COUNTS, SEEDS = (8, 16, 32, 64), range(3)
#: Part of the rows that is only tested on.
_TEST = 1 / 3

Rows = tuple[Device, list[Program], Floats]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("--known", nargs="*", default=[], type=Path)
    asked = parser.parse_args(arguments)
    tables = [read_rows(path) for path in asked.profiles]
    rates = KnownRates.fit([read_rows(path) for path in asked.known]) if asked.known else None
    for k, rows in enumerate(tables):
        other = tables[(k + 1) % len(tables)] if len(tables) > 1 else None
        known = None if rates is None else rates.without({rows[0].chip})
        print(f"\n{rows[0].name}, {len(rows[1])} programs\n")
        print(markdown(curve(rows, other, known)))


def read_rows(path: Path) -> Rows:
    """Device, programs and median seconds of the rows of a profile that ran.

    Raises:
        SpecError: the file cannot be read, or is no profile.
    """
    profile = Profile.load(path)
    rows = [row for row in profile.rows if row.status == "ok"]
    seconds = np.array([row.median_s for row in rows], dtype=np.float64)
    return profile.device, [row.program() for row in rows], seconds


def curve(
    rows: Rows, other: Rows | None = None, known: KnownRates | None = None
) -> dict[str, dict[str, float]]:
    """Mean relative error by family, and median and time-weighted error of all, a method a row."""
    device, programs, seconds = rows
    order = np.random.default_rng(0).permutation(len(programs))
    cut = round(len(order) * _TEST)
    test, pool = np.sort(order[:cut]), np.sort(order[cut:])
    asked = [programs[i] for i in test]
    source = RooflineSource(device)
    bare = [source.estimate(program, device.name) for program in asked]
    found = {
        "roofline": [np.array([np.nan if b is None else b.mean_s for b in bare])],
    }
    models: dict[str, Callable[[], RescaledRoofline | RateModel]] = {
        "rescaled": lambda: RescaledRoofline(device), "fitted": lambda: RateModel(device),
    }  # fmt: skip
    if known is not None:
        shipped = known.on(device)
        shipped(programs)
        found["none, known"] = [shipped(asked)]
        models["known"] = lambda: RateModel(device, shipped)
    for count in COUNTS:
        for choice in ("random", "KMeans"):
            for seed in SEEDS:
                tasks = _tasks(programs, pool, device, count, choice, seed)
                given = [programs[i] for i in tasks]
                for name, model in models.items():
                    fitted = model().fit(given, seconds[tasks])
                    found.setdefault(f"{count} {choice}, {name}", []).append(fitted.predict(asked))
                if other is not None and choice == "KMeans":
                    copied = _copied(given, seconds[tasks], asked, other)
                    found.setdefault(f"{count} {choice}, other slice", []).append(copied)
    return {name: _errors(asked, seconds[test], predictions) for name, predictions in found.items()}


def markdown(table: dict[str, dict[str, float]]) -> str:
    """The errors in percent."""
    columns = list(dict.fromkeys(name for row in table.values() for name in row))
    lines = ["| tasks | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in table.items():
        cells = (f"{100 * row[c]:.0f}" if np.isfinite(row[c]) else "–" for c in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _tasks(
    programs: list[Program], pool: NDArray[np.int64], device: Device, count: int, choice: str,
    seed: int,
) -> NDArray[np.int64]:  # fmt: skip
    if choice == "random":
        rng = np.random.default_rng(seed)
        return np.sort(rng.choice(pool, min(count, len(pool)), replace=False))
    chosen = choose_tasks([programs[i] for i in pool], device, count, seed=seed)
    return np.asarray(pool[chosen])


def _copied(tasks: list[Program], seconds: Floats, asked: list[Program], other: Rows) -> Floats:
    """Another device's times, rescaled by the median ratio on the tasks of the same family."""
    times = dict(zip(other[1], other[2], strict=True))
    ratios: dict[str, list[float]] = {}
    for program, time in zip(tasks, seconds, strict=True):
        if program in times:
            for key in (family(program), ""):
                ratios.setdefault(key, []).append(float(np.log(time / times[program])))
    scale = {key: float(np.exp(np.median(values))) for key, values in ratios.items()}
    return np.array([
        times[p] * scale.get(family(p), scale.get("", 1.0)) if p in times else np.nan
        for p in asked
    ])  # fmt: skip


def _errors(asked: list[Program], truth: Floats, predictions: list[Floats]) -> dict[str, float]:
    kinds = np.array([family(program) for program in asked])
    away = np.array([np.abs(predicted / truth - 1) for predicted in predictions])
    known = np.isfinite(away[0])
    found = {
        "all": float(np.nanmean(away)),
        "median": float(np.nanmedian(away)),
        "by time": float((away * truth)[:, known].sum() / (len(away) * truth[known].sum())),
    }
    for kind in sorted(set(kinds)):
        found[f"{kind} ({(kinds == kind).sum()})"] = float(np.nanmean(away[:, kinds == kind]))
    return found


if __name__ == "__main__":
    with told():
        main()
