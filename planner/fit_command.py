"""What ``foreplan profile --fit`` does with one device: time a few tasks, fit the predictor to it.

Which tasks is decided from the device's figures alone: by KMeans over what the workload needs, each
program weighed by the time that it stands for (`choose_tasks`). A later call for another workload
adds its own tasks, where the earlier ones do not cover them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.device_fit import DeviceFit, fit_path
from foreplan.cost_models.operator_rates import rate_terms
from foreplan.cost_models.task_choice import choose_tasks
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program
from foreplan.errors import SpecError

#: Tasks that one workload gets unless the user says otherwise.
TASKS = 32

#: No candidate weighs less than this share of the mean one: a plan may need any of them.
_LEAST_WEIGHT = 0.05


def fit_device(
    candidates: Sequence[Program],
    path: Path,
    count: int,
    measure: Callable[[Sequence[Program]], Profile],
) -> DeviceFit:
    """Time tasks of a device, add them to its profile, and write the fit beside it.

    Args:
        candidates: what to choose from.
        path: of the device's profile.
        count: tasks to time at most; those of an earlier fit to the same device stay.
        measure: times programs, adds them to the profile at ``path`` and gives that.

    Raises:
        SpecError: fewer than two tasks asked for, or a file that cannot be read or written.
        MissingDataError: the device cannot be measured here.
    """
    if count < 2:
        raise SpecError("--tasks", got=count, expected="at least 2")
    figures = Profile.load(path) if path.exists() else measure(())
    earlier = _earlier(fit_path(path), figures)
    chosen = choose_tasks(
        candidates, figures.device, count, weights=importance(candidates, figures.device),
        known=[] if earlier is None else earlier.programs,
    )  # fmt: skip
    profile = measure([candidates[index] for index in chosen])
    earlier = _earlier(fit_path(path), profile)
    rows = {} if earlier is None else {row.program(): row for row in earlier.tasks}
    for index in chosen:
        rows[candidates[index]] = profile.by_program[candidates[index]]
    fit = DeviceFit.of(profile.device, list(rows.values()), profile.software)
    fit.save(fit_path(path))
    return fit


def importance(programs: Sequence[Program], device: Device) -> NDArray[np.float64]:
    """How much each candidate's price matters to a plan (N,), 1 on average.

    The time of the fastest candidate that computes the same from the same stored weights, times
    how near this one comes to it, by the physics at full rate: kernels that no plan would choose
    matter little, and so do short programs. The square root, because a plan runs short programs
    more often than long ones.
    """
    seconds = rate_terms(programs, device).sum(axis=1)
    best: dict[object, float] = {}
    keys = [_competitors(program) for program in programs]
    for key, time in zip(keys, seconds, strict=True):
        best[key] = min(best.get(key, np.inf), float(time))
    fastest = np.array([best[key] for key in keys])
    weights = np.sqrt(fastest * fastest / seconds)
    weights = weights / weights.mean() + _LEAST_WEIGHT
    return np.asarray(weights / weights.mean())


def fit_line(fit: DeviceFit) -> str:
    """Tasks and errors in a line."""
    errors: Mapping[str, float] = fit.errors().get("all", {})
    said = ", ".join(f"{name} {100 * errors[name]:.0f} %" for name in errors if name != "tasks")
    return (
        f"{fit.device.name}: fitted to {len(fit.programs)} tasks; mean error of a task predicted "
        f"from the others: {said}"
    )


def _competitors(program: Program) -> object:
    """What programs share of which a plan chooses one by its time."""
    if program.op in ("linear", "attention"):
        return program.op, program.sizes, program.variant.storage
    return program


def _earlier(path: Path, profile: Profile) -> DeviceFit | None:
    """The fit at a path if it is of the same device, chip and software."""
    if not path.exists():
        return None
    try:
        fit = DeviceFit.load(path)
    except SpecError:  # of another version: measured anew
        return None
    mine, its = profile.device, fit.device
    same = (its.name, its.chip, its.isa) == (mine.name, mine.chip, mine.isa)
    return fit if same and dict(fit.software) == dict(profile.software) else None
