"""Tables of what a machine can do, for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.planner.doctor import Diagnosis, Examined
from foreplan.planner.report._grid import Column, Facts, Grid, Tone, bullets, heading, toned
from foreplan.planner.report.text import bytes_of, number, plain

_TONES: dict[str, Tone] = {"ok": "good", "note": "warn", "missing": "bad"}


def doctor_tables(found: Diagnosis) -> RenderableType:
    """What can be done here, on which devices, and what would mend the rest."""
    machine = found.machine
    parts: list[RenderableType] = [
        Text.assemble(*_ready(found)),
        heading("Machine"),
        Facts(
            [
                ("processor", plain(machine["cpu"])),
                ("cores", f"{machine['cores']} of {machine['cores_online']}"),
                ("memory", f"{bytes_of(machine['free_bytes'])} free of "
                           f"{bytes_of(machine['memory_bytes'])}"),
                ("load", number(machine["load"])),
                ("system", f"{plain(machine['system'])}, Python {plain(machine['python'])}"),
            ]
        ),
        Grid(
            "Devices, by the name that 'foreplan profile' takes",
            [
                Column("device", [device.name for device in found.devices]),
                Column("memory", [bytes_of(d.memory_bytes) for d in found.devices], True),
                Column("stored/computed", [_dtypes(device) for device in found.devices]),
                Column("slices", [" ".join(d.slices) for d in found.devices]),
                Column("what", [plain(device.detail) for device in found.devices], least=100),
            ],
        ),
        Grid(
            "Checks",
            [
                Column("check", [check.what for check in found.checks]),
                Column("state", [toned(c.state, _TONES[c.state]) for c in found.checks]),
                Column("found", [plain(check.found) for check in found.checks]),
            ],
        ),
    ]  # fmt: skip
    fixes = [f"{check.what}: {check.fix}" for check in found.checks if check.fix]
    if fixes:
        parts += [heading("What would mend it"), *bullets(fixes)]
    return Group(*parts)


def _ready(found: Diagnosis) -> list[tuple[str, str]]:
    words = {"dataset build": "build data sets"}
    able = [words.get(task, task) for task, can in found.ready.items() if can]
    unable = [words.get(task, task) for task, can in found.ready.items() if not can]
    said = [(f"This machine can {_listed(able)}", "bold green")] if able else []
    if unable:
        said.append((f"{'; it cannot' if able else 'This machine cannot'} {_listed(unable)}",
                     "bold red"))  # fmt: skip
    return [*said, (".", "")]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _dtypes(device: Examined) -> str:
    """``bf16/bf16, int8/bf16``; where no kernel runs, why."""
    shown = ", ".join(device.dtypes)
    if device.failing:
        first, reason = next(iter(device.failing.items()))
        more = f"{len(device.failing)} kernels fail ({first}: {reason})"
        shown = f"{shown}; {more}" if shown else more
    return plain(shown)
