"""Tile selector: which tile a vendor's library takes for a matrix product, learnt on one chip.

A library picks a kernel by rules that nobody publishes, but its kernels name their tile
(``volta_sgemm_128x64_tn``), so a table that holds what the profiler saw can teach the rule: one
decision tree on the features of the shape. It is fitted on kernel names and asked about shapes
alone, so no prediction needs a profile.

Kernels come in lines, each written for a generation and used on later ones until another replaces
it. The rules of one line say little of another's: Pascal's batched products always take 128x64,
Volta's and Turing's one of three. So a device takes the selectors of the nearest line.

Shape legend: ``N`` rows, ``F`` features, ``V`` nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.tile_times import KERNEL_TILES
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device

_INDEX = {tile: index for index, tile in enumerate(KERNEL_TILES)}
_NAMED = re.compile(r"gemm_(\d+)x(\d+)")

#: Depth of the tree and rows of a leaf. Assumed.
_DEPTH, _LEAF = 14, 10

#: Fewest rows with a known tile that are worth a selector. Assumed.
_LEAST_ROWS = 200


def kernel_tiles(names: Iterable[str]) -> NDArray[np.int64]:
    """Index into `KERNEL_TILES` of each kernel's name, -1 where it tells no such tile (N,).

    cuBLAS is column-major, so the first number of a name counts columns of a row-major output.
    """
    found = (_NAMED.search(name) for name in names)
    return np.array(
        [-1 if m is None else _INDEX.get((int(m[2]), int(m[1])), -1) for m in found], dtype=np.int64
    )


def kernel_line(device: Device) -> int:
    """Line of FP32 kernels that a device runs: 0 ``maxwell``, 1 ``volta``, 2 ``ampere``.

    Source: cuBLAS's kernel names in NeuSight's tables; an H100 still runs Ampere's.
    """
    major = (device.compute_capability or "").partition(".")[0]
    return {"5": 0, "6": 0, "7": 1}.get(major, 2)


def fit_selector(values: NDArray[np.float32], tile: NDArray[np.int64]) -> TreeEnsemble | None:
    """A tree whose leaf is an index into `KERNEL_TILES`.

    Args:
        values: features (N, F) that know of no tile.
        tile: what the kernels took (N,), -1 where unknown.

    Returns:
        ``None`` where too few tiles are known.
    """
    known = tile >= 0
    if known.sum() < _LEAST_ROWS:
        return None
    from sklearn.tree import (  # type: ignore[import-untyped, unused-ignore]
        DecisionTreeClassifier,
    )

    tree = DecisionTreeClassifier(max_depth=_DEPTH, min_samples_leaf=_LEAF, random_state=0)
    fitted: Any = tree.fit(values[known], tile[known])
    nodes = fitted.tree_
    leaf = fitted.classes_[nodes.value[:, 0, :].argmax(axis=1)]
    # scikit-learn goes left at x <= t, the ensemble's walk at x < t.
    least = nodes.threshold.astype(np.float32)
    least = np.where(least > nodes.threshold, np.nextafter(least, np.float32(-np.inf)), least)
    split = np.nextafter(least, np.float32(np.inf))
    inner = nodes.children_left >= 0
    return TreeEnsemble.from_nodes([{
        "left": nodes.children_left, "right": nodes.children_right,
        "feature": nodes.feature, "value": np.where(inner, split, leaf),
        "missing_left": nodes.missing_go_to_left,
    }])  # fmt: skip


def select(selector: TreeEnsemble, values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Tiles that a selector takes for rows of features: indices into `KERNEL_TILES` (N,)."""
    return np.clip(selector.predict(values), 0, len(KERNEL_TILES) - 1).astype(np.int64)
