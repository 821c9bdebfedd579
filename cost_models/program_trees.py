"""ProgramTrees: boosted trees on the ratio of a program's latency to its scale.

    ln(latency / scale) = sum of trees          loss: pseudo-Huber of width 0.3

Fitted by XGBoost, evaluated by numba from plain arrays (`tree_ensemble`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.program_inputs import ProgramInputs
from foreplan.cost_models.tree_ensemble import TreeEnsemble

Floats = NDArray[np.float64]


class ProgramTrees:
    """Trees over `ProgramInputs.flat`.

    Build it with `fit`, or from the `arrays` of a fitted one.
    """

    def __init__(self, ensemble: TreeEnsemble) -> None:
        self.ensemble = ensemble

    @classmethod
    def fit(
        cls,
        inputs: ProgramInputs,
        latency_s: Floats,
        *,
        rounds: int,
        depth: int,
        learning_rate: float,
        threads: int,
        seed: int,
        start: Floats | None = None,
    ) -> Self:
        """Fit trees; see `ProgramPredictor` for the settings.

        Args:
            inputs: of the training programs.
            latency_s: labels (N).
            rounds: trees.
            depth: of a tree.
            learning_rate: of boosting.
            threads: of XGBoost.
            seed: of the sampling of rows and features.
            start: ln seconds to correct (N); the scale by default.
        """
        import xgboost

        settings = {
            "objective": "reg:pseudohubererror", "huber_slope": 0.3, "base_score": 0.0,
            "max_depth": depth, "eta": learning_rate, "subsample": 0.7, "colsample_bytree": 0.4,
            "min_child_weight": 5.0, "max_bin": 128, "tree_method": "hist", "nthread": threads,
            "seed": seed,
        }  # fmt: skip
        target = np.log(latency_s) - (np.log(inputs.scale_s) if start is None else start)
        data = xgboost.DMatrix(inputs.flat, target)
        return cls(TreeEnsemble.from_booster(xgboost.train(settings, data, rounds)))

    def predict(self, inputs: ProgramInputs) -> Floats:
        """Return ln(latency / scale) (N)."""
        return self.ensemble.predict(inputs.flat)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What `TreeEnsemble` is built from."""
        return self.ensemble.arrays()
