"""Interpolating measured times of one operator and variant between and beyond the measured shapes.

Two layers, both exact where something was measured:

- *trend*: a physical model that is never negative and never decreases with a dimension,
  ``time = sum_j w_j f_j(dims)``, ``w >= 0``, with features such as one call, FLOP, weight elements
  and activation elements. Fitted by non-negative least squares on the relative error,
  ``min sum_i (trend_i / time_i - 1)^2``.
- *residual*: ``log(time / trend)``, interpolated over the logarithms of the dimensions by simple
  kriging with the covariance ``s^2 exp(-distance / range)`` (Ornstein-Uhlenbeck: continuous, close
  to linear between neighbours, back to the trend far from them). The range is the one of `_RANGES`
  with the least leave-one-out error.

The interval comes from leave-one-out residuals: each point is predicted from all others, trend
refitted; the 90 % quantile of the errors in units of the kriging deviation scales the interval.
Kriging: Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, sections 2.2 and 5.4.2
(leave-one-out in closed form).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.experts import EXPERT_OPERATORS, touched_experts
from foreplan.datasets.operators import ATTENTIONS, OPERATORS, PRODUCTS
from foreplan.datasets.program import Variant

Array = NDArray[np.float64]
Dims = Mapping[str, int]

#: Candidate ranges of the residual's covariance, in doublings of a dimension.
_RANGES = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Least relative deviation of the residual's process: two exact measurements still differ.
_LEAST_DEVIATION = 0.01
#: Half width (natural log) of the interval where too few points exist to leave one out.
_UNKNOWN = math.log(2.0)
_FEW = 4


def _features(op: str) -> Callable[[Dims], list[float]]:
    """Features whose non-negative sum is the trend of an operator's time."""
    flops = OPERATORS[op].flops
    if op == "linear" or op.startswith("linear_"):
        return lambda d: [1.0, flops(d), d["n"] * d["k"], d["rows"] * (d["n"] + d["k"])]
    if op.startswith("embedding_"):
        return lambda d: [1.0, d["rows"] * d["cols"], d["vocab"] * d["cols"]]
    if op in EXPERT_OPERATORS:
        return lambda d: [
            1.0,
            flops(d),
            touched_experts(d["rows"], d["experts"], d["active"]),
            touched_experts(d["rows"], d["experts"], d["active"]) * d["ffn"] * d["hidden"],
            d["rows"] * d["active"] * (d["ffn"] + d["hidden"]),
        ]
    if op in PRODUCTS - ATTENTIONS:
        moved, fp32 = OPERATORS[op].bytes, Variant("fp32", "fp32", "any")
        return lambda d: [1.0, flops(d), moved(d, fp32)]
    if op in ATTENTIONS:
        return lambda d: [
            1.0,
            flops(d),
            d["batch"] * d["keys"] * d["kv_heads"] * d["head_dim"],
            d["batch"] * d["queries"] * d["heads"],
        ]
    if op == "cache_write":
        return lambda d: [
            1.0,
            d["batch"] * d["tokens"] * d["kv_heads"] * d["head_dim"],
            d["batch"] * d["kv_heads"],
        ]
    if op == "optimizer_step":
        return lambda d: [1.0, d["parameters"], d["tensors"]]
    return lambda d: [1.0, math.prod(d.values()), d.get("rows", 1)]


class Prediction(NamedTuple):
    """An interpolated time.

    Attributes:
        seconds: expected time.
        half_width: half of the 90 % interval of its natural logarithm.
        beyond: how far outside the measured range: the largest factor over the dimensions by which
            the shape is below the least or above the greatest measured size, 1 inside.
    """

    seconds: float
    half_width: float
    beyond: float


class Interpolation:
    """Times of one operator and variant as a function of its dimensions.

    Args:
        op: operator name.
        dims: dimensions of each measured program.
        seconds: measured times, positive, one for each.
        spread: half of ``log(high / low)`` of each measurement.
    """

    def __init__(
        self, op: str, dims: Sequence[Dims], seconds: Sequence[float], spread: Sequence[float]
    ) -> None:
        self._features = _features(op)
        self._names = OPERATORS[op].dims
        self._points = np.array([self._log2(d) for d in dims])
        self._low, self._high = self._points.min(axis=0), self._points.max(axis=0)
        design = np.array([self._features(d) for d in dims], dtype=float)
        times = np.asarray(seconds, dtype=float)
        self._noise = float(np.median(spread))
        # Features span many orders of magnitude; NNLS wants columns of one size.
        self._scale = np.maximum((design / times[:, None]).max(axis=0), 1e-300)
        self._weights = self._fit(design, times)
        residual = np.log(times / self._trend(design))
        self._range, inverse = self._choose_range(residual)
        self._alpha, self._inverse = inverse @ residual, inverse
        self._deviation, self._quantile = self._calibrate(design, times)

    def predict(self, dims: Dims) -> Prediction:
        """Time for any dimensions; see the module."""
        point = self._log2(dims)
        trend = float(self._trend(np.array([self._features(dims)]))[0])
        near = self._covariance(self._points, point[None])[:, 0]
        residual = float(near @ self._alpha)
        variance = max(1.0 - float(near @ self._inverse @ near), 0.0)
        half = math.hypot(self._quantile * self._deviation * math.sqrt(variance), self._noise)
        outside = np.maximum(self._low - point, point - self._high).max()
        return Prediction(trend * math.exp(residual), half, 2.0 ** max(float(outside), 0.0))

    @property
    def leave_one_out(self) -> Array:
        """Errors of predicting each point from the others, ``log(predicted / measured)``.

        Zeros where there are too few points to leave one out.
        """
        return self._errors

    # ------------------------------------------------------------------------------- fitting

    def _log2(self, dims: Dims) -> Array:
        sizes = np.array([dims[name] for name in self._names], dtype=float)
        return np.asarray(np.log2(sizes))

    def _fit(self, design: Array, times: Array) -> Array:
        from scipy.optimize import nnls  # type: ignore[import-untyped]  # slow to import

        weights, _ = nnls(design / times[:, None] / self._scale, np.ones(len(times)))
        return np.asarray(weights / self._scale, dtype=float)

    def _trend(self, design: Array, weights: Array | None = None) -> Array:
        trend: Array = design @ (self._weights if weights is None else weights)
        return np.asarray(np.maximum(trend, 1e-12))

    def _covariance(self, a: Array, b: Array, over: float | None = None) -> Array:
        distance = np.linalg.norm(a[:, None, :] - b[None, :, :], axis=2)
        return np.asarray(np.exp(-distance / (over or self._range)))

    def _choose_range(self, residual: Array) -> tuple[float, Array]:
        best: tuple[float, float, Array] | None = None
        for candidate in _RANGES:
            matrix = self._covariance(self._points, self._points, candidate)
            # Points a rounding error apart would make the matrix singular.
            inverse = np.asarray(np.linalg.inv(matrix + 1e-10 * np.eye(len(matrix))), dtype=float)
            error = float(np.mean(((inverse @ residual) / np.diag(inverse)) ** 2))
            if best is None or error < best[0]:
                best = (error, candidate, inverse)
        assert best is not None
        return best[1], best[2]

    def _calibrate(self, design: Array, times: Array) -> tuple[float, float]:
        """Deviation of the residual's process and the 90 % quantile of standardised errors."""
        count = len(times)
        errors, deviations = np.zeros(count), np.zeros(count)
        self._errors = errors
        if count < _FEW:
            return _UNKNOWN, 1.0
        for i in range(count):
            others = np.arange(count) != i
            trend = self._trend(design, self._fit(design[others], times[others]))
            residual = np.log(times / trend)
            share = -self._inverse[i] / self._inverse[i, i]
            errors[i] = float(share[others] @ residual[others]) - residual[i]
            deviations[i] = math.sqrt(1.0 / self._inverse[i, i])
        standard = errors / deviations
        deviation = max(float(np.sqrt(np.mean(standard**2))), _LEAST_DEVIATION)
        return deviation, max(float(np.quantile(np.abs(standard) / deviation, 0.9)), 1.0)
