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

Assumed, not fitted: widths of the priors (`WIDTHS`, `_KNOWN`, `_SHAPE`, `_RANGE`, `_NOISE`,
`_KAPPA`).

Shape legend: ``N`` tasks, ``M`` programs asked for, ``T`` terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operator_rates import LEVELS, family, groups
from foreplan.cost_models.rescaled_roofline import RescaledRoofline, RescaledTerms
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program
from foreplan.errors import SpecError

Floats = NDArray[np.float64]
#: Seconds of programs (N,), NaN where nothing is known.
Shipped = Callable[[Sequence[Program]], Floats]

#: Width (natural logarithm) of each level's effects on the rate of a term.
WIDTHS = MappingProxyType(dict(zip(LEVELS, (0.7, 0.4, 0.4, 0.3, 0.3, 0.3, 0.2, 0.2), strict=True)))
#: Width of what shapes add: to all variants of an operator, and to one variant beyond that.
_SHAPE = (0.1, 0.2)
#: Doublings of a dimension over which that fades by 1/e.
_RANGE = 3.0
#: Spread of one measurement around the law, and where the shipped predictor is part of it: which
#: kernel a GPU's library takes for a shape follows no smooth law (docs/results/operators.md).
_NOISE, _KNOWN_NOISE = 0.05, 0.2
#: Width of kappa; its mean is 1 on kinds of device that the predictor was trained on, else 0.
_KAPPA = 0.1
#: Width of the effects of operators that the shipped predictor prices, over that of others.
_KNOWN = 0.3
#: A rate may lie this far (natural logarithm) from the full one.
_FARTHEST = 6.0
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


class _Rows(NamedTuple):
    """Programs in the words of the model."""

    groups: NDArray[np.object_]  # (N, L)
    ops: NDArray[np.object_]  # (N,)
    logs: tuple[Floats, ...]  # log2 of the dimensions, one array a program
    terms: Floats  # (N, T)
    shipped: Floats  # s (N,)
    widths: Floats  # of the effects, over those of an operator without a shipped price (N,)
    noise: Floats  # spread around the law (N,)


class _Law(NamedTuple):
    """The law at some programs, linearised."""

    log_s: Floats  # (N,)
    rates: Floats  # theta (N, T)
    shares: Floats  # S (N, T)


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
        self._kappa = 0.0 if device.kind == "cpu" else 1.0

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
        self._rescale = RescaledTerms(self.device).fit(programs, times)
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
        own = _WIDEST * rows.widths**2 * (law.shares**2).sum(axis=1) + sum(w**2 for w in _SHAPE)
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

    def leave_one_out(self) -> Floats:
        """Seconds of each task as the law has it from the others alone (N,)."""
        found = self.seconds_ * np.exp(-self._without_)
        return self._believed(self._rows_, found, self._others_)

    # ------------------------------------------------------------------------------- inside

    def _believed(self, rows: _Rows, law: Floats, rescaled: Floats) -> Floats:
        """Seconds of the law, of the rescaled roofline, or between both where tasks are few.

        Operators that the shipped predictor prices keep the law, which falls back to that price.
        """
        kinds = rows.groups[:, LEVELS.index("family")]
        share = np.array([self._trust_.get(str(kind), 0.5) for kind in kinds])
        share = np.where(rows.widths < 1.0, 1.0, share)
        return np.asarray(law**share * rescaled ** (1 - share))

    def _rows(self, programs: Sequence[Program]) -> _Rows:
        terms = self._rescale.terms(programs)
        shipped = np.zeros(len(programs))
        if self._shipped is not None:
            shipped = np.log(self._shipped(programs) / terms.sum(axis=1))
        known = np.isfinite(shipped) & (shipped != 0.0) & (self._kappa > 0)
        widths, noise = np.where(known, _KNOWN, 1.0), np.where(known, _KNOWN_NOISE, _NOISE)
        shipped = np.nan_to_num(shipped)
        named = np.array([groups(program) for program in programs], dtype=object)
        logs = tuple(np.log2(np.array(program.sizes, dtype=np.float64)) for program in programs)
        ops = np.array([program.op for program in programs], dtype=object)
        table = named.reshape(len(programs), len(LEVELS))
        return _Rows(table, ops, logs, terms, shipped, widths, noise)

    def _law(self, rows: _Rows, effects: Floats, smooth: Floats) -> _Law:
        rates = np.clip(effects @ self.effects_, -_FARTHEST, _FARTHEST)
        parts = rows.terms * np.exp(rates)
        total = parts.sum(axis=1)
        log_s = np.log(total) + self._kappa * rows.shipped + smooth @ self.shape_
        return _Law(log_s, rates, parts / total[:, None])

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


def _effects(rows: _Rows, others: _Rows) -> Floats:
    """Covariance of the effects of programs and others (M, N)."""
    found = np.zeros((len(rows.terms), len(others.terms)))
    for level, width in enumerate(WIDTHS.values()):
        found += width**2 * (rows.groups[:, level][:, None] == others.groups[:, level][None, :])
    return found * np.outer(rows.widths, others.widths)


def _smooth(rows: _Rows, others: _Rows) -> Floats:
    """Covariance of shape and kappa of programs and others (M, N)."""
    found = _KAPPA**2 * np.outer(rows.shipped, others.shipped)
    variant = LEVELS.index("variant")
    for i, j in zip(*np.nonzero(rows.ops[:, None] == others.ops[None, :]), strict=True):
        near = np.exp(-np.linalg.norm(rows.logs[i] - others.logs[j]) / _RANGE)
        same = rows.groups[i, variant] == others.groups[j, variant]
        found[i, j] += near * (_SHAPE[0] ** 2 + (_SHAPE[1] ** 2 if same else 0.0))
    return found
