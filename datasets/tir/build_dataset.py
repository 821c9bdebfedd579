"""build_dataset: networks to a folder of measured programs (``foreplan dataset build``)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foreplan.datasets.storage import exclusive, folder_for
from foreplan.datasets.tir.measure import MeasureOptions, measure
from foreplan.datasets.tir.recorded import recorded_programs
from foreplan.datasets.tir.site import LocalSite, Site
from foreplan.datasets.tir.target import TargetDevice, target_device
from foreplan.datasets.tir.task import Task, merge
from foreplan.datasets.tir.tir_jsonl import read_tasks, write_tasks
from foreplan.errors import ForeplanError, SpecError

TASKS_FILE = "tasks.jsonl.xz"


def build_dataset(
    folder: Path,
    *,
    networks: Sequence[str] = (),
    tasks: Path | None = None,
    programs: Path | None = None,
    devices: Sequence[str] = ("cpu:threads=1",),
    options: MeasureOptions | None = None,
    chip: str | None = None,
    ray: str | None = None,
    rpc: str | None = None,
    target: str | None = None,
    seed: int = 0,
    extract_only: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Extract the networks' tasks, or take them from a file, then build and time their programs.

    Args:
        folder: where the dataset goes; an earlier run of the same call is continued.
        networks: names of the zoo; all of them by default. Ignored with ``tasks``.
        tasks: file of tasks, as ``folder/tasks.jsonl.xz`` of an earlier run.
        programs: folder of measured programs, which are built and timed once more in place of
            draws: again, or on a device that they were not timed on (`recorded_programs`).
        devices: one CPU, or GPUs of one kind that share the work.
        options: amounts and limits.
        chip: name of the silicon, where the system's own will not do; with ``ray`` only nodes that
            have it.
        ray: measure on a Ray cluster, ``local``, ``auto`` or ``HOST:PORT``; see `RaySite`.
        rpc: measure on boards of TVM's RPC tracker, ``HOST:PORT/KEY``; see `RpcSite`.
        target: with ``rpc``, TVM's target as JSON text.
        seed: of the order of tasks; with a time limit, which tasks are reached.
        extract_only: stop when the tasks are written; needs no device.
        progress: called with lines for people.

    Returns:
        Document with ``tasks``, ``refused`` (network to reason), and of the measured programs
        ``rows``, ``by_status``, ``measured_tasks``, ``files``, ``bytes``.

    Raises:
        MissingDataError: no TVM, no such file, GPU, cluster or board.
        SpecError: an unknown network or device, devices of two kinds, a folder that cannot be
            written or that another process writes.
    """
    options = options or MeasureOptions()
    if programs is not None and (networks or tasks is not None or extract_only):
        raise SpecError("--programs", got="tasks or networks with it", expected="one of them")
    # Devices come first: extraction takes minutes, and a wrong word needs none of them.
    site = None if extract_only else _site(devices, chip, options, ray, rpc, target)
    with (
        folder_for(folder), exclusive(folder / TASKS_FILE), site or contextlib.nullcontext()
    ):  # fmt: skip
        if programs is not None and site is not None:
            return _again(folder, programs, site, options, seed, progress)
        return _build(folder, networks, tasks, site, options, seed, progress)


def _again(
    folder: Path,
    programs: Path,
    site: Site,
    options: MeasureOptions,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    found, recorded = recorded_programs(programs, site.devices[0])
    random.Random(seed).shuffle(found)
    timed = measure(found, site, folder, options, recorded=recorded, progress=progress)
    return {"tasks": len(found), "refused": {}} | timed


def _build(
    folder: Path,
    networks: Sequence[str],
    tasks: Path | None,
    site: Site | None,
    options: MeasureOptions,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    refused: dict[str, str] = {}
    if tasks is not None:
        found = read_tasks(tasks)
        if not found:
            raise SpecError(str(tasks), got="no task", expected=f"a {TASKS_FILE} of an earlier run")
    elif (folder / TASKS_FILE).exists() and site is not None:
        found = read_tasks(folder / TASKS_FILE)
        _check_continued(folder / TASKS_FILE, found, networks, progress)
    else:
        found, refused = _extract(networks, progress)
        write_tasks(found, folder / TASKS_FILE)
    document: dict[str, Any] = {"tasks": len(found), "refused": refused}
    if site is None:
        return document
    random.Random(seed).shuffle(found)
    return document | measure(found, site, folder, options, progress=progress)


def _check_continued(
    path: Path, found: Sequence[Task], names: Sequence[str], progress: Callable[[str], None]
) -> None:
    """Say which of the networks asked for a file of an earlier run has no tasks of.

    Raises:
        SpecError: an unknown network, or none of them is there.
    """
    from foreplan.datasets.tir.networks import network

    there = {label.partition("/")[0] for task in found for label in task.calls}
    missing = [name for name in names if network(name).name not in there]
    if missing and len(missing) == len(names):
        raise SpecError(
            "--network", got=", ".join(missing),
            expected=f"networks of {path}, which is continued: {', '.join(sorted(there)[:8])}",
            fix="measure others into another folder",
        )  # fmt: skip
    if missing:
        progress(f"no tasks of {', '.join(missing)} in {path}, which is continued")


def _site(
    devices: Sequence[str],
    chip: str | None,
    options: MeasureOptions,
    ray: str | None,
    rpc: str | None,
    target: str | None,
) -> Site:
    if target is not None and rpc is None:
        raise SpecError("--target", got=target, expected="--rpc, or a --device to derive it from")
    if ray is None and rpc is None:
        return LocalSite(_targets(devices, chip), options.builders, options.timer_core)
    if ray is not None and rpc is not None:
        raise SpecError("--ray and --rpc", got="both", expected="one")
    if len(devices) > 1:
        raise SpecError("device", got=list(devices), expected="one name, for every machine")
    if rpc is not None:
        from foreplan.datasets.tir.rpc_site import RpcSite, Tracker

        tracker = Tracker.parse(rpc)
        return RpcSite(tracker, devices[0], chip=chip, target=target, builders=options.builders)
    from foreplan.datasets.tir.ray_site import RaySite

    return RaySite(str(ray), devices[0], builders=options.builders, chip=chip)


def _targets(devices: Sequence[str], chip: str | None) -> list[TargetDevice]:
    """The devices to measure on, all alike."""
    targets = [target_device(name, chip=chip) for name in devices]
    if len({target.target for target in targets}) > 1 or (
        targets[0].kind == "llvm" and len(targets) > 1
    ):
        raise SpecError("device", got=list(devices), expected="one CPU, or GPUs of one kind")
    return targets


def _extract(
    names: Sequence[str], progress: Callable[[str], None]
) -> tuple[list[Task], dict[str, str]]:
    from foreplan.datasets.tir.extract import extract
    from foreplan.datasets.tir.networks import network, zoo

    found: list[Task] = []
    refused: dict[str, str] = {}
    for item in [network(name) for name in names] if names else list(zoo().values()):
        for shape in item.shapes:
            label = item.label(shape)
            try:
                found = merge([*found, *extract(item, shape)])
            except ForeplanError as error:
                refused[label] = str(error)
            progress(f"{label}: {len(found)} tasks so far")
    if not found:
        raise SpecError("networks", got=list(names), expected="at least one that can be captured")
    return found, refused
