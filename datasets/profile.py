"""Profile: what was measured on one device, one file a device.

A row is one program with the median and the spread of its time; the device's own figures, the
software it ran on and the cores it was pinned to stand beside them.
`foreplan.datasets.timing.profiling` measures one, `foreplan.cost_models.sources.tables` prices work
with it.
"""

from __future__ import annotations

import functools
import json
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from foreplan.datasets import latency_range
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device import Device
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.operators import OPERATORS
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.quantity import BytesPerSecond, Seconds
from foreplan.datasets.specs import StrictModel, load_document, rows_document, validate
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError

SCHEMA: Literal["foreplan.profile/1"] = "foreplan.profile/1"

Positive = Annotated[float, Field(gt=0)]


class Row(StrictModel):
    """One program on the profile's device."""

    op: Annotated[str, Field(min_length=1)]
    dims: Mapping[str, Annotated[int, Field(ge=1)]]
    variant: str
    """``STORAGE/COMPUTE/KERNEL``."""
    status: Literal["ok", "failed"]
    median_s: Positive | None = None
    """Median time of a call, seconds; absent where the program failed."""
    low_s: Positive | None = None
    """10th percentile, seconds."""
    high_s: Positive | None = None
    """90th percentile, seconds."""
    samples: Annotated[int, Field(ge=0)] = 0
    preempted: Annotated[int, Field(ge=0)] = 0
    """Samples during which another process got the core; a one-thread device then counts its time
    on the core, others count all of it."""
    rounds: Annotated[int, Field(ge=1)] = 1
    """Times the program was visited, each after all others had their turn."""
    issue_s: Positive | None = None
    """Seconds that the host of a GPU takes to issue a call, which a step of few numbers waits for;
    absent on a CPU, of long calls and in profiles of earlier versions."""
    cache_state: str = ""
    """What was cold and what warm."""
    load_average: float | None = None
    """Highest load average of the machine when a round began; 1 is one busy core."""
    clock_hz: Positive | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _sound(self) -> Row:
        if self.op not in OPERATORS:
            raise ValueError(f"an op of {sorted(OPERATORS)}, not {self.op!r}")
        if set(self.dims) != set(OPERATORS[self.op].dims):
            raise ValueError(f"dims {list(OPERATORS[self.op].dims)} for {self.op}")
        try:
            Variant.parse(self.variant)
        except SpecError as error:
            raise ValueError(f"variant as {error.expected}") from error
        times = (self.low_s, self.median_s, self.high_s)
        if self.status == "ok":
            if any(t is None for t in times) or not times[0] <= times[1] <= times[2]:  # type: ignore[operator]
                raise ValueError("low_s, median_s and high_s in this order for a row that is ok")
            if any(not latency_range.LEAST_S <= t <= latency_range.MOST_S for t in times):  # type: ignore[operator]
                raise ValueError(latency_range.expected(1.0, "s"))
        elif any(t is not None for t in times):
            raise ValueError("no times for a row that failed")
        return self

    def program(self) -> Program:
        """The program that was measured."""
        return program(self.op, Variant.parse(self.variant), **dict(self.dims))


class HostTimes(StrictModel):
    """What it takes the host of a GPU to issue calls, as measured on single small ones.

    `foreplan.cost_models.passes.host_prices.HostPrices` computes with them.
    """

    call_s: Mapping[str, Mapping[str, Seconds]]
    """Seconds of a call by kind (``linear``, ``layer_norm``, ``view``) and mode: ``inference``,
    ``forward`` (recording for gradients) and ``backward`` (its gradients)."""
    update_s: Annotated[tuple[Seconds, Seconds], Field(strict=False)]
    """Seconds of an optimizer's update: fixed, and for each tensor."""
    factor: Mapping[str, Annotated[float, Field(ge=0)]]
    """Of calls in a network over calls in a loop, by mode; Python between them is in it."""
    line_s: Mapping[str, Seconds]
    """Seconds of a line of Python by mode, 0 where the factor holds them."""


class Profile(StrictModel):
    """Measurements of one device."""

    model_config = ConfigDict(ignored_types=(functools.cached_property,))

    schema_: Literal["foreplan.profile/1"] = Field(default=SCHEMA, alias="schema")
    device: Device
    """Name, chip, slice and the measured figures, with their sources."""
    cores: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Cores that the process was held to."""
    software: Mapping[str, str]
    """Versions that decide how fast a kernel is: ``torch``, ``python``, ``cuda``, ..."""
    host_to_device: BytesPerSecond | None = None
    """Bandwidth of a copy from pinned host memory; absent on a CPU."""
    device_to_host: BytesPerSecond | None = None
    read_bandwidth: BytesPerSecond | None = None
    """Of memory that is only read; absent on a CPU. A slice of a GPU reads faster than it copies,
    which is what the device's own figure says."""
    switch_s: Seconds | None = None
    """What a program takes longer behind another one than behind itself, seconds: rows were timed
    in graphs that repeat one program. Absent where calls were not recorded."""
    host: HostTimes | None = None
    """What calls take the host of a GPU; absent on a CPU, whose rows hold it."""
    measured_seconds: Seconds | None = None
    """Wall-clock time the measuring took."""
    rows: Annotated[tuple[Row, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _each_program_once(self) -> Profile:
        seen: set[Program] = set()
        for row in self.rows:
            if (measured := row.program()) in seen:
                raise ValueError(f"each program once, but {measured} stands twice")
            seen.add(measured)
        return self

    @property
    def name(self) -> DeviceName:
        """The device."""
        return DeviceName.parse(self.device.name)

    @functools.cached_property
    def by_program(self) -> Mapping[Program, Row]:
        """Rows by program."""
        return {row.program(): row for row in self.rows}

    def usable(self, op: str) -> list[Variant]:
        """Variants of an operator of which at least one program ran here."""
        found = {r.variant: None for r in self.rows if r.op == op and r.status == "ok"}
        return [Variant.parse(text) for text in found]

    # -------------------------------------------------------------------------------- as a file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a profile, plain or compressed (``.xz``).

        Raises:
            SpecError: no such file, another schema, or a field that is wrong.
        """
        where = os.fspath(path)
        document = _decompressed(where) if where.endswith(".xz") else load_document(path)
        if document.get("schema") != SCHEMA:
            raise SpecError(
                f"{where}: schema", got=document.get("schema"), expected=SCHEMA,
                fix="measure again with 'foreplan profile'",
            )  # fmt: skip
        return validate(cls, document, where)

    def to_json(self) -> str:
        """The document, one row a line; equal profiles give equal bytes."""
        return rows_document(self, "rows")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile whole or not at all.

        Raises:
            SpecError: the path cannot be written.
        """
        write_atomically(path, self.to_json())


def _decompressed(path: str) -> dict[str, Any]:
    try:
        document = json.loads(lzma.decompress(Path(path).read_bytes()))
    except (OSError, lzma.LZMAError, ValueError, RecursionError) as error:
        raise SpecError(path, got=str(error), expected="a compressed profile") from error
    if not isinstance(document, dict):
        raise SpecError(path, got=type(document).__name__, expected="a compressed profile")
    return document


def load_profiles(cluster: Cluster, folder: str | os.PathLike[str]) -> dict[str, Profile]:
    """Read the profiles that a cluster's devices name.

    Args:
        cluster: the cluster.
        folder: folder of the file it was read from; profile paths are relative to it.

    Returns:
        Profiles by ``host/device``; devices without one are left out.

    Raises:
        SpecError: a profile cannot be read.
    """
    return {
        f"{entry.host}/{entry.name}": Profile.load(Path(folder) / entry.profile)
        for entry in cluster.devices
        if entry.profile is not None
    }
