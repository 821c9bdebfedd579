"""Tables of what a verification would start, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from foreplan.planner.report._grid import Column, Grid
from foreplan.planner.report.summary import short_labels
from foreplan.planner.report.text import bytes_of, plain, seconds


def sketch_tables(found: Mapping[str, Any]) -> Group:
    """Candidates and processes of a dry run, from `planner.verify.command.sketch`."""
    candidates, processes = found["candidates"], found["processes"]
    labels = short_labels([p["label"] for p in processes])
    settings = {
        label: " ".join(f"{k}={v}" for k, v in sorted(p["environment"].items()))
        for label, p in zip(labels, processes, strict=True)
        if p["environment"]
    }
    refused = [one for one in candidates if one["refused"] is not None]
    # A plan for devices that are elsewhere is told as it would run there.
    elsewhere = bool(refused) and refused[0] is candidates[0]
    would = candidates if elsewhere else [one for one in candidates if one["refused"] is None]
    return Group(
        Text(
            ("Not on this host, which cannot run the plan: " if elsewhere else "")
            + f"{len(would)} decision{'' if len(would) == 1 else 's'} would run "
            f"{found['rounds']} rounds in "
            f"{sum(one['processes'] for one in would)} processes: {seconds(found['expected_s'])} "
            f"and {bytes_of(found['memory_bytes'])}, beside starting, loading and the comparison "
            "with one process. Nothing was started.",
            style="bold",
        ),
        Grid(
            "Decisions",
            [
                Column("decision", [plain(one["name"]) for one in candidates]),
                Column("processes", [str(one["processes"]) for one in candidates], True),
                Column("memory", [bytes_of(one["memory_bytes"]) for one in candidates], True),
                Column("expected", [seconds(one["expected_s"]) for one in candidates], True),
            ],
        ),
        Grid(
            "Cannot run from this host",
            [
                Column("decision", [plain(one["name"]) for one in refused]),
                Column("why", [plain(one["refused"]) for one in refused]),
            ],
        ),
        Grid(
            "Processes",
            [
                Column("decision", [plain(p["candidate"]) for p in processes], least=70),
                Column("#", [str(p["rank"]) for p in processes], True),
                Column("device", list(labels)),
                Column("cores", [",".join(map(str, p["cores"])) or "any" for p in processes]),
                Column("memory", [bytes_of(p["memory_bytes"]) for p in processes], True),
                Column("of", [bytes_of(p["capacity_bytes"]) for p in processes], True),
            ],
        ),
        Grid(
            "What makes a process a device",
            [
                Column("device", list(settings)),
                Column("environment", list(settings.values())),
            ],
        ),
    )
