"""DeviceEntry: a line of a cluster's devices; Rank: one device of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.quantity import Bytes, format_bytes
from foreplan.datasets.specs import StrictModel
from foreplan.datasets.tier import EVERYONE
from foreplan.errors import MissingDataError, SpecError

DEFAULT_HOST = "localhost"
_HOST, _LONGEST_HOST = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", 253


class DeviceEntry(StrictModel):
    """Devices of one name on one host."""

    name: DeviceName
    count: Annotated[int, Field(gt=0, le=100_000)] = 1
    memory_bytes: Bytes | None = None
    """Cap on what a plan may use of each; ``None`` for all that the zoo or the profile gives."""
    profile: Annotated[str, Field(min_length=1)] | None = None
    """Measured profile, as a path relative to the cluster's file, with slashes."""
    host: Annotated[str, Field(pattern=_HOST, max_length=_LONGEST_HOST)] = DEFAULT_HOST
    price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Of each, in the user's currency."""

    @field_validator("profile")
    @classmethod
    def _relative(cls, profile: str | None) -> str | None:
        if profile is not None and (PurePosixPath(profile).is_absolute() or "\\" in profile):
            raise ValueError("a path relative to the cluster's file, with slashes")
        return profile

    @model_validator(mode="after")
    def _sound(self) -> DeviceEntry:
        if self.name.kind == "cuda" and self.count > 1:
            raise ValueError(f"count 1 for {self.name}: list cuda:0, cuda:1, ... one by one")
        if self.host == EVERYONE:
            raise ValueError(f"a host that is not called {EVERYONE!r}")
        published = self.published()
        most = None if published is None else published.memory_bytes
        if most is not None and self.memory_bytes is not None and self.memory_bytes > most:
            raise ValueError(f"memory_bytes up to {most} ({format_bytes(most)}) for {self.name}")
        return self

    def published(self) -> Device | None:
        """Return the zoo's figures, ``None`` for a device of the user's own host."""
        return None if self.name.zoo is None else device_zoo.device(self.name.zoo)


def check_host(name: str, where: str) -> None:
    """Refuse what no host of a cluster can be called, before anything is measured for it.

    Raises:
        SpecError: such a name.
    """
    if name == EVERYONE or len(name) > _LONGEST_HOST or re.fullmatch(_HOST, name) is None:
        raise SpecError(
            where, got=name,
            expected="a host's name: letters, digits, '_', '.' and '-', the first none of the last "
            f"two, at most {_LONGEST_HOST} of them, not {EVERYONE!r}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rank:
    """One device of a cluster.

    Attributes:
        index: position among the cluster's ranks, from 0.
        name: the device.
        host: where it is.
        label: unique in the cluster: ``host/device`` or ``host/device#k``.
        memory_bytes: the entry's cap, else the zoo's figure with nothing taken off, else ``None``
            (the profile has it).
        profile: path of the measured profile relative to the cluster's file, if any.
        price_per_hour: in the user's currency, if given.
    """

    index: int
    name: DeviceName
    host: str
    label: str
    memory_bytes: int | None
    profile: str | None = None
    price_per_hour: float | None = None

    @property
    def kernel_kind(self) -> str:
        """``cpu`` or ``cuda``: whose kernels it runs (ROCm runs torch's CUDA names)."""
        if self.name.kind != "zoo":
            return self.name.kind
        return "cpu" if device_zoo.device(str(self.name)).kind == "cpu" else "cuda"

    @property
    def compute_capability(self) -> str | None:
        """Of a published GPU, as ``9.0``; ``None`` of one of the user's own host, and of others."""
        if self.name.zoo is None:
            return None
        return device_zoo.device(self.name.zoo).compute_capability

    @property
    def capacity(self) -> int:
        """`memory_bytes` where a plan needs it.

        Raises:
            MissingDataError: a device without a cap, profile or published memory.
        """
        if self.memory_bytes is None:
            raise MissingDataError(
                f"the memory of {self.label} is not known",
                fix="give it as memory_bytes in the cluster",
            )
        return self.memory_bytes
