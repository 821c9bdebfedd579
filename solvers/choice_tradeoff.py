"""What one budget of a multiple-choice problem buys: sweeps over it and the dual question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.choice_problem import Choice, ChoiceItem, ChoicePair, ChoiceProblem
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.multiple_choice import solve
from foreplan.solvers.solution import Solution

Part = TypeVar("Part", ChoiceItem, ChoicePair)


def row_as_objective(problem: ChoiceProblem, row: str, cap: float = math.inf) -> ChoiceProblem:
    """The dual problem: minimise what a row holds, with the objective as a row in its place.

    Args:
        problem: the instance; its choices are the same.
        row: name of the row; its limit is dropped.
        cap: most that the former objective may be; its row is named ``objective``.

    Raises:
        SpecError: no row has this name, or another one is named ``objective``.
    """
    r = problem.row(row)

    def swapped(part: Part) -> Part:
        weights = part.weights.copy()
        weights[..., r] = part.values
        return replace(part, values=part.weights[..., r], weights=weights)

    base, limits, rows = problem.base.copy(), problem.limits.copy(), list(problem.rows)
    base[r], limits[r], rows[r] = problem.base_value, cap, "objective"
    return ChoiceProblem(
        items=tuple(map(swapped, problem.items)),
        pairs=tuple(map(swapped, problem.pairs)),
        limits=limits,
        base=base,
        base_value=float(problem.base[r]),
        rows=tuple(rows),
    )


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """Best objective at one limit of the swept row.

    Attributes:
        limit: of the row.
        usage: what the row holds in the solution; ``nan`` without one.
        solution: of the problem with that limit.
    """

    limit: float
    usage: float
    solution: Solution[Choice]


def pareto_sweep(
    problem: ChoiceProblem, row: str, limits: Sequence[float] | int, *, max_nodes: int = 100_000
) -> tuple[TradeoffPoint, ...]:
    """Solve once for each limit of a row, each time from the solution of the next tighter one.

    Objectives never rise with the limit, even where ``max_nodes`` stops a programme.

    Args:
        problem: the instance; the row's own limit is ignored.
        row: name of the row.
        limits: its limits in any order, or how many to space evenly from the least that the row
            can hold to what it holds when it is not limited (none if the other rows cannot be
            met; at least 2).
        max_nodes: branch-and-bound nodes of each programme.

    Returns:
        One point a limit, in ascending order of limits.

    Raises:
        SpecError: no row has this name, a limit is NaN, fewer than 2 points.
    """
    r = problem.row(row)
    if isinstance(limits, int):
        limits = _spaced(problem, row, limits, max_nodes)
    if any(math.isnan(limit) for limit in limits):
        raise SpecError("limits", got=list(limits), expected="numbers")
    points: list[TradeoffPoint] = []
    start: Choice | None = None
    for limit in sorted(float(limit) for limit in limits):
        limited = _limited(problem, r, limit)
        solution = solve(limited, start=start, max_nodes=max_nodes)
        start = solution.value
        usage = math.nan if start is None else float(evaluate(problem, start).usage[r])
        points.append(TradeoffPoint(limit, usage, solution))
    return tuple(points)


def _limited(problem: ChoiceProblem, r: int, limit: float) -> ChoiceProblem:
    limits = problem.limits.copy()
    limits[r] = limit
    return problem.with_limits(limits)


def _spaced(problem: ChoiceProblem, row: str, count: int, max_nodes: int) -> list[float]:
    if count < 2:
        raise SpecError("limits", got=count, expected="at least 2 points")
    r = problem.row(row)
    least = solve(row_as_objective(problem, row), max_nodes=max_nodes)
    free = solve(_limited(problem, r, math.inf), max_nodes=max_nodes)
    if free.value is None or least.value is None:
        return []
    most = float(evaluate(problem, free.value).usage[r])
    return [float(limit) for limit in np.linspace(least.objective, most, count)]
