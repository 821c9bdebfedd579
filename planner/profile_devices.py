"""`profile_devices`: measure devices of this host, several at a time where they share nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foreplan.cost_models.passes.host_measuring import measure_host
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.datasets.timing.measuring import Worker
from foreplan.datasets.timing.profiling import Progress, measure_profile
from foreplan.errors import MissingDataError
from foreplan.planner.steps import told_step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

#: Cores for a GPU's process, which issues all the time, and for what runs beside it (chosen).
_CORES_PER_GPU = 2


class _Stopped(Exception):
    """Another device's measuring has ended by an error, or by Ctrl-C."""


def profile_devices(
    programs: Mapping[DeviceName, Sequence[Program]], paths: Mapping[DeviceName, Path], *,
    quick: bool, console: Console, replace: bool = False,
) -> None:  # fmt: skip
    """Measure each device and write its profile; what its file has already is kept.

    Whole GPUs are measured at the same time where each has cores of its own. Processors and slices
    of one GPU share caches, memory and power, so that each is alone.

    Args:
        programs: of each device.
        paths: of the profiles.
        quick: one round instead of two.
        console: shows progress.
        replace: begin anew where another machine's profile has the name.

    Raises:
        MissingDataError: a device cannot be measured here.
        SpecError: a profile that is there is another machine's.
    """
    stop = threading.Event()
    with _bar(console) as bar:

        def timed(device: DeviceName) -> Profile:
            return _timed(
                device, programs[device], paths[device], quick, console, bar, stop=stop,
                worker=None, replace=replace,
            )  # fmt: skip

        for group in _at_once(programs):
            with ThreadPoolExecutor(len(group)) as pool:
                waiting = [pool.submit(timed, device) for device in group]
                try:
                    for one in wait(waiting, return_when=FIRST_EXCEPTION).done:
                        one.result()
                except BaseException:
                    stop.set()  # leaving the pool waits for the others' current measurement
                    raise


def profile_device(
    device: DeviceName, programs: Sequence[Program], *, path: Path, quick: bool, console: Console,
    worker: Callable[[DeviceName], Worker] | None = None, replace: bool = False,
) -> Profile:  # fmt: skip
    """Measure one device, by ``worker``'s process or one of its own; see `profile_devices`."""
    with _bar(console) as bar:
        return _timed(
            device, programs, path, quick, console, bar,
            worker=None if worker is None else worker(device), stop=None, replace=replace,
        )  # fmt: skip


def profile_hosts(paths: Mapping[DeviceName, Path], *, console: Console) -> None:
    """Add what calls take the host of each GPU to its profile, which ``predict --profile`` reads.

    GPUs of one kind have the same host, so that half a minute is spent once. Where it cannot be
    measured, a line says so, and a launch is priced by the device's figure.

    Args:
        paths: of the devices' profiles.
        console: shows progress.

    Raises:
        SpecError: a profile that cannot be read or written.
    """
    profiles = {d: Profile.load(path) for d, path in paths.items() if d.kind == "cuda"}
    hosts = {_board(p): p.host for p in profiles.values() if p.host is not None}
    for device, profile in profiles.items():
        if profile.host is not None:
            continue
        if _board(profile) not in hosts:
            try:
                with told_step(console, f"{device}: what calls take its host"):
                    hosts[_board(profile)] = measure_host(device)
            except MissingDataError as error:
                console.print(str(error))
                continue
        profile.model_copy(update={"host": hosts[_board(profile)]}).save(paths[device])


@contextmanager
def _bar(console: Console) -> Iterator[Bar]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


def _at_once(devices: Iterable[DeviceName]) -> list[list[DeviceName]]:
    """Neighbours in their order that may be measured at the same time."""
    room = max(1, len(os.sched_getaffinity(0)) // _CORES_PER_GPU)
    groups: list[list[DeviceName]] = []
    for device in devices:
        last = groups[-1] if groups else []
        alike = [*last, device]
        whole = all(one.kind == "cuda" and one.sms is None for one in alike)
        if last and whole and len(alike) <= room and len({d.index for d in alike}) == len(alike):
            last.append(device)
        else:
            groups.append([device])
    return groups


def _timed(
    device: DeviceName, programs: Sequence[Program], path: Path, quick: bool, console: Console,
    bar: Bar, *, worker: Worker | None, stop: threading.Event | None, replace: bool,
) -> Profile:  # fmt: skip
    task = bar.add_task(str(device), total=None)

    def show(progress: Progress) -> None:
        if stop is not None and stop.is_set():
            raise _Stopped
        bar.update(task, completed=progress.done, total=progress.total)
        if progress.message:
            console.print(progress.message)

    profile = measure_profile(
        device, programs, path, rounds=1 if quick else 2, on_progress=show, worker=worker,
        replace=replace,
    )  # fmt: skip
    bar.remove_task(task)
    failed = [row for row in profile.rows if row.status == "failed"]
    if profile.rows:
        console.print(f"{device}: {len(profile.rows)} programs" + _failures(failed))
    return profile


def _failures(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return f", {len(rows)} failed, the first, {rows[0].program()}, by {rows[0].error}"


def _board(profile: Profile) -> tuple[str, ...]:
    """What two devices of a host have in common if calls take it the same time."""
    device = profile.device
    return device.kind, device.chip, *(f"{k} {v}" for k, v in sorted(profile.software.items()))
