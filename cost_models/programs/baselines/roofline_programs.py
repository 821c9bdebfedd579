"""RooflinePrograms: arithmetic and bytes at the device's peaks, and no less than the launch."""

from __future__ import annotations

from typing import Self

import numpy as np
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models.programs.program_bound import program_bound
from foreplan.cost_models.programs.program_table import Floats, ProgramTable


class RooflinePrograms(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Nothing is fitted."""

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def fit(self, table: ProgramTable, y: Floats | None = None) -> Self:
        """Return itself."""
        return self

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,).

        Raises:
            MissingDataError: a device without peak or bandwidth.
        """
        bound = program_bound(table)
        return np.asarray(np.maximum(bound.reference_s, bound.launch_s), dtype=np.float64)
