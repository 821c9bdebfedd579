"""ProgramTable: scheduled programs as arrays, with devices, latencies and fold keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.compact_ast import FEATURE_NAMES, TOTAL_NAMES, CompactAst
from foreplan.datasets.device import Device
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

#: Between the networks that call a task; their names are a file's own, and may hold a ``+``.
BETWEEN_NETWORKS = "\n"


@dataclass(frozen=True)
class ProgramTable:
    """N programs with M leaves in all.

    Attributes:
        leaves: computation vectors (M, features), those of a program together.
        offsets: first leaf of each program, and M at the end (N + 1).
        position: pre-order number of each leaf (M).
        depth: depth of each leaf (M).
        totals: totals of each program (N, ``len(TOTAL_NAMES)``).
        device: number of each program's device in ``devices`` (N).
        devices: devices, by which the chip of a row is known.
        latency_s: label, seconds; NaN where it is not known (N).
        task: key of each program's task (N).
        family: families that call the task, joined by ``+`` (N).
        network: networks that call the task, joined by `BETWEEN_NETWORKS` (N).
        spread: (greatest - least) / median of the label's repetitions, NaN if not known (N).
    """

    leaves: NDArray[np.float32]
    offsets: NDArray[np.int64]
    position: NDArray[np.int32]
    depth: NDArray[np.int32]
    totals: Floats
    device: NDArray[np.int64]
    devices: tuple[Device, ...]
    latency_s: Floats
    task: NDArray[np.str_]
    family: NDArray[np.str_]
    network: NDArray[np.str_]
    spread: Floats

    def __len__(self) -> int:
        return len(self.device)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Leaves of each program (N)."""
        return np.diff(self.offsets)

    @property
    def chips(self) -> NDArray[np.str_]:
        """Chip of each program (N)."""
        return np.array([device.chip for device in self.devices])[self.device]

    def total(self, name: str) -> Floats:
        """One total of every program (N)."""
        return self.totals[:, TOTAL_NAMES.index(name)]

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> ProgramTable:
        """The programs of some rows, in that order; devices keep their numbers."""
        chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        counts = self.counts[chosen]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        starts = np.repeat(self.offsets[chosen] - offsets[:-1], counts)
        at = starts + np.arange(offsets[-1])
        return ProgramTable(
            self.leaves[at], offsets, self.position[at], self.depth[at], self.totals[chosen],
            self.device[chosen], self.devices, self.latency_s[chosen], self.task[chosen],
            self.family[chosen], self.network[chosen], self.spread[chosen],
        )  # fmt: skip

    @classmethod
    def from_asts(
        cls,
        asts: Sequence[CompactAst],
        device: Device,
        *,
        latency_s: Sequence[float] | None = None,
        task: Sequence[str] | None = None,
        family: Sequence[str] | None = None,
        network: Sequence[str] | None = None,
        spread: Sequence[float] | None = None,
    ) -> ProgramTable:
        """Programs of one device.

        Raises:
            SpecError: no programs.
        """
        if not asts:
            raise SpecError("programs", got=0, expected="at least one")
        count = len(asts)
        unknown = [""] * count
        return cls(
            leaves=np.concatenate([ast.leaves for ast in asts]),
            offsets=np.cumsum([0, *(len(ast.position) for ast in asts)]).astype(np.int64),
            position=np.concatenate([ast.position for ast in asts]),
            depth=np.concatenate([ast.depth for ast in asts]),
            totals=np.stack([ast.totals for ast in asts]),
            device=np.zeros(count, dtype=np.int64),
            devices=(device,),
            latency_s=np.array([np.nan] * count if latency_s is None else latency_s, dtype=float),
            task=np.array(unknown if task is None else task, dtype=np.str_),
            family=np.array(unknown if family is None else family, dtype=np.str_),
            network=np.array(unknown if network is None else network, dtype=np.str_),
            spread=np.array([np.nan] * count if spread is None else spread, dtype=float),
        )

    @classmethod
    def empty(cls, *devices: Device) -> ProgramTable:
        """No program of some devices."""
        nothing, words = np.zeros(0), np.zeros(0, dtype=np.str_)
        whole, small = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        return cls(
            leaves=np.zeros((0, len(FEATURE_NAMES)), dtype=np.float32),
            offsets=np.zeros(1, dtype=np.int64), position=small, depth=small,
            totals=np.zeros((0, len(TOTAL_NAMES))), device=whole, devices=devices,
            latency_s=nothing, task=words, family=words, network=words, spread=nothing,
        )  # fmt: skip

    @staticmethod
    def join(tables: Sequence[ProgramTable]) -> ProgramTable:
        """All programs of several tables; equal devices become one."""
        devices = tuple(dict.fromkeys(device for table in tables for device in table.devices))
        numbers = [
            np.array([devices.index(device) for device in table.devices], dtype=np.int64)[
                table.device
            ]
            for table in tables
        ]
        counts = np.concatenate([table.counts for table in tables])

        def glue(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(table, name) for table in tables])

        return ProgramTable(
            glue("leaves"), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            glue("position"), glue("depth"), glue("totals"), np.concatenate(numbers), devices,
            glue("latency_s"), glue("task"), glue("family"), glue("network"), glue("spread"),
        )  # fmt: skip


def by_leaf_count(
    counts: NDArray[np.int64], batch: int, generator: np.random.Generator | None = None
) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row numbers with like leaf counts, so that padding stays small.

    Args:
        counts: leaves of each program.
        batch: most programs of a batch.
        generator: shuffles rows of like count and the order of batches; ``None`` keeps order.
    """
    if generator is None:
        order = np.argsort(counts, kind="stable")
    else:
        order = np.argsort(counts + 2 * generator.random(len(counts)))
    batches = [order[at : at + batch] for at in range(0, len(order), batch)]
    if generator is not None:
        generator.shuffle(batches)
    yield from batches
