"""Heuristic and bounds for the gap-filling problem: see ``gap_fill_problem`` for its rules.

What makes it easy (``_gap_place``, ``_gap_search``):

- L1: leftmost placement of a FIFO order minimises every completion, stage by stage;
- L2: completions of a pipeline do not depend on the others, hence the i-th earliest completion of
  all pipelines meets the i-th deadline if any map does; no partitions are enumerated;
- L3: whether the forwards alone fit is monotone in the head, hence bisection; time reversal gives
  the tail. The two together bound every answer from below.

What makes it hard is that both directions share gaps and one map. The search places forwards
leftmost at a head and backwards rightmost up to a tail in what is left; neither depends on the
slots, so every job gets a window of slots, and giving each slot the job that must go soonest is an
exact test of these placements. Around it: counts of jobs per pipeline by local search, the tail by
bisection, a few heads beyond the least one, and all of it again with time reversed. With a cap on
live jobs, backwards and forwards are placed in turn and slots are moved and swapped.

Leftmost forwards are a good partner of backwards: at every moment they have used as much time
before it as any placement, hence leave as much after it.
"""

from __future__ import annotations

import math

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers._gap_rows import Rows, reversed_answer, reversed_problem
from foreplan.solvers._gap_search import (
    Filler,
    Incumbent,
    Search,
    improve,
    merged_map,
)
from foreplan.solvers.gap_fill_bounds import GapFillBounds, bounds_and_ends, lower_bounds
from foreplan.solvers.gap_fill_problem import (
    GapFillAnswer,
    GapFillProblem,
    GapFillScore,
    Resource,
    UnitChain,
    evaluate,
)
from foreplan.solvers.solution import Solution, SolutionStatus

__all__ = [
    "GapFillAnswer",
    "GapFillBounds",
    "GapFillProblem",
    "GapFillScore",
    "Resource",
    "UnitChain",
    "evaluate",
    "lower_bounds",
    "solve",
]


def solve(
    problem: GapFillProblem, *, gap: float = 1e-4, max_evaluations: int = 20_000
) -> Solution[GapFillAnswer]:
    """Fill the gaps; deterministic.

    Args:
        problem: the instance.
        gap: relative gap to the best bound at which to stop.
        max_evaluations: passes over one pipeline's units at which to stop.

    Returns:
        The best answer found with the largest of `lower_bounds`; ``evaluations`` counts passes.
        ``OPTIMAL`` only if the bound proves it within ``gap``. ``LIMIT`` if no answer was found,
        which can happen with a cap only.

    Raises:
        SpecError: a negative gap or no evaluation allowed.
    """
    if not 0.0 <= gap < math.inf:
        raise SpecError("gap", got=gap, expected="at least 0")
    if max_evaluations < 1:
        raise SpecError("max_evaluations", got=max_evaluations, expected="at least 1")
    turned = reversed_problem(problem)
    rows, mirror = Rows.of(problem), Rows.of(turned)
    bounds, head, tail = bounds_and_ends(problem, rows, mirror)
    target = bounds.best_s * (1.0 + 0.5 * gap)
    if rows.cap:
        best, spent = _capped(rows, mirror, head, tail, target, max_evaluations)
        answer = best.answer
    else:
        search = Search(Filler(rows, mirror), head, target, max_evaluations // 2)
        search.run(tail)
        answer, best = search.best.answer, search.best
        spent = search.filler.evaluations
        if not best.total <= target:
            back = Search(Filler(mirror, rows), tail, target, max_evaluations - spent)
            back.best = Incumbent(total=best.total)
            back.run(head)
            spent += back.filler.evaluations
            if back.best.answer is not None:
                answer = reversed_answer(turned, back.best.answer)
    total = math.inf if answer is None else evaluate(problem, answer).total_s
    status = SolutionStatus.FEASIBLE
    if answer is None:
        status = SolutionStatus.LIMIT
    elif total - bounds.best_s <= gap * total:
        status = SolutionStatus.OPTIMAL
    return Solution(
        status=status,
        value=answer,
        objective=total,
        lower_bound=min(bounds.best_s, total),
        evaluations=spent,
        solver="leftmost placement with matched windows",
        message="" if answer is not None else "no map met both the deadlines and the cap",
    )


def _capped(
    rows: Rows, mirror: Rows, head: float, tail: float, target: float, max_evaluations: int
) -> tuple[Incumbent, int]:
    """Search with a cap: from several maps and heads, by moves and swaps."""
    search = Search(Filler(rows, mirror), head, target, max_evaluations)
    slots, pipelines = len(rows.deadline), len(rows.first_piece)
    maps = [
        merged_map(rows, head)[0],
        np.arange(slots) % pipelines,
        merged_map(mirror, tail)[0][::-1].copy(),
    ]
    longest = float(rows.forward.job_s.max()) * -(-slots // pipelines)
    for start in maps:
        for share in (0.0, 0.25, 1.0):
            if search.over:
                break
            search.filler.forget()
            improve(search, head + share * longest, start)
            search.tighten()
    return search.best, search.filler.evaluations
