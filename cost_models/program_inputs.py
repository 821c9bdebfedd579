"""ProgramInputs: what trees and networks are given of a program, beside its leaves.

Shape legend: N programs, P parts, T terms, F entries of a leaf.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.program_bound import ProgramBound, program_bound
from foreplan.cost_models.program_estimate import program_estimate
from foreplan.cost_models.program_scale import ProgramScale
from foreplan.cost_models.program_table import ProgramTable
from foreplan.datasets.device import FEATURE_NAMES as DEVICE_FEATURES

Floats = NDArray[np.float64]


class ProgramInputs(NamedTuple):
    """Inputs of N programs.

    Attributes:
        scale_s: weighted sum of the parts, seconds (N).
        bound: lower bound and launch overhead.
        summary: terms, ln of parts, shares of parts in the scale (N, T + 2 P + 1), float32.
        hot: vector of the leaf that takes longest (N, F), float32.
        device: figures on a scale of log10, NaN where unknown (N, figures), float32.
    """

    scale_s: Floats
    bound: ProgramBound
    summary: NDArray[np.float32]
    hot: NDArray[np.float32]
    device: NDArray[np.float32]

    @property
    def flat(self) -> NDArray[np.float32]:
        """Everything of a program in one row, for trees."""
        return np.concatenate([self.summary, self.hot, self.device], 1)


def fit_scale(table: ProgramTable, latency_s: Floats) -> ProgramScale:
    """Fit the weights of parts on a table's rows."""
    return ProgramScale.fit(program_estimate(table).parts, on_cpus(table), latency_s)


def program_inputs(table: ProgramTable, scale: ProgramScale) -> ProgramInputs:
    """Return the inputs of a table's programs.

    Raises:
        MissingDataError: a device without peak or bandwidth.
    """
    estimate, cpu = program_estimate(table), on_cpus(table)
    seconds = scale.seconds(estimate.parts, cpu)
    figures = np.stack([device.vector().values for device in table.devices])
    summary = [
        estimate.terms, np.log(estimate.parts + 1e-10), scale.shares(estimate.parts, cpu),
        np.log(seconds)[:, None],
    ]  # fmt: skip
    return ProgramInputs(
        scale_s=seconds,
        bound=program_bound(table),
        summary=np.concatenate(summary, 1).astype(np.float32),
        hot=table.leaves[estimate.hot],
        device=np.log10(np.maximum(figures, 1e-12)).astype(np.float32)[table.device],
    )


#: Entries of a device in `ProgramInputs.device`.
DEVICE_ENTRIES = len(DEVICE_FEATURES)


def on_cpus(table: ProgramTable) -> NDArray[np.bool_]:
    """Whether each program ran on a CPU (N)."""
    return np.array([d.kind == "cpu" for d in table.devices], dtype=np.bool_)[table.device]
