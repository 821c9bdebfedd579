"""Calibrates the operator predictor to one device from a few rows that were measured on it.

For each group of the rows (device, library, data type, kind) the law of `operator_predictor` gets
free numbers,

    ln y = ln head(o e^h, max(bound, structural * exp(f + c + sum over e of t_e (f_e - m_e)
           + sum over j of b_j z_j)))

with h the host's speed, c an offset of the device, t_e what each expert counts more or less than
the gate says, and b_j slopes on standardised shape features z_j. All have normal priors around 0,
so one row moves the offset a little and 64 rows can change what is believed of whom: the maximum a
posteriori, with a soft-L1 loss against outliers (scipy's ``least_squares``). The widths of the
priors are assumed, not fitted.

This is few-shot, never zero-shot: whoever shows its errors says how many rows it saw.

Shape legend: ``N`` rows, ``E`` experts, ``Z`` shape features, ``P`` = 2 + E + Z free numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.fitted_experts import by_family
from foreplan.cost_models.operators.operator_experts import seconds
from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.datasets.sweeps.operator_table import OperatorTable
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

#: Widths of the priors: host's speed, device's offset, an expert's share, a slope.
_HOST, _OFFSET, _EXPERT, _SLOPE = 0.3, 0.3, 0.15, 0.05

#: Spread of ln(measured / law) that is noise, by family; others 0.15.
_NOISE = MappingProxyType({"product": 0.2, "conv": 0.2, "wide": 0.1})

#: Features that may have a slope, where a family has them.
_SLOPED = (
    "log_roofline_us", "log_compute_to_memory", "log_bytes_to_l2", "log_m", "log_n", "log_k",
    "log_b", "log_rows", "log_cols", "wave_fill_128x128", "wave_fill_64x64", "log_waves_128x64",
    "align_m", "align_n", "align_k", "align_cols", "inputs", "cost", "log_queries", "log_keys",
    "log_group", "head_dim", "log_out", "window", "stride",
)  # fmt: skip

_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What was learnt of one group of rows.

    Attributes:
        host: h.
        weights: c, the t_e and the b_j (P - 1,).
        centre, scale: of the shape features (Z,).
        rows: rows it was learnt from.
    """

    host: float
    weights: Floats
    centre: Floats
    scale: Floats
    rows: int


@dataclass(frozen=True, slots=True)
class _Group:
    """The law of some rows, ready to be evaluated."""

    key: _Key
    family: str
    rows: NDArray[np.int64]
    columns: Floats  # 1, f_e - m_e (N, 1 + E)
    shapes: Floats  # (N, Z)
    base: Floats
    overhead_s: Floats
    structural_s: Floats
    bound_s: Floats

    def seconds(self, host: float, correction: Floats, rows: slice | NDArray[np.bool_]) -> Floats:
        return seconds(
            self.overhead_s[rows] * np.exp(host), self.structural_s[rows], self.bound_s[rows],
            self.base[rows] + correction,
        )  # fmt: skip


class CalibratedPredictor:
    """A predictor that has seen a few rows of a device.

    Args:
        model: fitted without the device, or with it.

    Attributes:
        adjustments_: by device, library, data type and kind.
    """

    def __init__(self, model: OperatorPredictor) -> None:
        self.model = model

    def fit(self, table: OperatorTable) -> CalibratedPredictor:
        """Learn from measured rows of one or several devices; groups do not share anything.

        Raises:
            SpecError: no row that the model can predict.
        """
        self.adjustments_: dict[_Key, Adjustment] = {}
        for group in _groups(self.model, table):
            measured = table.latency_s[group.rows]
            known = np.isfinite(group.base) & np.isfinite(group.structural_s) & (measured > 0)
            if known.any():
                self.adjustments_[group.key] = _adjust(group, measured, known)
        if not self.adjustments_:
            raise SpecError("calibration rows", got=len(table), expected="rows that the predictor "
                            "knows the operator, data type and device of")  # fmt: skip
        return self

    def predict(self, table: OperatorTable) -> Floats:
        """Seconds (N,); groups without calibration rows as the model predicts them."""
        found = self.model.predict(table)
        for group in _groups(self.model, table):
            learnt = self.adjustments_.get(group.key)
            if learnt is not None:
                shapes = (group.shapes - learnt.centre) / learnt.scale
                correction = np.column_stack([group.columns, shapes]) @ learnt.weights
                found[group.rows] = group.seconds(learnt.host, correction, slice(None))
        return found


def _groups(model: OperatorPredictor, table: OperatorTable) -> Iterator[_Group]:
    for family, rows in by_family(table):
        part = table.take(rows)
        block = features(part, family)
        names = [block.names.index(name) for name in _SLOPED if name in block.names]
        for mixture in model.mixtures(family, part, block):
            for kind in sorted(set(part.kind[mixture.rows])):
                mine = part.kind[mixture.rows] == kind
                at = mixture.rows[mine]
                first = at[0]
                centred = (mixture.corrections - mixture.offsets)[mine]
                yield _Group(
                    key=(part.device[first], part.library[first], part.dtype[first], kind),
                    family=family, rows=rows[at],
                    columns=np.column_stack([np.ones(len(at)), centred]),
                    shapes=np.nan_to_num(block.values[at][:, names].astype(np.float64)),
                    base=mixture.base[mine], overhead_s=mixture.overhead_s[mine],
                    structural_s=block.structural_s[at], bound_s=block.bound_s[at],
                )  # fmt: skip


def _adjust(group: _Group, measured: Floats, known: NDArray[np.bool_]) -> Adjustment:
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    count = int(known.sum())
    shapes, target = group.shapes[known], np.log(measured[known])
    centre, scale = shapes.mean(axis=0), np.maximum(shapes.std(axis=0), 1e-9)
    if count < 2:  # no spread to standardise by, and no slope to learn
        scale = np.full_like(scale, np.inf)
    columns = np.column_stack([group.columns[known], (shapes - centre) / scale])
    experts = group.columns.shape[1] - 1
    width = np.concatenate([[_OFFSET], np.full(experts, _EXPERT), np.full(shapes.shape[1], _SLOPE)])
    noise = _NOISE.get(group.family, 0.15)

    def residuals(free: Floats) -> Floats:
        found = group.seconds(free[0] * _HOST, columns @ (free[1:] * width), known)
        return np.concatenate([(np.log(found) - target) / noise, free])

    def loss(square: Floats) -> Floats:
        # Soft L1 for rows, plain squares for priors.
        root = np.where(np.arange(len(square)) < count, np.sqrt(1 + square), 1.0)
        row = np.arange(len(square)) < count
        return np.stack([
            np.where(row, 2 * (root - 1), square),
            np.where(row, 1 / root, 1.0),
            np.where(row, -0.5 / root**3, 0.0),
        ])  # fmt: skip

    start = np.zeros(1 + len(width))
    free = least_squares(residuals, start, loss=loss, max_nfev=60).x
    return Adjustment(float(free[0] * _HOST), free[1:] * width, centre, scale, count)
