"""Devices dealt to groups that work side by side: replicas of a pipeline, for instance.

``K`` kinds of devices with ``n_k`` of each; a *group* is how many devices of each kind work
together, and is worth ``v_g`` (tokens per second). How often is each group formed? Either as much
worth as possible, or the least cost for a wanted worth::

    max sum_g v_g x_g   or   min sum_g c_g x_g  with  sum_g v_g x_g >= floor
    sum_g a_gk x_g <= n_k for every kind k,   x_g = 0, 1, 2, ...

What a group is worth takes a solver of its own, so few groups are asked. Every group starts with an
optimistic worth; the relaxation without ``x`` whole is solved with it, the groups of its solution
are asked, and so on until a solution has only groups whose worth is known; then the same with whole
``x``. Optimistic worths stay in for groups that were not asked, so that the last relaxation is
a bound on every answer, also when a limit ends the search.

-> one relaxation, whole or not: ``_Programme``
-> the rounds: ``solve``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.chain_problem import FloatArray, IntArray
from foreplan.solvers.solution import Solution, SolutionStatus

#: Most groups that `groupings` lists.
MOST_GROUPS = 200_000
#: Fewer copies than this of a group, in a relaxation, are rounding.
_NONE = 1e-7


@dataclass(frozen=True, slots=True)
class GroupWorth:
    """What asking a group gave.

    Attributes:
        value: worth of the best found, 0 if nothing was.
        bound: proven: the group cannot be worth more; at least ``value``.
    """

    value: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssignmentProblem:
    """One instance.

    Attributes:
        counts: ``[K]`` devices of each kind.
        groups: ``[G, K]`` devices of each kind in each group that may be formed.
        optimistic: ``[G]`` no group is worth more; 0 for one that cannot work.
        cost: ``[G]`` of each group, at least 0; only counts with ``floor``.
        floor: worth that is wanted at the least cost; ``None`` for as much worth as possible.

    Raises:
        SpecError: shapes that do not agree, an empty group, a negative or infinite number.
    """

    counts: IntArray
    groups: IntArray
    optimistic: FloatArray
    cost: FloatArray = field(default_factory=lambda: np.empty(0))
    floor: float | None = None

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, dtype=np.int64)
        groups = np.asarray(self.groups, dtype=np.int64)
        if counts.ndim != 1 or groups.ndim != 2 or groups.shape[1:] != counts.shape:
            raise SpecError(
                "AssignmentProblem.groups", got=groups.shape, expected=f"shape [G, {counts.size}]"
            )
        if (counts < 0).any() or (groups < 0).any() or (groups.sum(axis=1) == 0).any():
            raise SpecError(
                "AssignmentProblem.groups", got="a negative count or an empty group",
                expected="counts of at least 0 and at least one device a group",
            )  # fmt: skip
        for name in ("optimistic", "cost"):
            array = np.asarray(getattr(self, name), dtype=np.float64)
            if name == "cost" and not array.size:
                array = np.zeros(len(groups))
            if array.shape != (len(groups),) or not (np.isfinite(array) & (array >= 0)).all():
                raise SpecError(
                    f"AssignmentProblem.{name}", got=array,
                    expected=f"{len(groups)} finite numbers of at least 0",
                )  # fmt: skip
            object.__setattr__(self, name, array)
        if self.floor is not None and not (math.isfinite(self.floor) and self.floor > 0):
            raise SpecError("AssignmentProblem.floor", got=self.floor, expected="finite, > 0")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "groups", groups)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A decision: (index of a group, how often it is formed), by index, each at least once."""

    copies: tuple[tuple[int, int], ...]

    def used(self, problem: AssignmentProblem) -> IntArray:
        """``[K]`` devices of each kind that it takes."""
        total = np.zeros_like(problem.counts)
        for group, times in self.copies:
            total += times * problem.groups[group]
        return total


def groupings(counts: Sequence[int], most: int) -> IntArray:
    """Every group of 1 to ``most`` devices, ``[G, K]``, the smallest first.

    Raises:
        SpecError: more than `MOST_GROUPS` of them.
    """
    limits = [min(int(count), most) for count in counts]
    table = [1, *([0] * most)]  # groups of each size, kind by kind
    for limit in limits:
        table = [sum(table[size - d] for d in range(min(limit, size) + 1)) for size in
                 range(most + 1)]  # fmt: skip
    if sum(table) - 1 > MOST_GROUPS:
        raise SpecError(
            "groups", got=f"{sum(table) - 1} of up to {most} devices of {len(limits)} kinds",
            expected=f"at most {MOST_GROUPS}", fix="fewer devices a group",
        )  # fmt: skip
    found = [[0] * len(limits)]
    for k, limit in enumerate(limits):
        found = [
            [*row[:k], d, *row[k + 1 :]]
            for row in found
            for d in range(min(limit, most - sum(row)) + 1)
        ]
    rows = sorted((row for row in found if any(row)), key=lambda row: (sum(row), row))
    return np.array(rows, dtype=np.int64).reshape(-1, len(limits))


def solve(
    problem: AssignmentProblem,
    worth: Callable[[int], GroupWorth],
    *,
    tighten: Callable[[int], float] | None = None,
    gap: float = 1e-6,
    max_evaluations: int = 2_000,
    max_nodes: int = 20_000,
) -> Solution[Assignment]:
    """Find how often each group is formed, and prove how good that is.

    Args:
        problem: the instance.
        worth: asked at most once a group.
        tighten: gives a better optimistic worth for less effort than ``worth``; asked first, once.
        gap: relative gap at which the search ends.
        max_evaluations: most groups to ask.
        max_nodes: of each programme with whole numbers.

    Returns:
        With a floor, the least cost and its bound. Without one, everything is negated, because
        solutions are of minimising problems: ``objective`` is minus the worth, ``lower_bound``
        minus the most that any assignment can be worth. ``evaluations`` counts groups asked.

    Raises:
        SpecError: ``worth`` gave a value above its bound, or below zero.
    """
    value = np.zeros(len(problem.groups))
    bound = problem.optimistic.copy()
    known = problem.optimistic <= 0
    tightened = known.copy()
    sign = 1.0 if problem.floor is not None else -1.0
    lower, asked = -math.inf, 0
    best: tuple[float, IntArray] | None = None
    for whole in (False, True):
        while True:
            relaxed = _Programme(problem, bound, bound > 0).solve(whole, max_nodes)
            if relaxed is None:  # not even optimistically
                return _answer(problem, sign, None, math.inf, asked, gap, complete=True)
            lower = max(lower, relaxed.bound)
            best = _incumbent(problem, value, max_nodes, best)
            if best is not None and _relative(best[0], lower) <= gap:
                break
            new = [g for g in np.flatnonzero(relaxed.copies > _NONE) if not known[g]]
            if not new or asked >= max_evaluations:
                break
            if tighten is not None and (loose := [g for g in new if not tightened[g]]):
                for g in loose:
                    bound[g], tightened[g] = min(bound[g], max(tighten(int(g)), 0.0)), True
                continue
            for g in new[: max_evaluations - asked]:
                found = worth(int(g))
                if not 0 <= found.value <= found.bound * (1 + 1e-9):
                    raise SpecError(
                        f"worth of group {problem.groups[g].tolist()}", got=found,
                        expected="0 <= value <= bound",
                    )  # fmt: skip
                known[g], asked = True, asked + 1
                value[g] = found.value
                bound[g] = min(bound[g], max(found.bound, found.value))
    complete = asked < max_evaluations
    return _answer(problem, sign, best, lower, asked, gap, complete=complete)


def _answer(
    problem: AssignmentProblem, sign: float, best: tuple[float, IntArray] | None, lower: float,
    asked: int, gap: float, *, complete: bool,
) -> Solution[Assignment]:  # fmt: skip
    if best is None:
        nothing = lower == math.inf or (complete and problem.floor is None)
        status = SolutionStatus.INFEASIBLE if nothing else SolutionStatus.LIMIT
        objective, copies = math.inf, None
        lower = math.inf if nothing else lower
    else:
        objective = best[0]
        lower = min(lower, objective)
        closed = _relative(objective, lower) <= gap
        status = SolutionStatus.OPTIMAL if closed else SolutionStatus.FEASIBLE
        taken = np.flatnonzero(best[1])
        copies = Assignment(tuple((int(g), int(best[1][g])) for g in taken))
    return Solution(
        status=status, value=copies, objective=objective, lower_bound=lower, evaluations=asked,
        solver="assignment by optimistic groups",
    )  # fmt: skip


def _relative(objective: float, lower: float) -> float:
    return (objective - lower) / abs(objective) if objective else float(objective > lower)


def _incumbent(
    problem: AssignmentProblem, value: FloatArray, max_nodes: int,
    best: tuple[float, IntArray] | None,
) -> tuple[float, IntArray] | None:  # fmt: skip
    """The best whole assignment of groups that were found to be worth something."""
    found = _Programme(problem, value, value > 0).solve(True, max_nodes)
    if found is None:
        return best
    copies = np.rint(found.copies).astype(np.int64)
    if not copies.any() or (copies @ problem.groups > problem.counts).any():
        return best
    total = float(copies @ value)
    if problem.floor is None:
        objective = -total
    elif total < problem.floor * (1 - 1e-9):
        return best
    else:
        objective = float(copies @ problem.cost)
    return (objective, copies) if best is None or objective < best[0] else best


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """``[G]`` copies of each group, and a bound on the objective."""

    copies: FloatArray
    bound: float


class _Programme:
    """The programme of the module's docstring with given worths, over some of the groups."""

    def __init__(self, problem: AssignmentProblem, worth: FloatArray, among: Any) -> None:
        self._problem = problem
        self._worth = worth
        self._columns = np.flatnonzero(among)

    def solve(self, whole: bool, max_nodes: int) -> _Relaxed | None:
        """Solve it with HiGHS; ``None`` if infeasible, or if a limit came before any answer."""
        from scipy.optimize import (  # type: ignore[import-untyped]
            Bounds,
            LinearConstraint,
            milp,
        )

        p, columns = self._problem, self._columns
        if not columns.size:
            return None
        worth = self._worth[columns]
        scale = float(worth.max())
        rows = [LinearConstraint(p.groups[columns].T.astype(float), -np.inf, p.counts)]
        target, unit = -worth / scale, scale
        if p.floor is not None:
            # A group that is worth more than what is wanted counts as that: the whole answers stay
            # the same, and a floor far below each group's worth stays above HiGHS's tolerance.
            rows.append(LinearConstraint(np.minimum(worth / p.floor, 1.0)[None, :], 1 - 1e-9))
            unit = max(float(p.cost[columns].max()), 1e-300)
            target = p.cost[columns] / unit
        most = np.min(
            np.where(p.groups[columns] > 0, p.counts // np.maximum(p.groups[columns], 1), 1 << 30),
            axis=1,
        )
        found = milp(
            target, constraints=rows, bounds=Bounds(0, most), integrality=np.full(
                len(columns), int(whole)
            ), options={"node_limit": max_nodes, "mip_rel_gap": 0.0, "presolve": False},
        )  # fmt: skip
        if found.x is None:
            return None
        copies = np.zeros(len(p.groups))
        copies[columns] = found.x
        proven = found.mip_dual_bound if whole else found.fun
        slack = 1e-9 * max(1.0, abs(float(proven)))  # of the solver's tolerances
        return _Relaxed(copies, (float(proven) - slack) * unit)
