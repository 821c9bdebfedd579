"""`RescaledRoofline`: a device's roofline, rescaled by the median of a few measured tasks.

What anybody would do first with a few measurements, and what calibration must beat:
``launch + scale * max(FLOP / peak(dtype), bytes / bandwidth)``, the scale of the same family of
operators and compute dtype where one was measured, else of the family, else of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.rates.operator_rates import family, rate_terms, roofline
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

Floats = NDArray[np.float64]

#: Of a measured time at most this share is the launch; the rest is what the roofline bounds.
_MOST_LAUNCH = 0.8


class RescaledRoofline:
    """See the module.

    Args:
        device: its figures.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def fit(self, programs: Sequence[Program], seconds: Floats) -> RescaledRoofline:
        """Take the medians of tasks (N,)."""
        self._programs = tuple(programs)
        launch, bare = self._parts(programs)
        beside = np.maximum(seconds - launch, (1 - _MOST_LAUNCH) * seconds)
        self._ratios = np.log(beside / bare)
        of: dict[tuple[str, ...], list[int]] = {}
        for k, program in enumerate(programs):
            for words in _nearest_first(program):
                of.setdefault(words, []).append(k)
        self._of = {words: np.array(tasks) for words, tasks in of.items()}
        self._medians = {words: float(np.median(self._ratios[k])) for words, k in self._of.items()}
        return self

    def predict(self, programs: Sequence[Program]) -> Floats:
        """Expected seconds (M,)."""
        launch, bare = self._parts(programs)
        scale = [
            next((self._medians[w] for w in _nearest_first(program) if w in self._medians), 0.0)
            for program in programs
        ]
        return np.asarray(launch + bare * np.exp(scale))

    def leave_one_out(self) -> Floats:
        """Seconds of each task as the others have it (N,); the only task by the bare roofline."""
        launch, bare = self._parts(self._programs)
        scale = [self._without(program, k) for k, program in enumerate(self._programs)]
        return np.asarray(launch + bare * np.exp(scale))

    def _parts(self, programs: Sequence[Program]) -> tuple[Floats, Floats]:
        terms = rate_terms(programs, self.device)
        return terms[:, 0], np.maximum(roofline(terms, programs), 1e-12)

    def _without(self, program: Program, task: int) -> float:
        for words in _nearest_first(program):
            others = self._of[words][self._of[words] != task]
            if len(others):
                return float(np.median(self._ratios[others]))
        return 0.0


def family_factors(
    programs: Sequence[Program], seconds: Floats, device: Device
) -> dict[str, float]:
    """Natural logarithm of what the sum of terms lacks to meet each family's median task.

    Under ``""`` that of all tasks, for families without one. See `rate_law.rescaled`.
    """
    terms = rate_terms(programs, device)
    beside = np.maximum(seconds - terms[:, 0], (1 - _MOST_LAUNCH) * seconds)
    ratios = np.log(beside / terms[:, 1:].sum(axis=1))
    kinds = np.array([family(program) for program in programs])
    return {"": float(np.median(ratios))} | {
        str(kind): float(np.median(ratios[kinds == kind])) for kind in kinds
    }


def _nearest_first(program: Program) -> tuple[tuple[str, ...], ...]:
    return (family(program), program.variant.compute), (family(program),), ()
