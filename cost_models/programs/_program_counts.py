"""Counts: what `_program_gpu` and `_program_cpu` read from a table: plain numbers by leaf, figures.

Shape legend: N programs, M leaves, K kernels of all programs together (leaves of a kernel stand
together, and so do kernels of a program).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.compact_ast import FEATURE_NAMES
from foreplan.cost_models.programs.program_table import ProgramTable

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_COLUMN = {name: number for number, name in enumerate(FEATURE_NAMES)}
#: Figures of a device, and what a common GPU has where one is not known.
_FIGURES = {
    "units": 80.0, "clock_hz": 1.5e9, "memory_bandwidth": 1e11, "max_threads_per_unit": 2048.0,
    "shared_memory_bytes_per_unit": 102400.0, "register_bytes_per_unit": 262144.0,
    "launch_overhead_s": 0.0,
}  # fmt: skip


class Counts:
    """Leaves, kernels and programs of a table as plain numbers.

    Attributes:
        program: number of each leaf's program (M).
        kernel: number of each leaf's kernel (M).
        owner: number of each kernel's program (K).
        cpu: whether each program ran on a CPU (N).
    """

    def __init__(self, table: ProgramTable) -> None:
        self.table = table
        self._starts = table.offsets[:-1]
        self.program: Integers = np.repeat(np.arange(len(table)), table.counts)
        number = table.leaves[:, _COLUMN["bindings.kernel"]].astype(np.int64)
        change = np.ones(len(number), dtype=np.bool_)
        change[1:] = (self.program[1:] != self.program[:-1]) | (number[1:] != number[:-1])
        self._kernel_starts = np.flatnonzero(change)
        self.kernel: Integers = np.cumsum(change) - 1
        self.owner: Integers = self.program[self._kernel_starts]
        self.cpu = np.array([d.kind == "cpu" for d in table.devices], dtype=np.bool_)[table.device]

    def raw(self, name: str) -> Floats:
        """One entry of the leaf vectors as it is (M)."""
        return self.table.leaves[:, _COLUMN[name]].astype(np.float64)

    def plain(self, name: str) -> Floats:
        """One entry of the leaf vectors, undone log2(1 + x) (M)."""
        return np.asarray(np.exp2(np.clip(self.raw(name), 0.0, 80.0)) - 1, dtype=np.float64)

    def figure(self, name: str) -> Floats:
        """One figure of each program's device (N)."""
        found = [float(getattr(d, name) or _FIGURES[name]) for d in self.table.devices]
        return np.array(found)[self.table.device]

    def most(self, values: Floats) -> Floats:
        """Greatest over the leaves of each kernel (K)."""
        return np.asarray(np.maximum.reduceat(values, self._kernel_starts))

    def total(self, values: Floats) -> Floats:
        """Sum over the leaves of each kernel (K)."""
        return np.asarray(np.add.reduceat(values, self._kernel_starts))

    def whole(self, values: Floats) -> Floats:
        """Sum over the leaves of each program (N)."""
        return np.asarray(np.add.reduceat(values, self._starts))

    def kernels(self, values: Floats) -> Floats:
        """Sum over the kernels of each program (N)."""
        return np.asarray(np.bincount(self.owner, values, len(self.table)), dtype=np.float64)
