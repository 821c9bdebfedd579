"""Nearest-device copy: the time measured on the likest training device, scaled by the roofline.

For a row on an unseen device, the shapes of the likest device (same operator and data type, by
peak, bandwidth and multiprocessors) nearest in log dimensions are looked up and their time is
scaled by the ratio of the two rooflines: what an engineer does with a colleague's benchmark.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped, unused-ignore]

from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import KINDS, UNKNOWN, OperatorTable


class NearestDeviceModel(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Copies from the nearest device and shape.

    Attributes:
        table_: the training rows.
        roofline_: their roofline time (N,).
    """

    def fit(self, table: OperatorTable) -> Self:
        """Keep the rows."""
        roofline = operator_work(table).roofline_s
        usable = np.isfinite(roofline) & (table.kind != UNKNOWN)
        self.table_ = table.take(usable)
        self.roofline_ = roofline[usable]
        return self

    def predict(self, table: OperatorTable) -> NDArray[np.float64]:
        """Seconds (N,), NaN where no training device has the operator and data type."""
        from scipy.spatial import cKDTree  # type: ignore[import-untyped, unused-ignore]

        known, out = self.table_, np.full(len(table), np.nan)
        roofline = operator_work(table).roofline_s
        keys = list(zip(table.device, table.op, table.dtype, strict=True))
        for key in sorted(set(keys)):
            rows = np.array([i for i, other in enumerate(keys) if other == key])
            name, op, dtype = key
            target = table.device_of(name)
            same = (known.op == op) & (known.dtype == dtype)
            if target is None or not same.any():
                continue
            source = min(
                sorted(set(known.device[same])),
                key=lambda other: _distance(target, known.device_of(other)),
            )
            pool = np.flatnonzero(same & (known.device == source))
            kind = table.kind[rows[0]]
            tree = cKDTree(_shape(known.take(pool), kind))
            _, near = tree.query(_shape(table.take(rows), kind))
            copied = pool[near]
            out[rows] = known.latency_s[copied] * roofline[rows] / self.roofline_[copied]
        return out


def _shape(table: OperatorTable, kind: str) -> NDArray[np.float64]:
    return np.log1p(np.column_stack([table.dims[name] for name in KINDS[kind]]))


def _distance(one: Device, two: Device | None) -> float:
    """Largest log ratio of peak, bandwidth and units; an unknown figure is left out."""
    if two is None:
        return float("inf")
    gaps = [
        abs(float(np.log(float(a) / float(b))))
        for a, b in (
            (one.peak("fp32"), two.peak("fp32")),
            (one.memory_bandwidth, two.memory_bandwidth),
            (one.units, two.units),
        )
        if a and b
    ]
    return max(gaps, default=10.0)
