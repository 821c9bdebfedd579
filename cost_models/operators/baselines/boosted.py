"""XGBoost on log time over roofline, with operator and device figures as features.

The usual baseline: one regressor for all devices, free to use every figure of the device.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped, unused-ignore]

from foreplan.cost_models.operators.operator_features import FAMILIES, features
from foreplan.cost_models.operators.operator_work import PRECISIONS
from foreplan.datasets.sweeps.operator_table import OperatorTable


class BoostedModel(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Gradient-boosted trees, one ensemble a family.

    Args:
        trees: of each family.
        depth: of a tree.
        seed: of sampling.

    Attributes:
        boosters_: family to fitted booster.
    """

    def __init__(self, *, trees: int = 400, depth: int = 8, seed: int = 0) -> None:
        self.trees = trees
        self.depth = depth
        self.seed = seed

    def fit(self, table: OperatorTable) -> Self:
        """Fit on ``ln(latency / roofline)``."""
        import xgboost

        self.boosters_: dict[str, Any] = {}
        for family, kinds in FAMILIES.items():
            part = table.take(np.isin(table.kind, kinds))
            if not len(part):
                continue
            values, roofline = _features(part, family)
            usable = np.isfinite(roofline)
            model = xgboost.XGBRegressor(
                n_estimators=self.trees, max_depth=self.depth, learning_rate=0.06, subsample=0.8,
                colsample_bytree=0.7, n_jobs=1, random_state=self.seed, tree_method="hist",
            )  # fmt: skip
            model.fit(values[usable], np.log(part.latency_s[usable] / roofline[usable]))
            self.boosters_[family] = model
        return self

    def predict(self, table: OperatorTable) -> NDArray[np.float64]:
        """Seconds (N,), NaN where the roofline is not known or the family was not trained."""
        out = np.full(len(table), np.nan)
        for family, model in self.boosters_.items():
            rows = np.flatnonzero(np.isin(table.kind, FAMILIES[family]))
            if len(rows):
                values, roofline = _features(table.take(rows), family)
                out[rows] = np.exp(model.predict(values)) * roofline
        return out


def _features(table: OperatorTable, family: str) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    block = features(table, family)
    known = {name: PRECISIONS.get(name) for name in set(table.dtype)}
    order = {name: float(i) for i, name in enumerate(PRECISIONS)}
    rows = []
    for name in table.device:
        rows.append(name)
    vectors = {}
    for name in set(table.device):
        device = table.device_of(name)
        vectors[name] = (
            np.full(27, np.nan) if device is None else np.log(device.vector().values + 1e-30)
        )
    figures = np.stack([vectors[name] for name in rows])
    dtype = np.array([order[name] if known[name] else np.nan for name in table.dtype])
    torch = np.array([float(name.startswith("torch-2.1-")) for name in table.library])
    values = np.column_stack([block.values, figures, dtype, torch]).astype(np.float32)
    return values, block.roofline_s
