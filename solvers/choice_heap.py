"""The greedy allocator: give back what gains most, as long as every row holds.

As QSync states it (arXiv 2407.02327): from a feasible choice, a heap holds for each variable the
gain of its next step; pop the largest, keep the step if all rows still hold and then push the
variable's next one, else drop the variable for good. A step leads to the option with the next
smaller value; the released code's sign of the gain, which turns the order round, is not followed.

It ignores what a gain costs and cannot make two steps that only help together, so it can be
arbitrarily bad: one item of gain 10 and cost 10 wins over ten of gain 9 and cost 1.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers._choice_reduction import Reduction, reduce_problem
from foreplan.solvers._choice_walk import Walk
from foreplan.solvers.choice_problem import RELATIVE_TOLERANCE, Choice, ChoiceProblem, FloatArray
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.solution import Solution, SolutionStatus

_MAX_SWEEPS = 20
"""Rounds of single changes that may make a starting choice feasible."""


def solve_heap(problem: ChoiceProblem, start: Choice | None = None) -> Solution[Choice]:
    """Improve a feasible choice step by step.

    Args:
        problem: the instance.
        start: a feasible choice, such as the fastest; left out: :func:`feasible_choice`.

    Returns:
        Status ``feasible``, or ``limit`` where no feasible choice was found to start from (which
        proves nothing); ``evaluations`` counts steps tried.

    Raises:
        SpecError: the given start is no choice of the problem or breaks a row.
    """
    reduction = reduce_problem(problem)
    if start is None:
        start = _repaired(problem, reduction)
        if start is None:
            return Solution(
                status=SolutionStatus.LIMIT,
                value=None,
                objective=math.inf,
                lower_bound=-math.inf,
                evaluations=0,
                solver="heap",
                message="found no feasible choice to start from",
            )
    else:
        score = evaluate(problem, start)
        if not score.feasible:
            raise SpecError("start", got=score.violations[0], expected="a feasible choice")
    walk = Walk(reduction, reduction.options(start))
    tried = _climb(walk, _walk_limits(problem))
    choice = reduction.choice(walk.options)
    return Solution(
        status=SolutionStatus.FEASIBLE,
        value=choice,
        objective=evaluate(problem, choice).objective,
        lower_bound=-math.inf,
        evaluations=tried,
        solver="heap",
    )


def feasible_choice(problem: ChoiceProblem) -> Choice | None:
    """A feasible choice by descent on what the rows lack, or ``None``, which proves nothing."""
    return _repaired(problem, reduce_problem(problem))


def _walk_limits(problem: ChoiceProblem) -> FloatArray:
    """Limits for sums that drift by rounding: half of the shared slack is left for that."""
    limit: FloatArray = problem.limits + RELATIVE_TOLERANCE / 2 * problem.row_units
    return limit


def _climb(walk: Walk, limits: FloatArray) -> int:
    """Take steps from the heap until it is empty; the number of steps tried."""
    variables, tried = walk.reduction.variables, 0
    heap: list[tuple[float, int, int]] = []

    def push(v: int) -> None:
        values = variables[v].values
        here = values[walk.options[v]]
        lower = np.flatnonzero(values < here)
        if len(lower):
            option = int(lower[values[lower].argmax()])
            heapq.heappush(heap, (float(values[option] - here), v, option))

    for v, variable in enumerate(variables):
        if not variable.conditions:
            push(v)
    while heap:
        _, v, option = heapq.heappop(heap)
        tried += 1
        move = walk.move(v, option)
        # Pairs may carry values as well; a step that costs more there than it gains is no gain.
        if move.objective < 0 and (walk.usage + move.usage <= limits).all():
            walk.take(move)
            push(v)
    return tried


def _repaired(problem: ChoiceProblem, reduction: Reduction) -> Choice | None:
    """Lightest options of each variable by itself, then single changes that lower the excess."""
    limits = _walk_limits(problem)
    limited = np.isfinite(limits)
    room = np.where(limited, problem.limits - reduction.base, math.inf)
    # A row weighs by how little room it leaves; rows without any by their own size.
    share = np.where(limited, 1 / np.where(room > 0, room, problem.row_units), 0.0)
    options = [int((variable.weights @ share).argmin()) for variable in reduction.variables]
    walk = Walk(reduction, options)

    def excess(usage: FloatArray) -> float:
        return float((np.maximum(usage - limits, 0.0) / problem.row_units)[limited].sum())

    free = [v for v, variable in enumerate(reduction.variables) if not variable.conditions]
    for _ in range(_MAX_SWEEPS):
        before = now = excess(walk.usage)
        if now == 0:
            choice = reduction.choice(walk.options)
            return choice if evaluate(problem, choice).feasible else None
        for v in free:
            moves = [
                walk.move(v, option)
                for option in range(reduction.variables[v].n_options)
                if option != walk.options[v]
            ]
            best = min(moves, key=lambda move: excess(walk.usage + move.usage))
            after = excess(walk.usage + best.usage)
            if after < now:
                walk.take(best)
                now = after
        if now == before:
            return None
    return None
