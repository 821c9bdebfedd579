"""Exact solver of the chain problem (see ``chain_problem`` for the law and the symbols)."""

from __future__ import annotations

import math

from foreplan.errors import SpecError
from foreplan.solvers._chain_driver import run_search
from foreplan.solvers._chain_merge import merge_types, split_types
from foreplan.solvers._chain_model import model_of
from foreplan.solvers._chain_search import Search
from foreplan.solvers.chain_problem import (
    ChainAssignment,
    ChainProblem,
    ChainScore,
    ChainStage,
    evaluate,
    make_stage,
)
from foreplan.solvers.solution import Solution, SolutionStatus

__all__ = [
    "ChainAssignment",
    "ChainProblem",
    "ChainScore",
    "ChainStage",
    "evaluate",
    "make_stage",
    "solve",
]


def solve(
    problem: ChainProblem,
    *,
    gap: float = 1e-6,
    cutoff: float = math.inf,
    max_evaluations: int = 100_000,
) -> Solution[ChainAssignment]:
    """Find the best assignment and prove how good it is.

    Args:
        problem: the instance.
        gap: relative gap at which the incumbent counts as optimal, ``>= 0``.
        cutoff: objective (seconds) of the best answer known from elsewhere; assignments that are
            not better by more than ``gap`` are not looked for.
        max_evaluations: bound evaluations after which the search stops; deterministic.

    Returns:
        ``optimal``, ``infeasible``, ``cutoff`` (nothing better than the cutoff exists),
        ``feasible`` or ``limit`` (stopped early, with or without an incumbent).

    Raises:
        SpecError: an argument out of range.
    """
    if not gap >= 0:
        raise SpecError("solve.gap", got=gap, expected=">= 0")
    if max_evaluations < 1:
        raise SpecError("solve.max_evaluations", got=max_evaluations, expected=">= 1")
    merged, groups = merge_types(problem)
    search = Search(model_of(merged), gap, cutoff, max_evaluations)
    boxes = run_search(search)
    bounds = [search.objective, search.dropped, *(box.bound for box in boxes)]
    lower = min(bounds)
    done = lower >= search.stop
    if search.best is not None:
        status = SolutionStatus.OPTIMAL if done else SolutionStatus.FEASIBLE
    elif lower == math.inf:
        status = SolutionStatus.INFEASIBLE
    else:
        status = SolutionStatus.CUTOFF if done else SolutionStatus.LIMIT
    return Solution(
        status=status,
        value=None if search.best is None else split_types(problem, groups, search.best),
        objective=search.objective,
        lower_bound=lower,
        evaluations=search.evaluations,
        solver="chain box search",
    )
