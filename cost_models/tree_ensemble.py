"""Gradient-boosted trees as plain arrays: fitted by XGBoost, evaluated by numba, saved as tensors.

The trees correct the structural time of an operator. They are fitted through the launch head, so
that a row which only measures the host's launch teaches nothing about the device:

    r = ln(head(o, s * exp(f))) - ln(y)

with o the launch overhead, s the structural time, y the measured time and f the sum of the trees;
the loss is a pseudo-Huber of r (width 0.1), which for small errors is the relative error squared
and for large ones the relative error itself.

Shape legend: ``N`` rows, ``F`` features, ``T`` trees, ``V`` nodes of all trees together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreplan._compiled import compiled
from foreplan.cost_models.operators.launch_head import head, head_slope
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

#: Width of the loss's round foot, as a logarithm: errors beyond 10 % pull alike. Assumed.
_HUBER = 0.1


class TreeEnsemble:
    """Sum of regression trees.

    Attributes:
        roots: first node of each tree (T,).
        feature: feature that a node splits on, -1 for a leaf (V,).
        value: threshold of a split, or a leaf's value (V,).
        left: node to go to where the feature is below the threshold; the right one follows it (V,).
        missing_left: whether an unknown feature goes left (V,).
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.roots = np.asarray(arrays["roots"], dtype=np.int32)
        self.feature = np.asarray(arrays["feature"], dtype=np.int16)
        self.value = np.asarray(arrays["value"], dtype=np.float32)
        self.left = np.asarray(arrays["left"], dtype=np.int32)
        self.missing_left = np.asarray(arrays["missing_left"], dtype=np.bool_)
        self._check()

    @classmethod
    def fit(
        cls,
        values: NDArray[np.float32],
        *,
        overhead_s: Floats,
        structural_s: Floats,
        latency_s: Floats,
        weight: Floats | None = None,
        trees: int = 160,
        depth: int = 6,
        rate: float = 0.1,
        seed: int = 0,
        threads: int = 1,
    ) -> Self:
        """Fit trees.

        Args:
            values: features (N, F), NaN where unknown.
            overhead_s: launch overhead of each row (N,).
            structural_s: structural time (N,).
            latency_s: measured time (N,).
            weight: of each row (N,), or ``None`` for one each.
            trees: number of trees.
            depth: largest depth of a tree.
            rate: learning rate.
            seed: of the sampling of rows and features.
            threads: of XGBoost.
        """
        import xgboost

        target, scale = np.log(latency_s), np.ones(len(latency_s)) if weight is None else weight

        def objective(f: NDArray[Any], data: Any) -> tuple[Floats, Floats]:
            time = structural_s * np.exp(np.clip(f, -8.0, 12.0))
            total = head(overhead_s, time)
            r, slope = np.log(total) - target, head_slope(overhead_s, time) / total
            q = np.sqrt(1 + (r / _HUBER) ** 2)
            return scale * r / q * slope, scale * np.maximum(slope**2 / q, 1e-3)

        parameters = {
            "max_depth": depth, "eta": rate, "subsample": 0.8, "colsample_bynode": 0.5,
            "min_child_weight": 5.0, "lambda": 5.0, "base_score": 0.0, "nthread": threads,
            "seed": seed, "tree_method": "hist",
        }  # fmt: skip
        booster = xgboost.train(parameters, xgboost.DMatrix(values), trees, obj=objective)
        return cls.from_booster(booster)

    @classmethod
    def from_booster(cls, booster: Any) -> Self:
        """Take over the trees of a fitted ``xgboost.Booster`` with a base score of zero."""
        return cls.from_nodes(_trees(booster))

    @classmethod
    def from_nodes(cls, trees: Iterable[Mapping[str, Any]]) -> Self:
        """Take over trees whose nodes stand in any order, the root first.

        Args:
            trees: of each the columns ``left`` and ``right`` (children, below 0 for a leaf),
                ``feature``, ``value`` (a leaf's, or the threshold that goes left below) and
                ``missing_left``.
        """
        return cls(_pack(trees))

    def _check(self) -> None:
        """Raise where the walk, which trusts its arrays, would leave them or not end."""
        count = len(self.feature)
        columns = (self.feature, self.value, self.left, self.missing_left)
        if any(column.shape != (count,) for column in columns) or self.roots.ndim != 1:
            raise ValueError("trees of columns of unlike length")
        place, inner = np.arange(count), self.feature >= 0
        # Children stand behind their parent, the right one behind the left one.
        if np.any(inner & ((self.left <= place) | (self.left >= count - 1))):
            raise ValueError("trees with a child that is not behind its parent")
        if np.any((self.roots < 0) | (self.roots >= count)):
            raise ValueError("trees with a root that is no node")

    def predict(self, values: NDArray[np.float32]) -> Floats:
        """Sum of the trees (N,).

        Raises:
            SpecError: the trees ask for a feature that the rows do not have.
        """
        if self.feature.max(initial=-1) >= values.shape[1]:
            raise SpecError(
                "trees", got=int(self.feature.max()), expected=f"features below {values.shape[1]}",
                fix="these are weights of other features: train them again",
            )  # fmt: skip
        rows = np.ascontiguousarray(values, dtype=np.float32)
        return np.asarray(
            _walk(rows, self.roots, self.feature, self.value, self.left, self.missing_left)
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What `TreeEnsemble` is built from; leaves and thresholds in single precision."""
        return {
            "roots": self.roots, "feature": self.feature, "value": self.value, "left": self.left,
            "missing_left": self.missing_left.astype(np.uint8),
        }  # fmt: skip


def _trees(booster: Any) -> list[Mapping[str, Any]]:
    """XGBoost's trees, column by column; a leaf's value is in split_conditions too."""
    import json

    model = json.loads(bytes(booster.save_raw("json")))
    return [
        {
            "left": tree["left_children"], "right": tree["right_children"],
            "feature": tree["split_indices"], "value": tree["split_conditions"],
            "missing_left": tree["default_left"],
        }
        for tree in model["learner"]["gradient_booster"]["model"]["trees"]
    ]  # fmt: skip


def _pack(trees: Iterable[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Renumber trees so that a right child follows its left one."""
    roots: list[int] = []
    feature: list[int] = []
    value: list[float] = []
    left: list[int] = []
    missing: list[bool] = []
    for tree in trees:
        lefts, rights = tree["left"], tree["right"]
        roots.append(len(feature))
        place = {0: len(feature)}
        queue = [0]
        for columns in (feature, left):
            columns.append(-1)
        value.append(0.0)
        missing.append(False)
        while queue:
            node = queue.pop()
            at = place[node]
            value[at] = tree["value"][node]
            if lefts[node] < 0:
                continue
            feature[at] = tree["feature"][node]
            missing[at] = bool(tree["missing_left"][node])
            left[at] = len(feature)
            for child in (lefts[node], rights[node]):
                place[child] = len(feature)
                feature.append(-1)
                left.append(-1)
                value.append(0.0)
                missing.append(False)
                queue.append(child)
    return {
        "roots": np.array(roots), "feature": np.array(feature), "value": np.array(value),
        "left": np.array(left), "missing_left": np.array(missing),
    }  # fmt: skip


@compiled
def _walk(values, roots, feature, value, left, missing_left):  # type: ignore[no-untyped-def]
    out = np.zeros(values.shape[0])
    for row in range(values.shape[0]):
        total = 0.0
        for root in roots:
            node = root
            while feature[node] >= 0:
                x = values[row, feature[node]]
                down = missing_left[node] if np.isnan(x) else x < value[node]
                node = left[node] if down else left[node] + 1
            total += value[node]
        out[row] = total
    return out
