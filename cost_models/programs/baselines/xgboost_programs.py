"""XGBoostPrograms: boosted trees on sums and maxima over leaves, with totals and device figures."""

from __future__ import annotations

from typing import Self

import numpy as np
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models.programs.baselines._base import device_inputs, labels
from foreplan.cost_models.programs.program_bound import program_bound
from foreplan.cost_models.programs.program_table import Floats, ProgramTable


class XGBoostPrograms(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Trees on ln(latency / reference), the same scale that our predictor has.

    Args:
        rounds: trees.
        depth: of a tree.
        learning_rate: of boosting.
        threads: threads of xgboost.
        seed: of row and column sampling.
    """

    def __init__(
        self,
        *,
        rounds: int = 600,
        depth: int = 8,
        learning_rate: float = 0.05,
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        self.rounds = rounds
        self.depth = depth
        self.learning_rate = learning_rate
        self.threads = threads
        self.seed = seed

    def fit(self, table: ProgramTable, y: Floats | None = None) -> Self:
        """Fit on a table.

        Raises:
            SpecError: a label that is no positive number.
        """
        import xgboost

        target = np.log(labels(table, y) / program_bound(table).reference_s)
        settings = {
            "max_depth": self.depth, "eta": self.learning_rate, "subsample": 0.8,
            "colsample_bytree": 0.6, "nthread": self.threads, "seed": self.seed,
        }  # fmt: skip
        data = xgboost.DMatrix(_inputs(table), target)
        self.trees_ = xgboost.train(settings, data, self.rounds)
        return self

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,)."""
        import xgboost

        found = self.trees_.predict(xgboost.DMatrix(_inputs(table)))
        return np.asarray(np.exp(found) * program_bound(table).reference_s, dtype=np.float64)


def _inputs(table: ProgramTable) -> Floats:
    starts = table.offsets[:-1]
    plain = np.exp2(np.minimum(table.leaves.astype(np.float64), 60.0)) - 1
    return np.concatenate(
        [
            np.log2(1 + np.maximum(0.0, np.add.reduceat(plain, starts))),
            np.maximum.reduceat(table.leaves, starts),
            np.log2(1 + table.totals),
            device_inputs(table),
        ],
        axis=1,
    )
