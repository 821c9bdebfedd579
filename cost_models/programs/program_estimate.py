"""program_estimate: what a scheduled program's time is made of, by arithmetic on its leaves.

One number a kind of work (`_program_gpu`, `_program_cpu`), in seconds if nothing else were to be
done, and how the program lies on its device. Theory and round figures: a learned model weighs them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs import _program_cpu, _program_gpu
from foreplan.cost_models.programs._program_counts import Counts
from foreplan.cost_models.programs.program_bound import ProgramBound, program_bound
from foreplan.cost_models.programs.program_table import ProgramTable

Floats = NDArray[np.float64]

#: Kinds of work of a program as a whole.
WHOLE_NAMES: tuple[str, ...] = (
    "memory_or_peak", "memory_or_peak_unfilled", "launch", "arguments", "constant", "blocks",
)  # fmt: skip
#: Kinds of work of a leaf.
LEAF_NAMES: tuple[str, ...] = (
    *(f"gpu.{name}" for name in _program_gpu.PARTS),
    *(f"cpu.{name}" for name in _program_cpu.PARTS),
)
#: Names of the columns of `ProgramEstimate.parts`.
PART_NAMES: tuple[str, ...] = (*WHOLE_NAMES, *LEAF_NAMES)
#: Names of the columns of `ProgramEstimate.terms`.
TERM_NAMES: tuple[str, ...] = ("bound", "kernels", "arguments", "leaves", "scratch_bytes",
                               "argument_bytes", *_program_gpu.TERMS)  # fmt: skip


class ProgramEstimate(NamedTuple):
    """Estimates of N programs with M leaves in all.

    Attributes:
        bound: lower bound and launch overhead.
        parts: seconds by kind of work, zero for those of another kind of device (N, parts).
        leaf_parts: those of each leaf (M, ``len(LEAF_NAMES)``).
        terms: logarithms, shares and counts (N, terms).
        program: number of each leaf's program (M).
    """

    bound: ProgramBound
    parts: Floats
    leaf_parts: Floats
    terms: Floats
    program: NDArray[np.int64]


def program_estimate(table: ProgramTable) -> ProgramEstimate:
    """Estimate every program of a table.

    Raises:
        MissingDataError: a device without peak or bandwidth.
    """
    bound, counts = program_bound(table), Counts(table)
    gpu = _program_gpu.gpu_parts(counts)
    on_cpu, leaf_on_cpu = counts.cpu[:, None], counts.cpu[counts.program][:, None]
    leaf_parts = np.concatenate(
        [
            np.where(leaf_on_cpu, 0.0, gpu.parts),
            np.where(leaf_on_cpu, _program_cpu.cpu_parts(counts), 0.0),
        ],
        axis=1,
    )
    whole = [
        bound.reference_s, bound.reference_s * np.where(counts.cpu, 0.0, gpu.slow), bound.launch_s,
        1e-7 * table.total("arguments"), np.full(len(table), 1e-6),
        np.where(counts.cpu, 0.0, gpu.blocks_s),
    ]  # fmt: skip
    terms = [
        np.log(np.maximum(bound.bound_s, 1e-12)), table.total("kernels"), table.total("arguments"),
        np.log(table.total("leaves")), np.log1p(table.total("scratch_bytes")),
        np.log1p(table.total("argument_bytes")),
    ]  # fmt: skip
    sums = np.add.reduceat(leaf_parts, table.offsets[:-1], axis=0)
    return ProgramEstimate(
        bound=bound,
        parts=np.concatenate([np.stack(whole, 1), sums], 1),
        leaf_parts=leaf_parts,
        terms=np.concatenate([np.stack(terms, 1), np.where(on_cpu, 0.0, gpu.terms)], axis=1),
        program=counts.program,
    )
