"""RateModel: times of all operators of one device from a few dozen measured ones.

Physics first, the learnt part after it: with the terms ``T_j`` of `operator_rates`,

    ln t(p) = ln sum over j of T_j(p) exp(theta_j(p)) + shape(p) + kappa s(p)

``T_j`` is rescaled so that each family's median task is met (`RescaledTerms`); ``theta_j`` is how
much slower than that a term runs: a sum of normal effects, one for each group that the program
belongs to (`LEVELS`), so that what is seen of one kernel is believed a little of others like it and
falls back to the family's median where nothing is known.
``shape`` is a Gaussian process over the logarithms of the dimensions within an operator; it says
what the sum of rates does not near a measured shape and fades away from it. ``s`` is what the
shipped predictor says, over the sum of the terms (0 where it is silent), ``kappa`` how far it is
believed on this device. Operators that it prices have narrower effects.

The effects are never written out: ``theta = E A``, with ``E`` the covariance of two programs'
effects and one row of ``A`` a task. With the shares ``S`` of the terms in the time the law is
linear near a fit, ``A_ij = S_ij alpha_i`` and ``alpha = (E * S S' + shape + noise)^-1 z``: a
Gaussian process, linearised anew at each step of Gauss-Newton (Rasmussen & Williams, Gaussian
Processes for Machine Learning, 2006, sections 2.2 and 3.4). Tasks far from the law count less
(weights of a Student t with 4 degrees of freedom).

Where leaving one task out at a time says that a family of operators is clearly worse off with the
learnt part than with the roofline rescaled by the median of its tasks, it gets the rescaled
roofline; a family with fewer than four tasks gets the geometric mean of both.

Assumed, not fitted: widths of the priors (`rate_law.WIDTHS`, `SHAPE`, `_NOISE`, `_KAPPA`), but for
`_KNOWN` of processors.

Shape legend: ``N`` tasks, ``M`` programs asked for, ``T`` terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.rates.operator_rates import LEVELS, family, rate_terms
from foreplan.cost_models.rates.rate_law import (
    SHAPE,
    WIDTHS,
    Point,
    RateLaw,
    Rows,
    effects_between,
    point,
    rescaled,
    shape_between,
)
from foreplan.cost_models.rates.rescaled_roofline import RescaledRoofline, family_factors
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program
from foreplan.errors import SpecError

Floats = NDArray[np.float64]
#: Seconds of programs (N,), NaN where nothing is known.
Shipped = Callable[[Sequence[Program]], Floats]

#: Spread of one measurement around the law, and on a GPU where the shipped predictor is part of it:
#: which kernel its library takes for a shape follows no smooth law (docs/results/operators.md).
_NOISE, _KNOWN_NOISE = 0.05, {"cuda": 0.2, "cpu": 0.05}
#: Width of kappa, whose mean is 1.
_KAPPA = 0.1
#: Width of the effects of operators that the shipped predictor prices, over that of others; of
#: processors chosen on two slices of one EPYC, each known to the other (onboarding.md).
_KNOWN = {"cuda": 0.3, "cpu": 0.5}
#: Half of a nominal 90 % interval in standard deviations.
_INTERVAL = 1.645
#: Variance of all effects of one term together.
_WIDEST = sum(width**2 for width in WIDTHS.values())
#: Steps of Gauss-Newton, and the shortest part of one that is tried.
_STEPS, _LEAST_STEP = 60, 1e-3
#: Tasks of a family that may show it better off with the rescaled roofline.
_ENOUGH = 3
#: A family with fewer tasks gets the geometric mean of the law and the rescaled roofline.
_FEW = 4


class RateForecast(NamedTuple):
    """Seconds (M,) each: expectation and ends of the nominal 90 % interval.

    The expectation of a log-normal time lies above its median, the more so the less is known: what
    a sum of many times comes to, where the median is the likelier guess of one.
    """

    mean_s: Floats
    low_s: Floats
    high_s: Floats


class _Asked(NamedTuple):
    """Programs in the words of the model."""

    words: Rows
    terms: Floats  # (N, T)
    shipped: Floats  # s (N,)
    widths: Floats  # of the effects, over those of an operator without a shipped price (N,)
    noise: Floats  # spread around the law (N,)


class RateModel:
    """See the module.

    Args:
        device: its figures.
        shipped: says the shipped predictor's seconds for programs, NaN where it knows nothing;
            without it the physics stand alone.

    Attributes:
        programs_, seconds_: the tasks.
        effects_: A (N, T).
        shape_: weights of the tasks in shape and kappa (N,).
        inflation_: factor on the interval's width, from leaving one task out.
        rescaled_: families that get the rescaled roofline.
    """

    def __init__(self, device: Device, shipped: Shipped | None = None) -> None:
        self.device = device
        self._shipped = shipped

    def fit(self, programs: Sequence[Program], seconds: Sequence[float] | Floats) -> RateModel:
        """Learn from tasks.

        Args:
            programs: the tasks (N,), each once.
            seconds: their measured times (N,), positive.

        Raises:
            SpecError: no task, a task twice, or a time that is not positive.
            MissingDataError: a figure of the device is missing.
        """
        times = np.asarray(seconds, dtype=np.float64)
        if not len(times) or len(times) != len(programs) or not bool((times > 0).all()):
            raise SpecError("calibration tasks", got=len(times), expected="programs with times > 0")
        if len(set(programs)) < len(programs):
            raise SpecError("calibration tasks", got="a program twice", expected="each once")
        self.programs_, self.seconds_ = tuple(programs), times
        self._factors = family_factors(programs, times, self.device)
        self._rows_ = rows = self._rows(programs)
        effects, smooth = _effects(rows, rows), _smooth(rows, rows)
        target = np.log(times)
        self.effects_, self.shape_ = np.zeros_like(rows.terms), np.zeros(len(times))
        objective = np.inf
        for _ in range(_STEPS):
            law = self._law(rows, effects, smooth)
            off = (target - law.log_s) / rows.noise
            noise = rows.noise**2 * (4.0 + off**2) / 5.0
            covariance = effects * (law.shares @ law.shares.T) + smooth
            held = (law.shares * law.rates).sum(axis=1) + smooth @ self.shape_
            alpha = np.linalg.solve(covariance + np.diag(noise), target - law.log_s + held)
            before = (self.effects_, self.shape_)
            size, found = 1.0, np.inf
            while size > _LEAST_STEP:
                self.effects_ = before[0] + size * (law.shares * alpha[:, None] - before[0])
                self.shape_ = before[1] + size * (alpha - before[1])
                found = self._objective(target, effects, smooth)
                if found < objective:
                    break
                size /= 2
            if not found < objective - 1e-9 * abs(objective) and np.isfinite(objective):
                self.effects_, self.shape_ = before
                break
            objective = found
        self._certainty(target, effects, smooth)
        return self

    def predict(self, programs: Sequence[Program]) -> Floats:
        """Median seconds (M,)."""
        rows = self._rows(programs)
        law = self._law(rows, _effects(rows, self._rows_), _smooth(rows, self._rows_))
        return self._believed(rows, np.exp(law.log_s), self._roofline_.predict(programs))

    def forecast(self, programs: Sequence[Program]) -> RateForecast:
        """Expected seconds and their interval."""
        rows = self._rows(programs)
        effects, smooth = _effects(rows, self._rows_), _smooth(rows, self._rows_)
        law = self._law(rows, effects, smooth)
        covariance = effects * (law.shares @ self._shares_.T) + smooth
        own = _WIDEST * rows.widths**2 * (law.shares**2).sum(axis=1) + sum(w**2 for w in SHAPE)
        own = own + (_KAPPA * rows.shipped) ** 2
        explained = np.einsum("mn,nk,mk->m", covariance, self._inverse_, covariance)
        spread = np.sqrt(np.maximum(own - explained, 0.0) + rows.noise**2)
        spread = self.inflation_ * spread
        median = self._believed(rows, np.exp(law.log_s), self._roofline_.predict(programs))
        # Wider than what is believed before any task is only the interval.
        mean = median * np.exp(np.minimum(spread**2, _WIDEST) / 2)
        half = _INTERVAL * spread
        return RateForecast(mean, median * np.exp(-half), median * np.exp(half))

    def covariance(self, programs: Sequence[Program]) -> tuple[Floats, Floats]:
        """How the logarithms of programs' times go wrong together, given the tasks.

        Returns:
            Covariance of the law (M, M), without the spread around it; variance of that (M,). The
            interval of `forecast` is made of both.
        """
        rows = self._rows(programs)
        effects, smooth = _effects(rows, self._rows_), _smooth(rows, self._rows_)
        law = self._law(rows, effects, smooth)
        known = effects * (law.shares @ self._shares_.T) + smooth
        own = _effects(rows, rows) * (law.shares @ law.shares.T) + _smooth(rows, rows)
        scale = self.inflation_**2
        return scale * (own - known @ self._inverse_ @ known.T), scale * rows.noise**2

    @property
    def law_(self) -> RateLaw:
        """The law alone, to be kept or put on another device's figures.

        Raises:
            SpecError: the shipped predictor is part of it.
        """
        if self._shipped is not None:
            raise SpecError("law", got="one with the shipped predictor", expected="one without")
        return RateLaw(self.programs_, self._factors, self.effects_, self.shape_)

    def leave_one_out(self) -> Floats:
        """Seconds of each task as the law has it from the others alone (N,)."""
        found = self.seconds_ * np.exp(-self._without_)
        return self._believed(self._rows_, found, self._others_)

    # ------------------------------------------------------------------------------- inside

    def _believed(self, rows: _Asked, law: Floats, rescaled: Floats) -> Floats:
        """Seconds of the law, of the rescaled roofline, or between both where tasks are few.

        Operators that the shipped predictor prices keep the law, which falls back to that price.
        """
        kinds = rows.words.groups[:, LEVELS.index("family")]
        share = np.array([self._trust_.get(str(kind), 0.5) for kind in kinds])
        share = np.where(rows.widths < 1.0, 1.0, share)
        return np.asarray(law**share * rescaled ** (1 - share))

    def _rows(self, programs: Sequence[Program]) -> _Asked:
        terms = rescaled(rate_terms(programs, self.device), programs, self._factors)
        shipped = np.zeros(len(programs))
        if self._shipped is not None:
            shipped = np.log(self._shipped(programs) / terms.sum(axis=1))
        known, kind = np.isfinite(shipped) & (shipped != 0.0), self.device.kind
        widths = np.where(known, _KNOWN[kind], 1.0)
        noise = np.where(known, _KNOWN_NOISE[kind], _NOISE)
        return _Asked(Rows.of(programs), terms, np.nan_to_num(shipped), widths, noise)

    def _law(self, rows: _Asked, effects: Floats, smooth: Floats) -> Point:
        return point(rows.terms, effects @ self.effects_, rows.shipped + smooth @ self.shape_)

    def _objective(self, target: Floats, effects: Floats, smooth: Floats) -> float:
        off = (target - self._law(self._rows_, effects, smooth).log_s) / self._rows_.noise
        prior = np.einsum("it,ij,jt->", self.effects_, effects, self.effects_)
        prior += self.shape_ @ smooth @ self.shape_
        return float((5.0 * np.log1p(off**2 / 4.0)).sum() + prior)

    def _certainty(self, target: Floats, effects: Floats, smooth: Floats) -> None:
        """What leaving one task out says: of the interval, and of families better off without."""
        law = self._law(self._rows_, effects, smooth)
        off = (target - law.log_s) / self._rows_.noise
        self._shares_ = law.shares
        covariance = effects * (law.shares @ law.shares.T) + smooth
        noise = np.diag(self._rows_.noise**2 * (4.0 + off**2) / 5.0)
        self._inverse_ = np.linalg.inv(covariance + noise)
        held = (law.shares * law.rates).sum(axis=1) + smooth @ self.shape_
        alpha = self._inverse_ @ (target - law.log_s + held)
        precision = np.diag(self._inverse_)
        # Target minus what the others say of it (Rasmussen & Williams, section 5.4.2).
        self._without_ = without = alpha / precision
        standard = without * np.sqrt(precision)
        self.inflation_ = float(np.clip(np.sqrt(np.mean(standard**2)), 1.0, 3.0))
        self._roofline_ = RescaledRoofline(self.device).fit(self.programs_, self.seconds_)
        self._others_ = self._roofline_.leave_one_out()
        plain = target - np.log(self._others_)
        kinds = np.array([family(program) for program in self.programs_])
        self._trust_: dict[str, float] = {}
        for kind in sorted(set(kinds)):
            mine = kinds == kind
            worse = _clearly_worse(without[mine], plain[mine])
            self._trust_[str(kind)] = 0.0 if worse else 0.5 if mine.sum() < _FEW else 1.0
        self.rescaled_ = frozenset(kind for kind, share in self._trust_.items() if not share)


def _clearly_worse(errors: Floats, others: Floats) -> bool:
    """Whether errors are larger than others on the same tasks, by more than a standard error."""
    if len(errors) < _ENOUGH:
        return False
    more = np.abs(errors) - np.abs(others)
    return bool(more.mean() > more.std(ddof=1) / np.sqrt(len(more)))


def _effects(rows: _Asked, others: _Asked) -> Floats:
    """Covariance of the effects of programs and others (M, N)."""
    return effects_between(rows.words, others.words) * np.outer(rows.widths, others.widths)


def _smooth(rows: _Asked, others: _Asked) -> Floats:
    """Covariance of shape and kappa of programs and others (M, N)."""
    shared = _KAPPA**2 * np.outer(rows.shipped, others.shipped)
    return shape_between(rows.words, others.words) + shared
