"""Exact solver of the chain problem (see ``chain_problem`` for the law and the symbols)."""

from __future__ import annotations

import math
from dataclasses import replace

from foreplan.errors import SpecError
from foreplan.solvers._bound_pricing import BoundPricing
from foreplan.solvers._chain_box import Box, whole
from foreplan.solvers._chain_model import model_of
from foreplan.solvers._chain_search import Search
from foreplan.solvers._stage_table import TablePricing, build_table, no_filter
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


_SMALL = 25_000
"""Labels up to which a table of all stages is built at once."""
_LARGE = 3_000_000
"""Labels up to which a filtered table is built."""


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
    search = Search(model_of(problem), gap, cutoff, max_evaluations)
    boxes = _solve(search)
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
        value=search.best,
        objective=search.objective,
        lower_bound=lower,
        evaluations=search.evaluations,
        solver="chain box search",
    )


def _solve(search: Search) -> list[Box]:
    """Run the search on a full table if that is small, else on filtered ones.

    Returns:
        Boxes that hold everything not proven to be no better than the incumbent.
    """
    model = search.model
    table = build_table(model, no_filter(model), _SMALL)
    if table is not None:
        pricing = TablePricing(table)
        return search.run(pricing, [whole(model, pricing.view())])
    bounds = BoundPricing(model)
    frontier = [whole(model, None)]
    reach = 5e-3
    while frontier and search.evaluations < search.max_evaluations:
        frontier = search.coarsen(bounds, frontier, reach, 200)
        if not frontier or frontier[0].bound >= search.stop:
            break
        best = frontier[0]
        target = min(search.stop, best.bound + reach * abs(best.bound))
        if target > model.ceiling_s:
            target = math.inf
        alive = [box for box in frontier if box.bound < target]
        keep = bounds.stage_filter(search, alive, best.multipliers, target)
        table = build_table(model, keep, _LARGE)
        if table is None:
            if reach < 1e-5:
                break
            reach /= 8
            continue
        pricing = TablePricing(table)
        view = pricing.view()
        rest = search.run(pricing, [replace(box, view=view, priced=False) for box in alive])
        proven = min(rest[0].bound if rest else math.inf, target)
        for box in alive:
            box.bound = max(box.bound, proven)
        if proven < min(target, search.stop):
            break
        frontier = [box for box in frontier if box.bound < math.inf]
        reach *= 4
    return frontier
