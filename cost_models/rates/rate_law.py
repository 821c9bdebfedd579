"""RateLaw: what a fitted device's rates say of programs, on its own figures or on another's.

The part of `rate_model` that is evaluated and kept. With the terms ``T_j`` of `operator_rates`,
rescaled by a factor for each family of operators,

    ln t(p) = ln sum over j of T_j(p) exp(theta_j(p)) + shape(p)

``theta = E A`` are sums of normal effects, one for each group that the program belongs to
(`LEVELS`), written by the tasks that they were learnt from: ``E`` is the covariance of the effects
of programs and tasks. ``shape`` is a Gaussian process over the logarithms of the dimensions within
an operator.

The terms know the device's figures, so that the rates of one device, put on the figures of
another, say how long programs take there if its kernels lose alike (`known_rates`).

Shape legend: ``N`` tasks, ``M`` programs asked for, ``T`` terms, ``L`` levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.rates.operator_rates import (
    LEVELS,
    TERMS,
    code_kind,
    family,
    groups,
    rate_terms,
    weight_share,
)
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

Floats = NDArray[np.float64]

#: Width (natural logarithm) of each level's effects on the rate of a term; assumed.
WIDTHS = MappingProxyType(dict(zip(LEVELS, (0.7, 0.4, 0.4, 0.3, 0.3, 0.3, 0.2, 0.2), strict=True)))
#: Width of what shapes add: to all variants of an operator, and to one variant beyond that.
SHAPE = (0.1, 0.2)
#: Doublings of a dimension over which that fades by 1/e.
_RANGE = 3.0
#: A rate may lie this far (natural logarithm) from the full one.
_FARTHEST = 6.0
_VARIANT = LEVELS.index("variant")
#: Families whose rows were timed on weights, code and data that no cache held.
WAITING = frozenset({"product", "attention", "wide"})
_LAUNCH, _MEMORY = TERMS.index("launch"), TERMS.index("memory")


class Waits(NamedTuple):
    """Shares that are left of the time of what no cache held when rates were timed; see `reuse`.

    Attributes:
        weight: of weights.
        code: of the code and tables of calls, by `code_kind`; where it is not named, as of weights.
        looped: the same of programs that a loop calls.
    """

    weight: float = 1.0
    code: Mapping[str, float] = MappingProxyType({})
    looped: Mapping[Program, float] = MappingProxyType({})

    def of_code(self, program: Program) -> float:
        """The share of a program's code."""
        known = self.looped.get(program)
        return self.code.get(code_kind(program), self.weight) if known is None else known


#: Nothing is in a cache.
COLD = Waits()


class Rows(NamedTuple):
    """Programs in the words of the law."""

    groups: NDArray[np.object_]  # (M, L)
    ops: NDArray[np.object_]  # (M,)
    logs: tuple[Floats, ...]  # log2 of the dimensions, one array a program

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Rows:
        """The words of programs."""
        named = np.array([groups(program) for program in programs], dtype=object)
        logs = tuple(np.log2(np.array(program.sizes, dtype=np.float64)) for program in programs)
        ops = np.array([program.op for program in programs], dtype=object)
        return cls(named.reshape(len(programs), len(LEVELS)), ops, logs)


class _Shapes(NamedTuple):
    """Programs of one operator."""

    logs: Floats  # log2 of the dimensions (M, dimensions)
    variants: NDArray[np.object_]  # (M,)

    @classmethod
    def of(cls, rows: Rows, chosen: NDArray[np.int64]) -> _Shapes:
        """Those of some rows."""
        return cls(np.stack([rows.logs[i] for i in chosen]), rows.groups[chosen, _VARIANT])

    def covariance(self, others: _Shapes) -> Floats:
        """Of the shapes of these and others (M, N)."""
        apart = np.linalg.norm(self.logs[:, None] - others.logs[None], axis=2)
        same = self.variants[:, None] == others.variants[None]
        return np.asarray(np.exp(-apart / _RANGE) * (SHAPE[0] ** 2 + SHAPE[1] ** 2 * same))


class Point(NamedTuple):
    """The law at some programs, linearised."""

    log_s: Floats  # (M,)
    rates: Floats  # theta (M, T)
    shares: Floats  # of the terms in the time (M, T)


class RateLaw:
    """A fitted law, without the device it is asked of.

    Args:
        programs: the tasks (N,).
        factors: of each family of operators on its terms, natural logarithm; ``""`` for others.
        effects: A (N, T).
        shape: weights of the tasks in the shape (N,).
    """

    def __init__(
        self, programs: Sequence[Program], factors: Mapping[str, float], effects: Floats,
        shape: Floats,
    ) -> None:  # fmt: skip
        self.programs, self.factors = tuple(programs), dict(factors)
        self.effects, self.shape = effects, shape
        rows = Rows.of(programs)
        # E A is a sum over groups: what all tasks of a group add is summed up once.
        self._groups: list[dict[str, Floats]] = [{} for _ in LEVELS]
        for level, width in enumerate(WIDTHS.values()):
            for name, amounts in zip(rows.groups[:, level], effects, strict=True):
                found = self._groups[level].setdefault(name, np.zeros(effects.shape[1]))
                found += width**2 * amounts
        self._rows = {
            op: (_Shapes.of(rows, mine), shape[mine])
            for op in dict.fromkeys(rows.ops)
            for mine in [np.flatnonzero(rows.ops == op)]
        }

    def knows(self, programs: Sequence[Program]) -> NDArray[np.bool_]:
        """Whether a task was of the same operator and variant (M,)."""
        return np.array([groups(program)[_VARIANT] in self._groups[_VARIANT]
                         for program in programs], dtype=bool)  # fmt: skip

    def seconds(
        self, programs: Sequence[Program], device: Device, *, waits: Waits = COLD
    ) -> Floats:
        """Median seconds (M,) on a device with these figures.

        Args:
            programs: what is asked for (M,).
            device: its figures.
            waits: as `waiting`.

        Raises:
            MissingDataError: see `rate_terms`.
        """
        asked = Rows.of(programs)
        terms = rescaled(rate_terms(programs, device), programs, self.factors)
        terms = waiting(terms, programs, waits)
        rates, offset = np.zeros_like(terms), np.zeros(len(programs))
        for rate, named in zip(rates, asked.groups, strict=True):
            for name, known in zip(named, self._groups, strict=True):
                if name in known:
                    rate += known[name]
        for op in dict.fromkeys(asked.ops):
            if op in self._rows:
                mine = np.flatnonzero(asked.ops == op)
                shapes, weights = self._rows[op]
                offset[mine] = _Shapes.of(asked, mine).covariance(shapes) @ weights
        return np.exp(point(terms, rates, offset).log_s)


def rescaled(terms: Floats, programs: Sequence[Program], factors: Mapping[str, float]) -> Floats:
    """Terms times the factor of each program's family (M, T); the launch as it is."""
    scale = [factors.get(family(program), factors[""]) for program in programs]
    found = terms.copy()
    found[:, 1:] *= np.exp(scale)[:, None]
    return found


def waiting(terms: Floats, programs: Sequence[Program], waits: Waits) -> Floats:
    """Terms (M, T) of programs whose weights and code are nearer than those rates were timed on.

    The call's own code and data take their share of the time, and so do, of the bytes that move,
    those of the weight. Activations were just written either way.

    Args:
        terms: from `rate_terms`.
        programs: likewise (M,); maps and norms were timed on near operands as it is.
        waits: what is left of the time.
    """
    found = terms.copy()
    for row, program in zip(found, programs, strict=True):
        if family(program) in WAITING:
            row[_LAUNCH] *= waits.of_code(program)
            row[_MEMORY] *= 1.0 - weight_share(program) * (1.0 - waits.weight)
    return found


def point(terms: Floats, rates: Floats, offset: Floats) -> Point:
    """The law where the rates are ``rates`` (M, T) and all else adds ``offset`` (M,)."""
    bounded = np.clip(rates, -_FARTHEST, _FARTHEST)
    parts = terms * np.exp(bounded)
    total = parts.sum(axis=1)
    return Point(np.log(total) + offset, bounded, parts / total[:, None])


def effects_between(rows: Rows, others: Rows) -> Floats:
    """Covariance of the effects of programs and others (M, N)."""
    found = np.zeros((len(rows.ops), len(others.ops)))
    for level, width in enumerate(WIDTHS.values()):
        found += width**2 * (rows.groups[:, level][:, None] == others.groups[:, level][None, :])
    return found


def shape_between(rows: Rows, others: Rows) -> Floats:
    """Covariance of the shapes of programs and others (M, N)."""
    found = np.zeros((len(rows.ops), len(others.ops)))
    for op in dict.fromkeys(rows.ops):
        (mine,), (theirs,) = np.nonzero(rows.ops == op), np.nonzero(others.ops == op)
        if not len(theirs):
            continue
        covariance = _Shapes.of(rows, mine).covariance(_Shapes.of(others, theirs))
        found[np.ix_(mine, theirs)] = covariance
    return found
