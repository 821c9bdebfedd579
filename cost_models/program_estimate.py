"""program_estimate: what a scheduled program's time is made of, by arithmetic on its leaves.

One number a kind of work (`_program_gpu`, `_program_cpu`), in seconds if nothing else were to be
done, and how the program lies on its device. Theory and round figures: a learned model weighs them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models import _program_cpu, _program_gpu
from foreplan.cost_models._program_counts import Counts
from foreplan.cost_models.program_bound import program_bound
from foreplan.cost_models.program_table import ProgramTable

Floats = NDArray[np.float64]

#: Names of the columns of `ProgramEstimate.parts`.
PART_NAMES: tuple[str, ...] = (
    "memory_or_peak", "memory_or_peak_unfilled", "launch", "arguments", "constant",
    *(f"gpu.{name}" for name in _program_gpu.PARTS),
    *(f"cpu.{name}" for name in _program_cpu.PARTS),
)  # fmt: skip
#: Names of the columns of `ProgramEstimate.terms`.
TERM_NAMES: tuple[str, ...] = ("bound", "kernels", "arguments", "leaves", "hot_share",
                               *_program_gpu.TERMS)  # fmt: skip


class ProgramEstimate(NamedTuple):
    """Estimates of N programs.

    Attributes:
        parts: seconds by kind of work, zero for those of another kind of device (N, parts).
        terms: logarithms, shares and counts (N, terms).
        hot: the leaf that takes longest, by rough times (N).
    """

    parts: Floats
    terms: Floats
    hot: NDArray[np.int64]


def program_estimate(table: ProgramTable) -> ProgramEstimate:
    """Estimate every program of a table.

    Raises:
        MissingDataError: a device without peak or bandwidth.
    """
    bound, counts = program_bound(table), Counts(table)
    gpu = _program_gpu.gpu_parts(counts)
    cpu_parts, cpu_leaf_s = _program_cpu.cpu_parts(counts)
    on_cpu = counts.cpu[:, None]
    leaf_s = np.where(counts.cpu[counts.program], cpu_leaf_s, gpu.leaf_s)
    hot = counts.hottest(leaf_s)
    common = [
        bound.reference_s, bound.reference_s * np.where(counts.cpu, 0.0, gpu.slow), bound.launch_s,
        1e-7 * table.total("arguments"), np.full(len(table), 1e-6),
    ]  # fmt: skip
    terms = [
        np.log(np.maximum(bound.bound_s, 1e-12)), table.total("kernels"), table.total("arguments"),
        np.log(table.total("leaves")), leaf_s[hot] / counts.whole(leaf_s),
    ]  # fmt: skip
    return ProgramEstimate(
        parts=np.concatenate(
            [
                np.stack(common, 1),
                np.where(on_cpu, 0.0, gpu.parts),
                np.where(on_cpu, cpu_parts, 0.0),
            ],
            axis=1,
        ),
        terms=np.concatenate([np.stack(terms, 1), np.where(on_cpu, 0.0, gpu.terms)], axis=1),
        hot=hot,
    )
