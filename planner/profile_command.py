"""What ``foreplan profile`` does: devices, links and contention of this host, into one folder.

``<device>.json`` holds a device's profile, ``<device>.fit.json`` the predictor fitted to it,
``links.json`` what ranks of the host do to each other, ``cluster.yaml`` puts all together. Every
file is written as soon as it is measured and found again by the next run, so that an interrupted
run loses the measurement it was in and nothing else.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.memory import show_bytes
from foreplan.cost_models.sources.calibration import calibration_path
from foreplan.cost_models.sources.device_fit import DeviceFit, fit_path
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import check_host
from foreplan.datasets.cluster_update import update
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program
from foreplan.datasets.quantity import Dimension, parse_quantity
from foreplan.datasets.ranks.links import (
    ANSWERED_S,
    SERVED_S,
    Links,
    connect_link,
    parse_endpoint,
    serve_link,
)
from foreplan.datasets.specs import dump_document, validate
from foreplan.datasets.storage import exclusive, folder_for, write_atomically
from foreplan.datasets.timing.host_memory import total_bytes
from foreplan.datasets.timing.measuring import Worker
from foreplan.datasets.timing.profile_grid import ProfileGrid
from foreplan.errors import SpecError
from foreplan.planner.api import PROFILED
from foreplan.planner.bubbles.shapes import bubbles_pass, bubbles_programs
from foreplan.planner.fit_command import FittedDevice, check_count, fit_line
from foreplan.planner.fit_to_plan import Job, fit_to_plan
from foreplan.planner.host_together import together
from foreplan.planner.load_workload import load_workload
from foreplan.planner.profile_devices import profile_device, profile_devices, profile_hosts
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.steps import told_step

if TYPE_CHECKING:
    from rich.console import Console


def profile_host(
    names: Sequence[str],
    output: Path,
    *,
    models: Sequence[str] = (),
    workload: str | None = None,
    purpose: str = "serving",
    memory: Sequence[str] = (),
    quick: bool = False,
    tasks: int | None = None,
    unseen: bool = False,
    host: str = "localhost",
    replace: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Measure devices of this host and how they are joined, and write the cluster.

    Where there is one, what it says of other devices stays, and what was written into it by hand.

    Args:
        names: devices; two unlike ones of this machine if empty, see `default_devices`.
        output: folder to write to, made if missing.
        models: measure the exact shapes of these instead of the generic grid.
        workload: of these shapes; required with ``models`` and unless ``serving``.
        purpose: kind of plans that the shapes are for: ``serving``, ``precision`` or ``bubbles``.
        memory: caps, ``SIZE`` for all devices or ``DEVICE=SIZE``.
        quick: one round instead of two.
        tasks: time this many of the programs alone, and fit the predictor to each device by them;
            with a workload and at most one model, those that a plan of it rests on (`fit_to_plan`).
        unseen: with ``tasks``, leave this very chip out of what the shipped predictor knows.
        host: name of this host in the cluster.
        replace: begin anew where another machine's profile has the name of a device's.
        console: shows progress.

    Returns:
        What was written, as JSON.

    Raises:
        SpecError: a device, model, size or path that is wrong, one that another process writes, a
            profile of another machine, or a cluster there that cannot be read.
        MissingDataError: a device cannot be measured here.
    """
    devices = [DeviceName.parse(name, "DEVICE") for name in names] or default_devices()
    for device in devices:
        if device.kind == "zoo":
            raise SpecError("DEVICE", got=str(device), expected="a device here: cpu:... or cuda:N")
    check_host(host, "--host")
    if tasks is not None:
        check_count(tasks)
    caps = _caps(memory, devices)
    described = {"devices": _entries(devices, caps, host)}
    # What cannot be written is refused before it is measured.
    _updated(output / "cluster.yaml", validate(Cluster, described, "--host and --memory"))
    count = len(devices)
    programs = {d: _programs(d, models, workload, purpose, count) for d in devices}
    profiles: dict[DeviceName, Profile] = {}
    fits: dict[DeviceName, DeviceFit] = {}
    paths = {device: output / f"{_slug(device)}.json" for device in devices}
    before = {device: _chip(path) for device, path in paths.items()} if replace else {}

    # A fit times too few programs of a step's passes. Precision plans then have what stands for
    # them (`host_together`), which bubbles do without.
    timed = tasks is None or purpose == "bubbles"
    passes = _passes(devices, workload, models, purpose) if timed else ()

    def joined() -> Cluster:
        profiles.update({device: Profile.load(path) for device, path in paths.items()})
        return _cluster(devices, profiles, caps, passes, output, host, console)

    # Two at a time would not only write the same files: each would slow what the other measures.
    with ExitStack() as stack, folder_for(output), exclusive(output / "cluster.yaml"):
        # A fit comes back to a device many times, and a process takes seconds to start. With slices
        # of one GPU it would keep memory that the next one needs.
        kept = functools.cache(lambda device: stack.enter_context(Worker(device)))
        alone = Counter(device.index for device in devices)
        if tasks is None:
            profile_devices(programs, paths, quick=quick, console=console, replace=replace)
        else:
            measures = {
                device: partial(
                    profile_device, device, path=path, quick=quick, console=console,
                    replace=replace,
                    worker=kept if device.kind == "cpu" or alone[device.index] == 1 else None,
                )
                for device, path in paths.items()
            }  # fmt: skip
            here = {d: FittedDevice(programs[d], paths[d], measures[d], unseen) for d in paths}
            job = _job(models, workload, purpose)
            for measure in measures.values():
                measure(())  # what is there already may be another machine's
            if job is None:
                fits = {device: fitted.fit(tasks) for device, fitted in here.items()}
            else:
                named = {path.name: here[device] for device, path in paths.items()}
                found = fit_to_plan(named, job, joined, tasks, tell=console.print)
                fits = {device: found[path.name] for device, path in paths.items()}
            for fit in fits.values():
                console.print(fit_line(fit))
        for device, chip in before.items():
            stale = calibration_path(paths[device])
            if chip != _chip(paths[device]) and stale.exists():
                stale.unlink()
                console.print(f"{stale}: removed, it corrects another machine's prices")
        if workload is None:  # plans do without it
            profile_hosts(paths, console=console)
        cluster, notes = _updated(output / "cluster.yaml", joined())
        write_atomically(output / "cluster.yaml", cluster.to_yaml())
    for note in notes:
        console.print(f"{output / 'cluster.yaml'}: {note}")
    word = "device" if len(devices) == 1 else "devices"
    console.print(f"wrote {output / 'cluster.yaml'}: {len(devices)} {word} of {host}")
    return {
        "cluster": str(output / "cluster.yaml"),
        "devices": {
            str(device): {
                "profile": str(paths[device]),
                "rows": len(profile.rows),
                "failed": sum(row.status == "failed" for row in profile.rows),
                **({"fit": _said(paths[device], fits[device])} if device in fits else {}),
            }
            for device, profile in profiles.items()
        },
    }


def _chip(path: Path) -> str | None:
    """Whose profile lies there, ``None`` where none does."""
    try:
        return Profile.load(path).device.chip
    except SpecError:
        return None


def _said(profile: Path, fit: DeviceFit) -> dict[str, Any]:
    return {"path": str(fit_path(profile)), "tasks": len(fit.tasks), "errors": fit.errors()}


def profile_link(
    output: Path, *, host: str, peer: str, serve: str | None, link: str | None, console: Console
) -> dict[str, Any]:
    """Measure the link to another host and write it as a file that ``cluster merge`` takes.

    Args:
        output: folder to write to, made if missing.
        host: name of this host in the merged cluster.
        peer: name of the other host.
        serve: ``HOST:PORT`` to wait at, or ...
        link: ... the one that the other host waits at.
        console: says what is waited for.

    Raises:
        SpecError: a name or an address that is wrong, or not exactly one of ``serve`` and ``link``.
        MissingDataError: nobody came or answered.
    """
    if (serve is None) == (link is None):
        raise SpecError("profile", got="both" if serve else "neither", expected="--serve or --link")
    check_host(host, "--host")
    check_host(peer, "--peer")
    if host == peer:
        raise SpecError("--peer", got=peer, expected="another host's name than --host")
    parse_endpoint(str(link), "--link") if serve is None else parse_endpoint(serve, "--serve")
    path = output / f"link-{host}-{peer}.yaml"
    waited = f"waiting at {serve} for {peer}'s --link, at most {SERVED_S:g} s"
    if serve is None:
        waited = f"waiting for {peer}'s --serve at {link}, at most {ANSWERED_S:g} s"
    with folder_for(output):
        with told_step(console, f"{waited}; then measuring the link, which may take minutes"):
            found: Links = serve_link(serve) if serve is not None else connect_link(str(link))
        tier = found.tier((host, peer), "network", f"measured between {host} and {peer}")
        text = dump_document({"tiers": [tier.model_dump(mode="json", exclude_defaults=True)]})
        write_atomically(path, text)
    console.print(f"wrote {path}: give it to 'foreplan cluster merge' with both clusters")
    return {"link": str(path), "tier": tier.model_dump(mode="json", exclude_defaults=True)}


def default_devices() -> list[DeviceName]:
    """Two unlike devices of this machine where it has none of its own kind of unlikeness.

    GPUs: each whole. A processor with bf16 instructions: a thread held to AVX2 and a thread with
    everything; one without: SSE4.1 and everything.
    """
    gpus = sorted(int(m[1]) for p in Path("/dev").glob("nvidia[0-9]*")
                  if (m := re.fullmatch(r"nvidia([0-9]+)", p.name)))  # fmt: skip
    if gpus:
        return [DeviceName.parse(f"cuda:{index}") for index in gpus]
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    low = "avx2" if "avx512" in flags else "sse41"
    return [DeviceName.parse(f"cpu:threads=1,isa={low}"), DeviceName.parse("cpu:threads=1")]


def _programs(
    device: DeviceName, models: Sequence[str], workload: str | None, purpose: str, count: int
) -> tuple[Program, ...]:
    kind = "cuda" if device.kind == "cuda" else "cpu"
    if purpose not in PROFILED:
        raise SpecError("--for", got=purpose, expected="serving, precision or bubbles")
    if not models and purpose == "serving":
        if workload is not None:
            raise SpecError(
                "--workload", got=workload, expected="--model with it, whose shapes it is of"
            )
        return ProfileGrid.generic(kind).programs
    if workload is None:
        raise SpecError(
            "--workload", got=None, expected=f"the {purpose} workload whose shapes are measured",
            fix="or leave out --model and --for, for the generic grid",
        )  # fmt: skip
    asked: Any = load_workload(purpose, workload)
    described: list[Model | None]
    if purpose == "serving":
        wanted = [
            p for name in models
            for p in serving_programs(load_model(name), asked, kind, devices=count)
        ]  # fmt: skip
    elif purpose == "bubbles":
        described = [load_model(name) for name in models]
        wanted = [
            p for model in described or [None]
            for p in bubbles_programs(model, asked, device, devices=count)
        ]  # fmt: skip
    else:
        # Loads torch, which the shapes of a decoder do without.
        from foreplan.planner.precision.shapes import precision_programs

        described = [load_model(name) for name in models]
        wanted = [
            p for model in described or [None] for p in precision_programs(model, asked, kind)
        ]
    return ProfileGrid.exact(wanted).programs


def _passes(
    devices: Sequence[DeviceName], workload: str | None, models: Sequence[str], purpose: str
) -> Sequence[Mapping[Program, int]]:
    """Programs that ranks at work together are timed by, with their calls; none but of passes."""
    if purpose not in ("bubbles", "precision") or workload is None:
        return ()
    asked: Any = load_workload(purpose, workload)
    model = load_model(models[0]) if models else None
    if purpose == "bubbles":
        return (bubbles_pass(model, asked, devices[0], devices=len(devices)),)
    if devices[0].kind == "cuda":  # whose steps are not recorded, but issued
        return ()
    from foreplan.planner.precision.shapes import precision_passes

    return precision_passes(model, asked, "cpu")


def _job(models: Sequence[str], workload: str | None, purpose: str) -> Job | None:
    """What the fits are for, ``None`` where that is not one job."""
    if workload is None or len(models) > 1 or (purpose == "serving" and not models):
        return None
    model = load_model(models[0]) if models else None
    return Job(purpose, model, load_workload(purpose, workload))


def _caps(memory: Sequence[str], devices: Sequence[DeviceName]) -> dict[DeviceName, int]:
    caps: dict[DeviceName, int] = {}
    for text in memory:
        name, equals, size = text.rpartition("=")
        chosen = [DeviceName.parse(name, "--memory")] if equals else list(devices)
        for device in chosen:
            if device not in devices:
                raise SpecError(
                    "--memory", got=text,
                    expected=f"SIZE or DEVICE=SIZE of {', '.join(str(d) for d in devices)}",
                )  # fmt: skip
            cap = int(parse_quantity(size, Dimension.BYTES, "--memory"))
            if device.kind == "cpu" and cap > (most := total_bytes()):
                raise SpecError(
                    "--memory", got=text, expected=f"at most the {show_bytes(most)} of this host"
                )
            caps[device] = cap
    return caps


def _cluster(
    devices: Sequence[DeviceName],
    profiles: dict[DeviceName, Profile],
    caps: Mapping[DeviceName, int],
    passes: Sequence[Mapping[Program, int]],
    output: Path,
    host: str,
    console: Console,
) -> Cluster:
    """The devices with their profiles, and what they do to each other."""
    tiers, contention = together(devices, profiles, passes, output, host, console)
    document = {
        "devices": _entries(devices, caps, host),
        "tiers": [tier.model_dump(mode="json", exclude_defaults=True) for tier in tiers],
        "contention": [c.model_dump(mode="json", exclude_defaults=True) for c in contention],
    }
    return validate(Cluster, document, "measured cluster")


def _updated(path: Path, measured: Cluster) -> tuple[Cluster, list[str]]:
    """What was measured and what the file says beside it; see `update`."""
    return update(Cluster.load(path), measured) if path.exists() else (measured, [])


def _entries(
    devices: Sequence[DeviceName], caps: Mapping[DeviceName, int], host: str
) -> list[dict[str, Any]]:
    return [
        {
            "name": str(device),
            "host": host,
            "profile": f"{_slug(device)}.json",
            **({"memory_bytes": caps[device]} if device in caps else {}),
        }
        for device in devices
    ]


def _slug(device: DeviceName) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", str(device)).strip("-")
