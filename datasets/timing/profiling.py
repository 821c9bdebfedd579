"""Measure a profile: every program in turn, several rounds, resumable at any point.

Rounds are whole passes over the programs, so that the samples of one program are minutes apart
and a busy moment of the machine does not decide its median.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.host_device import measured_device
from foreplan.datasets.timing.measurement import Measurement, percentiles
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.datasets.timing.profile_journal import REPLACE, ProfileJournal, another_machine
from foreplan.errors import SpecError

#: Figures that a profile keeps beside its device.
_APART = ("host_to_device", "device_to_host", "read_bandwidth", "switch_s")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a profile is; given to the callback after each measurement.

    Attributes:
        done: measurements there are, those of earlier runs included.
        total: measurements there will be.
        program: the last one measured, ``None`` at the start.
        result: its measurement.
        message: something to tell the user, e.g. that an old journal was dropped.
    """

    done: int
    total: int
    program: Program | None = None
    result: Measurement | None = None
    message: str | None = None


def measure_profile(
    device: DeviceName,
    programs: Iterable[Program],
    path: str | os.PathLike[str],
    *,
    rounds: int = 2,
    effort: Effort | None = None,
    cores: Sequence[int] | None = None,
    memory_bytes: int | None = None,
    worker: Worker | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    replace: bool = False,
) -> Profile:
    """Measure programs on a device of this machine and write its profile.

    What an earlier run measured on the same device with the same software is kept, whether that
    run ended (the profile at ``path``) or was killed (the journal beside it). What failed is tried
    again, once the run has ended. Other software, or other cores, begin it anew.

    Args:
        device: a ``cpu`` or ``cuda`` device.
        programs: what to measure; repeated ones count once.
        path: where the profile goes, ``.json``; its folder must exist.
        rounds: visits to each program.
        effort: how long to time a program in one visit.
        cores: cores to run on; the first of this process's own by default.
        memory_bytes: cap on the worker's memory.
        worker: one that runs already on the device, with cores and cap of its own; it stays.
        on_progress: called after each measurement, in this thread.
        replace: begin anew, too, where another machine was measured into ``path``, or what lies
            there is no profile.

    Returns:
        The profile as written, with the rows of ``programs`` and those it had before.

    Raises:
        SpecError: a zoo device, a path that cannot be written, that another process measures into,
            or that holds something else and is not to be replaced.
        MissingDataError: the device cannot be measured here.
    """
    if rounds < 1:
        raise SpecError("rounds", got=rounds, expected="at least 1")
    target = Path(path)
    tell = on_progress or (lambda _: None)
    wanted = list(dict.fromkeys(programs))
    started = time.monotonic()
    journal_path = target.with_name(target.name + ".journal")
    with (
        ProfileJournal(journal_path) as journal,
        nullcontext(worker)
        if worker is not None
        else Worker(device, cores=cores, memory_bytes=memory_bytes) as worker,
    ):
        identity = _identity(worker)
        before, message = _earlier(target, identity, replace=replace)
        if dropped := journal.resume(identity, replace=replace):
            tell(Progress(0, rounds * len(wanted), message=dropped))
        if message:
            tell(Progress(0, rounds * len(wanted), message=message))
        known = {
            measured: row
            for measured, row in (before.by_program if before else {}).items()
            if (row.rounds >= rounds and row.status == "ok") or measured not in wanted
        }
        figures = _figures_of(before)
        missing = [p for p in wanted if p not in known]
        _measure(worker, journal, missing, rounds, effort or Effort(), tell, not figures)
        rows = {p: _row(p, journal, rounds) for p in missing}
        profile = _profile(
            worker,
            figures or journal.figures,
            [*known.values(), *rows.values()],
            (before.measured_seconds or 0.0 if before else 0.0) + time.monotonic() - started,
        )
        if before is not None and before.host is not None:
            profile = profile.model_copy(update={"host": before.host})
        profile.save(target)
        journal.remove()
    return profile


def _measure(
    worker: Worker,
    journal: ProfileJournal,
    programs: Sequence[Program],
    rounds: int,
    effort: Effort,
    tell: Callable[[Progress], None],
    takes_figures: bool,
) -> None:
    """Measure what the journal lacks; the device's figures too, before each round and at the end.

    A device that is fast in one minute and slow in the next is so for both alike.
    """
    total = rounds * len(programs)
    done = sum((p, turn) in journal.parts for p in programs for turn in range(rounds))
    tell(Progress(done, total))
    for turn in range(rounds):
        if takes_figures and programs and len(journal.takes) <= turn:
            journal.add_figures(worker.figures())
        for measured in programs:
            if (measured, turn) in journal.parts:
                continue
            earlier = journal.parts.get((measured, turn - 1))
            if earlier is not None and earlier.error is not None:
                result = earlier  # what failed once fails again, and a time-out is long
            else:
                result = worker.measure(measured, effort)
            journal.add(measured, turn, result)
            done += 1
            tell(Progress(done, total, measured, result))
    if takes_figures and len(journal.takes) <= rounds:
        journal.add_figures(worker.figures())


def _identity(worker: Worker) -> dict[str, Any]:
    """What measurements must share to stand in one profile."""
    keep = ("board", "chip", "software", "units", "isa")
    return {
        "device": str(worker.device),
        "cores": list(worker.cores),
        **{name: worker.identity[name] for name in keep},
    }


def _earlier(
    target: Path, identity: Mapping[str, Any], *, replace: bool
) -> tuple[Profile | None, str | None]:
    """The profile already at the path if it can be added to, and why not."""
    if not target.exists():
        return None, None
    try:
        profile = Profile.load(target)
    except SpecError as error:
        if not replace:
            raise SpecError(
                error.where, got=error.got, expected=error.expected, fix=REPLACE
            ) from error
        return None, f"{target.name}: replaced ({error})"
    if profile.device.chip != identity["chip"]:
        if not replace:
            raise another_machine(str(target), profile.device.chip, identity["chip"])
        return None, f"{target.name}: replaced, it was of another machine ({profile.device.chip})"
    same = (
        profile.device.name == identity["device"]
        and list(profile.cores) == identity["cores"]
        and profile.device.chip == identity["chip"]
        and list(profile.device.isa) == identity["isa"]
        and dict(profile.software) == identity["software"]
    )
    return (profile, None) if same else (None, f"{target.name}: measured anew, it was of another "
                                               "device, other cores or software")  # fmt: skip


def _figures_of(profile: Profile | None) -> dict[str, float]:
    """The measured figures of a profile under the names that a worker gives them."""
    if profile is None:
        return {}
    device = profile.device
    found = {f"peak_flops.{n.partition('/')[0]}": v for n, v in device.peak_flops.items()}
    found |= {f"reread_bandwidth.{n}": rate for n, rate in device.reread_bandwidth or ()}
    for name in ("launch_overhead_s", "memory_bandwidth"):
        if (value := getattr(device, name)) is not None:
            found[name] = value
    for name in _APART:
        if (value := getattr(profile, name)) is not None:
            found[name] = value
    return found


def _row(measured: Program, journal: ProfileJournal, rounds: int) -> Row:
    parts = [journal.parts[measured, turn] for turn in range(rounds)]
    good = [part for part in parts if part.error is None]
    base: dict[str, Any] = {
        "op": measured.op,
        "dims": measured.dims,
        "variant": str(measured.variant),
        "rounds": rounds,
        "cache_state": parts[0].cache_state,
        "load_average": max((p.load for p in parts if p.load is not None), default=None),
    }
    if not good:
        return Row(**base, status="failed", error=parts[0].error)
    low, median, high = percentiles(good)
    return Row(
        **base,
        status="ok",
        median_s=median,
        low_s=low,
        high_s=high,
        samples=sum(part.samples for part in good),
        preempted=sum(part.preempted for part in good),
        issue_s=min((p.issue_s for p in good if p.issue_s), default=None),
        clock_hz=min((p.clock_hz for p in good if p.clock_hz), default=None),
    )


def _profile(
    worker: Worker, figures: Mapping[str, float], rows: Sequence[Row], seconds: float
) -> Profile:
    identity = worker.identity
    document = {
        "schema": "foreplan.profile/1",
        "device": measured_device(worker, figures).model_dump(exclude_none=True),
        "cores": worker.cores,
        "software": identity["software"],
        **{n: figures[n] for n in _APART if n in figures},
        "measured_seconds": round(seconds, 3),
        "rows": [row.model_dump(exclude_none=True) for row in rows],
    }
    return validate(Profile, document, "measured profile")
