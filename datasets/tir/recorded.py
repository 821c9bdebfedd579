"""recorded_programs: the programs of a measured folder, to be timed again or on another device.

The same programs on two devices say what a device changes and nothing else: labels of one session
against another, a chip against its like. A schedule is text in its record, so that no task has to
be extracted and nothing is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from foreplan.datasets.tir.records import read_records
from foreplan.datasets.tir.sample import Sample
from foreplan.datasets.tir.target import TargetDevice
from foreplan.datasets.tir.task import Task
from foreplan.errors import SpecError


def recorded_programs(
    folder: Path, device: TargetDevice
) -> tuple[list[Task], dict[str, tuple[Sample, ...]]]:
    """Tasks of a folder of measured programs, and what was drawn for each.

    Args:
        folder: of `ProgramRecord`, or one of its files.
        device: what they will be built for. GPUs take the programs of any GPU, processors those
            that were scheduled for the same instruction set (TVM's ``mcpu``).

    Returns:
        Tasks, whose module is empty as no record has it, and by their keys the programs of each,
        each once.

    Raises:
        MissingDataError: no such folder.
        SpecError: not a folder of programs, a damaged record, or none of this kind of device.
    """
    tasks: dict[str, Task] = {}
    found: dict[str, dict[str, Sample]] = {}
    others = set()
    for record in read_records(folder):
        try:
            target: Mapping[str, object] = json.loads(record.target)
            built_for = target["kind"], target.get("mcpu")
            calls = MappingProxyType(dict(zip(record.networks, record.calls, strict=True)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"{folder}: program {record.program_key or record.task_name}", got=record.target,
                expected="TVM's target as JSON, and calls for each network",
            ) from error  # fmt: skip
        if built_for != (device.kind, device.options.get("mcpu")):
            others.add(record.device)
            continue
        if not record.program_key:
            continue
        key = record.task_key
        tasks[key] = Task(key, record.task_name, "", calls, frozenset(record.families))
        sample = Sample(record.seed, record.module, record.trace)
        found.setdefault(key, {})[record.program_key] = sample
    if not found:
        raise SpecError(
            f"{folder}: device", got=sorted(others), expected=f"programs for {device.name}"
        )
    return list(tasks.values()), {key: tuple(of.values()) for key, of in found.items()}
