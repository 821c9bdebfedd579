"""ProgramScale: a program's time as a weighted sum of its parts, one weight a kind of work.

    scale = sum over parts of exp(w) * part          w fitted for GPUs and for CPUs apart

by least pseudo-Huber loss of the logarithm of scale / latency (width 0.3) with a weak pull of each
w to -1. *Fitted*: as many free parameters as kinds of work (27 on GPUs). A network or trees then
learn what is left, which is small where the program is like others only in its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.program_estimate import PART_NAMES

Floats = NDArray[np.float64]

_WIDTH, _PULL, _START = 0.3, 1e-4, -1.0
_MOST_ROWS = 6000


class ProgramScale:
    """Weights of parts.

    Attributes:
        weights: for GPUs and CPUs (2, parts), zero for parts of the other kind.
    """

    def __init__(self, weights: Floats) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)

    @classmethod
    def fit(cls, parts: Floats, cpu: NDArray[np.bool_], latency_s: Floats) -> Self:
        """Fit weights.

        Args:
            parts: seconds by kind of work (N, parts).
            cpu: whether a program ran on a CPU (N).
            latency_s: labels (N), positive.
        """
        weights = np.zeros((2, parts.shape[1]))
        for row, chosen in enumerate((~cpu, cpu)):
            if chosen.any():
                weights[row] = _weights(parts[chosen], latency_s[chosen])
        for row in range(2):  # a kind that was never seen gets the other's common parts
            if not weights[row].any():
                weights[row] = weights[1 - row]
        return cls(weights)

    def seconds(self, parts: Floats, cpu: NDArray[np.bool_]) -> Floats:
        """Return the scale (N)."""
        return np.asarray((parts * self.weights[cpu.astype(int)]).sum(1) + 1e-9)

    def shares(self, parts: Floats, cpu: NDArray[np.bool_]) -> Floats:
        """Return the share of each part in the scale (N, parts)."""
        weighted = parts * self.weights[cpu.astype(int)]
        return np.asarray(weighted / (weighted.sum(1, keepdims=True) + 1e-9))

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What it is built from, for saving."""
        return {"weights": self.weights}

    def named(self) -> dict[str, dict[str, float]]:
        """Weights by kind and part, those that are not negligible."""
        return {
            kind: {
                name: round(float(w), 4)
                for name, w in zip(PART_NAMES, self.weights[row], strict=True)
                if w > 1e-4
            }
            for row, kind in enumerate(("gpu", "cpu"))
        }


def _weights(parts: Floats, latency_s: Floats) -> Floats:
    from scipy.optimize import minimize  # type: ignore[import-untyped, unused-ignore]

    used = parts.max(0) > 1e-11
    some = slice(None, None, -(-len(parts) // _MOST_ROWS))  # a few dozen weights need no more
    chosen, target = np.ascontiguousarray(parts[some][:, used]), np.log(latency_s[some])

    def loss(w: Floats) -> tuple[float, Floats]:
        scaled = chosen * np.exp(w)
        total = scaled.sum(1)
        d = (np.log(total) - target) / _WIDTH
        root = np.sqrt(1 + d**2)
        slope = (d / root / _WIDTH / total) @ scaled / len(target)
        pull = w - _START
        return float(root.mean() + _PULL * (pull**2).mean()), slope + 2 * _PULL * pull / len(w)

    start = np.full(int(used.sum()), _START)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    weights = np.zeros(parts.shape[1])
    weights[used] = np.exp(found.x)
    return weights
