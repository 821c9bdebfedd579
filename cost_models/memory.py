"""`MemoryLedger`: what lies in a device's memory, item by item, and whether it fits.

Static items (weights, embeddings, workspace) stand for the whole run; the rest is fed by the
actions of a timeline. A ledger is what a plan prints, what `InfeasibleError` quotes, and what
verification compares with the bytes a real rank held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from foreplan.errors import InfeasibleError

GIB = 1 << 30
KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Memory of one rank, in bytes.

    Attributes:
        device: name of the rank's device.
        capacity_bytes: what the rank may use, or ``None`` where it is not known.
        items: static items in the order they should be read.
        peak: items fed by actions, at the moment of their highest total.
    """

    device: str
    capacity_bytes: int | None
    items: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    peak: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def lines(self) -> dict[str, int]:
        """Every item with its bytes, static ones first."""
        merged = dict(self.items)
        for name, size in self.peak.items():
            merged[name] = merged.get(name, 0) + size
        return merged

    @property
    def total_bytes(self) -> int:
        """Static items plus the peak of the rest."""
        return sum(self.items.values()) + sum(self.peak.values())

    @property
    def free_bytes(self) -> int | None:
        """Capacity less total; negative where it does not fit, ``None`` without a capacity."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes

    def with_peak(self, peak: Mapping[str, int]) -> MemoryLedger:
        """The same ledger with what a timeline's actions hold at most."""
        held = MappingProxyType(dict(peak))
        return MemoryLedger(self.device, self.capacity_bytes, self.items, held)

    def check(self, rank: int) -> None:
        """Raise `InfeasibleError` that says which item of which device lacks how much."""
        free = self.free_bytes
        if free is None or free >= 0:
            return
        largest = max(self.lines, key=self.lines.__getitem__)
        raise InfeasibleError(
            f"rank {rank} ({self.device}) needs {show_bytes(self.total_bytes)} of "
            f"{show_bytes(self.capacity_bytes or 0)}: {show_bytes(-free)} too much, above all "
            f"{largest} ({show_bytes(self.lines[largest])})",
            fix="allow fewer bits, a smaller batch or context, or more memory",
        )


def show_bytes(size: float) -> str:
    """Bytes for people, in MiB below 1 GiB and in GiB above; smaller units where that says 0."""
    if abs(size) >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size == 0 or abs(size) >= 0.05 * MIB:
        return f"{size / MIB:.1f} MiB"
    return f"{size / KIB:.1f} KiB" if abs(size) >= 0.05 * KIB else f"{size:.0f} B"


def show_missing(size: float) -> str:
    """Bytes to add, for people; rounded up, so that as many more are enough."""
    unit, name, parts = (
        (GIB, "GiB", 100) if size >= GIB else (MIB, "MiB", 10) if size >= MIB else (KIB, "KiB", 10)
    )
    return f"{math.ceil(size / unit * parts) / parts:.{len(str(parts)) - 1}f} {name}"
