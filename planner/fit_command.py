"""What ``foreplan profile --fit`` does with one device: time a few tasks, fit the predictor to it.

Which tasks is decided from the device's figures alone: by KMeans over what the workload needs, each
program weighed by the time that it stands for (`choose_tasks`). A later call for another workload
adds its own tasks, where the earlier ones do not cover them. `fit_to_plan` goes on from there for
one job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.rates.operator_rates import rate_terms
from foreplan.cost_models.rates.task_choice import choose_tasks
from foreplan.cost_models.sources.device_fit import DeviceFit, fit_path
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program
from foreplan.errors import SpecError

#: Tasks that one workload gets unless the user says otherwise.
TASKS = 32

#: No candidate weighs less than this share of the mean one: a plan may need any of them.
_LEAST_WEIGHT = 0.05


@dataclass(frozen=True)
class FittedDevice:
    """A device of this machine that a predictor is fitted to.

    Attributes:
        candidates: programs to choose tasks from.
        path: of the device's profile.
        measure: times programs, adds them to the profile at ``path`` and gives that.
        unseen: leave rows of this very chip out of what the shipped predictor knows.
    """

    candidates: Sequence[Program]
    path: Path
    measure: Callable[[Sequence[Program]], Profile]
    unseen: bool = False

    def fit(self, count: int) -> DeviceFit:
        """Time tasks chosen by KMeans, add them to the profile, and write the fit beside it.

        Args:
            count: tasks to time at most; those of an earlier fit to the same device stay.

        Raises:
            SpecError: fewer than two tasks asked for, or a file that cannot be read or written.
            MissingDataError: the device cannot be measured here.
        """
        check_count(count)
        figures = Profile.load(self.path) if self.path.exists() else self.measure(())
        earlier = self._of(figures)
        chosen = choose_tasks(
            self.candidates, figures.device, count,
            weights=importance(self.candidates, figures.device),
            known=[] if earlier is None else earlier.programs,
        )  # fmt: skip
        return self.add([self.candidates[index] for index in chosen])

    def add(self, programs: Sequence[Program]) -> DeviceFit:
        """Time these programs and fit to them and to the earlier tasks; see `fit`."""
        profile = self.measure(programs)
        earlier = self._of(profile)
        tried = {} if earlier is None else earlier.tried
        # What failed once may have run since; what ran stays as the fit has it.
        now = profile.by_program
        rows = {p: row if row.status == "ok" else now.get(p, row) for p, row in tried.items()}
        rows |= {program: profile.by_program[program] for program in programs}
        tasks = list(rows.values())
        fit = DeviceFit.of(profile.device, tasks, profile.software, unseen=self.unseen)
        fit.save(fit_path(self.path))
        return fit

    def earlier(self) -> DeviceFit | None:
        """The fit that is there, if it is of the device, chip and software of the profile."""
        return self._of(Profile.load(self.path)) if self.path.exists() else None

    def _of(self, profile: Profile) -> DeviceFit | None:
        path = fit_path(self.path)
        if not path.exists():
            return None
        try:
            fit = DeviceFit.load(path)
        except SpecError:  # of another version: measured anew
            return None
        mine, its = profile.device, fit.device
        same = (its.name, its.chip, its.isa) == (mine.name, mine.chip, mine.isa)
        return fit if same and dict(fit.software) == dict(profile.software) else None


def check_count(count: int) -> None:
    """Refuse a number of tasks that nothing can be fitted to.

    Raises:
        SpecError: fewer than two.
    """
    if count < 2:
        raise SpecError("--tasks", got=count, expected="at least 2")


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
