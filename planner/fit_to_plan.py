"""What ``foreplan profile --fit`` does for one job: time the operators that its plan rests on.

A first part of the tasks is chosen by KMeans (`FittedDevice.fit`). Then the job is planned from the
prices that the fits give, the programs that the plan and its rivals rest on and that are least
known are timed (`plan_tasks`), the fits are made anew, and so on, a few rounds. Each round leaves
its fits in the folder, so that a run that was interrupted goes on from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.sources.device_fit import DeviceFit
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program
from foreplan.datasets.quantity import format_seconds
from foreplan.datasets.specs import StrictModel
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.base import Planner, Problem
from foreplan.planner.fit_command import FittedDevice
from foreplan.planner.plan_tasks import PlanTasks, plan_tasks
from foreplan.planner.registry import planner as find_planner

#: Part of the tasks that KMeans chooses before anything is planned, and how often more are chosen
#: (what plans are worth with them: docs/results/onboarding.md, "Tasks chosen for a plan").
FIRST, ROUNDS = 0.4, 3
#: No round starts later than this many seconds: a fit is promised within 10 minutes.
MOST_S = 480.0


@dataclass(frozen=True)
class Job:
    """What is to be planned from the fits.

    Attributes:
        kind: of planner.
        model: the model, or ``None`` where the planner needs none.
        workload: the planner's.
    """

    kind: str
    model: Model | None
    workload: StrictModel


def fit_to_plan(
    devices: Mapping[str, FittedDevice],
    job: Job,
    cluster: Callable[[], Cluster],
    count: int,
    *,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, DeviceFit]:
    """Time the tasks of devices that a job's plan needs most; write the fits beside the profiles.

    Where the job cannot be planned on these devices, KMeans chooses all tasks.

    Args:
        devices: by the name of their profile's file; all in one folder.
        job: what is to be planned.
        cluster: the devices with their links; called once each device has a first fit.
        count: tasks of a device at most; those of an earlier fit count where the job needs them.
        tell: takes lines for the user: what the plan is like after each round.
        clock: seconds.

    Returns:
        The fits, by the name of the profile's file.

    Raises:
        SpecError: fewer than two tasks asked for, or a file that cannot be read or written.
        MissingDataError: a device cannot be measured here.
    """
    if count < 2:
        raise SpecError("--tasks", got=count, expected="at least 2")
    # One planner for all rounds: what it makes of the workload alone it makes once.
    planner = find_planner(job.kind)
    started, first = clock(), max(2, round(FIRST * count))
    fits = {name: _first(device, first) for name, device in devices.items()}
    where = cluster()
    folder = next(iter(devices.values())).path.parent
    needed = {name: set(device.candidates) for name, device in devices.items()}
    for left in range(ROUNDS, -1, -1):
        try:
            found = _plan_tasks(planner, job, where, folder, count)
        except (InfeasibleError, MissingDataError) as error:
            tell(f"no {job.kind} plan on these devices alone ({error}): KMeans chooses all tasks")
            more = max(2, count - first)
            return {name: device.fit(more) for name, device in devices.items()}
        tell(_plan_line(job, fits, found))
        chosen: dict[str, list[Program]] = {}
        for name, fit in fits.items():
            needed[name] |= found.asked[name]
            room = max(0, count - len(needed[name] & set(fit.tried)))
            chosen[name] = found.programs[name][: math.ceil(room / max(left, 1))]
        if left == 0 or not any(chosen.values()) or clock() - started > MOST_S:
            break
        for name, programs in chosen.items():
            if programs:
                fits[name] = devices[name].add(programs)
    return fits


def _first(device: FittedDevice, count: int) -> DeviceFit:
    """The fit to what KMeans chooses, or the one of an earlier run that had come so far."""
    earlier = device.earlier()
    if earlier is not None and len(set(earlier.tried) & set(device.candidates)) >= count:
        return earlier
    return device.fit(count)


def _plan_tasks(
    planner: Planner[Any, Any], job: Job, cluster: Cluster, folder: Path, count: int
) -> PlanTasks:
    """See `plan_tasks`; the fits are read as they are in the folder."""
    profiles = Profiles.of(cluster, folder)
    completed = profiles.completed(cluster)
    book = cost_book(
        completed, profiles, "predicted", given=planner.given(job.workload), issued=planner.issues
    )
    problem: Problem[Any] = Problem(job.model, completed, job.workload, book)
    return plan_tasks(planner, problem, profiles.fits, count)


def _plan_line(job: Job, fits: Mapping[str, DeviceFit], found: PlanTasks) -> str:
    tasks = " and ".join(str(len(fit.tasks)) for fit in fits.values())
    return (
        f"{job.kind} plan from {tasks} tasks: {format_seconds(found.total_s)}, "
        f"{found.timed:.0%} of it timed; the rest leaves it open by {found.spread:.1%}"
    )
