"""ProgramScale: a program's time as a weighted sum of its parts, one weight a kind of work.

    scale = sum over parts of exp(w + d) * part      w fitted for GPUs and for CPUs apart

by least pseudo-Huber loss of the logarithm of scale / latency (width 0.3) with a weak pull of each
w to -1. Where several devices of a kind are trained on, each gets its own d, what it is faster or
slower at than the others: a factor for all parts, and one for each part, pulled to none. A device
that was not trained on takes d of the device of its chip that is most like it; one of an unknown
chip the mean of what it would take of each known chip, as no figure says which it is like.
*Fitted*: as many free parameters as kinds of work (31 on GPUs) and as many again for each such
device. A network or trees then learn what is left, which is small where the program is like others
only in its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_estimate import PART_NAMES

Floats = NDArray[np.float64]

#: See the module. Assumed: the loss is about linear from 30 % off, and weights start at exp(-1), as
#: parts overlap and together are an upper estimate.
_WIDTH, _PULL, _START = 0.3, 1e-4, -1.0
#: Rows that weights are fitted on, evenly spread: over a hundred a weight; more take longer.
_MOST_ROWS = 6000
#: Rows of those that have a part: with fewer it gets no weight, which would hang on what else is
#: slow about a handful of programs (five tasks made padded norms 4 to 28 times too slow). The count
#: itself is assumed.
_LEAST_ROWS = 20
#: Pull of a device's factor of one part; chosen on the development families (3e-3, 1e-3 and 1e-4).
_DEVICE_PULL = 1e-4


class DeviceFigures(NamedTuple):
    """What is known of a device before a program has run on it.

    Attributes:
        chip: that it is, or is a slice of.
        values: on a scale of log10, NaN where unknown (figures).
    """

    chip: str
    values: Floats


class DeviceFactors(NamedTuple):
    """What one device is faster or slower at.

    Attributes:
        cpu: whether it is a CPU.
        figures: its chip and figures.
        factors: of the weights of parts (parts).
    """

    cpu: bool
    figures: DeviceFigures
    factors: Floats


class ProgramScale:
    """Weights of parts.

    Args:
        weights: for GPUs and CPUs (2, parts), zero for parts of the other kind.
        devices: those that were trained on beside others of their kind, by name.
    """

    def __init__(self, weights: Floats, devices: Mapping[str, DeviceFactors] | None = None) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)
        self.devices = dict(devices or {})

    @classmethod
    def fit(
        cls, parts: Floats, cpu: NDArray[np.bool_], latency_s: Floats,
        device: NDArray[np.str_] | None = None,
        figures: Mapping[str, DeviceFigures] | None = None,
    ) -> Self:  # fmt: skip
        """Fit weights.

        Args:
            parts: seconds by kind of work (N, parts).
            cpu: whether a program ran on a CPU (N).
            latency_s: labels (N), positive.
            device: name of each program's device (N); one by default.
            figures: of devices by name; needed with ``device``.
        """
        weights, devices = np.zeros((2, parts.shape[1])), {}
        for row, chosen in enumerate((~cpu, cpu)):
            if not chosen.any():
                continue
            weights[row] = _weights(parts[chosen], latency_s[chosen])
            names = [] if device is None else np.unique(device[chosen]).tolist()
            for name in names if len(names) > 1 else ():
                own = chosen & (device == name)
                devices[name] = DeviceFactors(
                    bool(row), (figures or {})[name],
                    _factors(parts[own] * weights[row], latency_s[own]),
                )  # fmt: skip
        for row in range(2):  # a kind that was never seen gets the other's common parts
            if not weights[row].any():
                weights[row] = weights[1 - row]
        return cls(weights, devices)

    def of_rows(
        self, cpu: NDArray[np.bool_], device: NDArray[np.str_],
        figures: Mapping[str, DeviceFigures],
    ) -> Floats:  # fmt: skip
        """Weights of each program's parts, by the kind and name of its device (N, parts).

        Args:
            cpu: whether a program runs on a CPU (N).
            device: name of each program's device (N).
            figures: of devices by name.
        """
        found = self.weights[cpu.astype(int)]
        for name in np.unique(device).tolist() if self.devices else ():
            own = device == name
            like = self._like(name, bool(cpu[own][0]), figures[name])
            if like is not None:
                found[own] *= like
        return np.asarray(found)

    def _like(self, name: str, cpu: bool, figures: DeviceFigures) -> Floats | None:
        """Factors of the device itself, of the likest of its chip, or the mean over chips."""
        if name in self.devices:
            return self.devices[name].factors
        nearest: dict[str, tuple[float, Floats]] = {}  # of each chip the one of nearest figures
        for item in self.devices.values():
            if item.cpu != cpu:
                continue
            away = np.nan_to_num(item.figures.values - figures.values)
            distance, chip = float(away @ away), item.figures.chip
            if chip not in nearest or distance < nearest[chip][0]:
                nearest[chip] = (distance, item.factors)
        if figures.chip in nearest:
            return nearest[figures.chip][1]
        if not nearest:
            return None
        return np.asarray(np.exp(np.mean([np.log(own) for _, own in nearest.values()], 0)))

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What it is built from, figures apart; rows of ``factors`` in the order of the devices."""
        found, items = {"weights": self.weights}, list(self.devices.values())
        return found | ({"factors": np.stack([i.factors for i in items])} if items else {})

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
    some = slice(None, None, -(-len(parts) // _MOST_ROWS))  # a few dozen weights need no more
    used = (parts[some] > 1e-11).sum(0) >= min(_LEAST_ROWS, len(parts[some]))
    chosen, target = np.ascontiguousarray(parts[some][:, used]), np.log(latency_s[some])

    def pulled(w: Floats) -> tuple[float, Floats]:
        away = w - _START
        return _PULL * float((away**2).mean()), 2 * _PULL * away / len(w)

    weights = np.zeros(parts.shape[1])
    weights[used] = np.exp(_least(chosen, target, np.full(int(used.sum()), _START), pulled))
    return weights


def _factors(weighted: Floats, latency_s: Floats) -> Floats:
    """Factors of weighted parts on one device: a common one, and one for each part it has."""
    used = weighted.max(0) > 1e-11
    chosen, target = np.ascontiguousarray(weighted[:, used]), np.log(latency_s)

    def pulled(d: Floats) -> tuple[float, Floats]:
        away = d - d.mean()  # what is common to all parts is free
        return _DEVICE_PULL * float((away**2).sum()), 2 * _DEVICE_PULL * away

    found = _least(chosen, target, np.zeros(int(used.sum())), pulled)
    factors = np.full(weighted.shape[1], np.exp(found.mean()))
    factors[used] = np.exp(found)
    return factors


def _least(
    parts: Floats, target: Floats, start: Floats,
    pulled: Callable[[Floats], tuple[float, Floats]],
) -> Floats:  # fmt: skip
    """Logarithms of the weights of least loss; ``pulled`` gives a pull and its slope."""
    from scipy.optimize import minimize  # type: ignore[import-untyped, unused-ignore]

    def loss(w: Floats) -> tuple[float, Floats]:
        scaled = parts * np.exp(np.clip(w, -300, 300))  # a first step may be wild
        total = scaled.sum(1) + 1e-12
        d = (np.log(total) - target) / _WIDTH
        root = np.sqrt(1 + d**2)
        slope = (d / root / _WIDTH / total) @ scaled / len(target)
        pull, pull_slope = pulled(w)
        return float(root.mean()) + pull, slope + pull_slope

    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return np.asarray(found.x)
