"""Roofline: the larger of FLOP over peak and bytes over bandwidth; nothing is fitted."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped, unused-ignore]

from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.datasets.sweeps.operator_table import OperatorTable


class RooflineModel(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Seconds that no kernel on the device can beat; launch overhead left out."""

    def fit(self, table: OperatorTable) -> Self:
        """Learn nothing."""
        return self

    def predict(self, table: OperatorTable) -> NDArray[np.float64]:
        """Seconds (N,), NaN where the operator, the data type or a figure is not known."""
        return operator_work(table).roofline_s
