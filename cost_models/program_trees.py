"""ProgramTrees: boosted trees on how much longer each leaf of a program takes than its scale.

    latency = sum over leaves of scale * exp(sum of trees)

so that what a leaf is like corrects that leaf's share alone. The loss is a pseudo-Huber of ln,
twice as steep above as below, since a time that is predicted too long costs more relative error
than one too short; a leaf's slope is the program's times the share of the leaf. Fitted by XGBoost,
evaluated by numba from plain arrays (`tree_ensemble`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.program_inputs import ProgramInputs
from foreplan.cost_models.tree_ensemble import TreeEnsemble

Floats = NDArray[np.float64]

#: Width of the loss's round foot, its slope above and below. Chosen on the development families.
_WIDTH, _ABOVE, _BELOW = 0.3, 1.6, 0.8
#: Most that trees make of a leaf, as a logarithm.
_MOST = 6.0


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
        start_s: Floats | None = None,
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
            start_s: seconds of leaves to correct (M); their scale by default.
        """
        import xgboost

        settings = {
            "base_score": 0.0, "max_depth": depth, "eta": learning_rate, "subsample": 0.7,
            "colsample_bytree": 0.4, "min_child_weight": 5.0, "max_bin": 128,
            "tree_method": "hist", "nthread": threads, "seed": seed,
            "disable_default_eval_metric": True,
        }  # fmt: skip
        start, target = inputs.leaf_s if start_s is None else start_s, np.log(latency_s)

        def slopes(margin: NDArray[np.float32], _: Any) -> tuple[Floats, Floats]:
            leaf_s = start * np.exp(np.clip(margin, -_MOST, _MOST))
            total = np.add.reduceat(leaf_s, inputs.starts)
            first, second = _slopes(np.log(total) - target)
            share = leaf_s / total[inputs.program]
            return first[inputs.program] * share, second[inputs.program] * share + 1e-6

        data = xgboost.DMatrix(inputs.flat, np.zeros(len(start)))
        return cls(TreeEnsemble.from_booster(xgboost.train(settings, data, rounds, obj=slopes)))

    def predict(self, flat: NDArray[np.float32]) -> Floats:
        """Return ln(latency / scale) of rows of `ProgramInputs.flat` (M)."""
        return np.clip(self.ensemble.predict(flat), -_MOST, _MOST)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What `TreeEnsemble` is built from."""
        return self.ensemble.arrays()


def _slopes(off: Floats) -> tuple[Floats, Floats]:
    """Slope and curvature of the loss at ln(predicted / measured)."""
    root = np.sqrt(1 + (off / _WIDTH) ** 2)
    side = np.where(off > 0, _ABOVE, _BELOW)
    return side * off / root, side * root**-3
