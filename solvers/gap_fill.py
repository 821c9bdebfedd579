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

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers._gap_filler import Filler, Incumbent, least_head, merged_map
from foreplan.solvers._gap_rows import Rows, reversed_answer, reversed_problem
from foreplan.solvers._gap_search import Search, improve
from foreplan.solvers.gap_fill_bounds import GapFillBounds, bounds_and_ends, least_cap, lower_bounds
from foreplan.solvers.gap_fill_problem import GapFillProblem, Resource, UnitChain
from foreplan.solvers.gap_fill_score import GapFillAnswer, GapFillScore, evaluate
from foreplan.solvers.solution import Solution, SolutionStatus

__all__ = [
    "GapFillAnswer",
    "GapFillBounds",
    "GapFillProblem",
    "GapFillScore",
    "Resource",
    "UnitChain",
    "evaluate",
    "least_cap",
    "lower_bounds",
    "solve",
]

_SOLVER = "leftmost placement with matched windows"


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
        ``OPTIMAL`` only if the bound proves it within ``gap``. With a cap there may be no answer:
        ``INFEASIBLE`` if the cap is below `least_cap`, ``LIMIT`` if none was found.

    Raises:
        SpecError: a negative gap or no evaluation allowed.
    """
    if not 0.0 <= gap < math.inf:
        raise SpecError("gap", got=gap, expected="at least 0")
    if max_evaluations < 1:
        raise SpecError("max_evaluations", got=max_evaluations, expected="at least 1")
    rows, mirror = Rows.of(problem), Rows.of(reversed_problem(problem))
    if rows.cap and rows.cap < (least := least_cap(problem)):
        return Solution(
            status=SolutionStatus.INFEASIBLE, value=None, objective=math.inf,
            lower_bound=math.inf, evaluations=0, solver=_SOLVER,
            message=f"a pipeline has at least {least} live jobs, the cap is {rows.cap}",
        )  # fmt: skip
    bounds, head, tail = bounds_and_ends(problem, rows, mirror)
    target = bounds.best_s * (1.0 + 0.5 * gap)
    free = _both_ways(problem, rows, mirror, (head, tail), target, max_evaluations)
    spent = free.evaluations
    answer: GapFillAnswer | None = free.answer
    if rows.cap:
        search = Search(Filler(rows, mirror), head, target, max(1, max_evaluations - spent))
        _capped(problem, search, tail, free)
        spent, answer = spent + search.filler.evaluations, search.best.answer
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
        solver=_SOLVER,
        message="" if answer is not None else "no map met both the deadlines and the cap",
    )


@dataclass(frozen=True, slots=True)
class _Free:
    """Best answer without a cap: its head, total and map, and passes spent."""

    head: float
    total: float
    answer: GapFillAnswer
    evaluations: int


def _both_ways(
    problem: GapFillProblem, rows: Rows, mirror: Rows, ends: tuple[float, float],
    target: float, max_evaluations: int,
) -> _Free:  # fmt: skip
    """Search with time running forwards, then backwards for something better."""
    rows, mirror = replace(rows, cap=0), replace(mirror, cap=0)
    search = Search(Filler(rows, mirror), ends[0], target, max_evaluations // 2)
    search.run(ends[1])
    best, spent = search.best, search.filler.evaluations
    answer = best.answer
    if best.total > target:
        back = Search(Filler(mirror, rows), ends[1], target, max_evaluations - spent)
        back.best = Incumbent(total=best.total)
        back.run(ends[0])
        spent += back.filler.evaluations
        if back.best.answer is not None:
            answer = reversed_answer(reversed_problem(problem), back.best.answer)
    assert answer is not None  # the merged map is feasible at the least head
    score = evaluate(problem, answer)
    return _Free(score.head_s, score.total_s, answer, spent)


def _capped(problem: GapFillProblem, search: Search, tail: float, free: _Free) -> None:
    """Without a job too many for the cap to matter, then from several maps by moves and swaps."""
    rows, mirror = search.filler.rows, search.filler.mirror
    slots, pipelines = len(rows.deadline), len(rows.first_piece)
    starts = [free]
    if pipelines * rows.cap >= slots:
        few, turned = (replace(side, cap=0, most=rows.cap) for side in (rows, mirror))
        ends = least_head(few)[1], least_head(turned)[1]
        starts.insert(
            0, _both_ways(problem, few, turned, ends, search.target, search.max_evaluations)
        )
        search.best = Incumbent(total=starts[0].total, answer=starts[0].answer)
    span = float(rows.forward.job_s.max()) * -(-slots // pipelines)
    heads = [start.head for start in starts]
    heads += [search.floor + share * span for share in (0.0, 0.25, 0.5, 1.0)]
    maps = [
        *(start.answer.pipeline for start in starts),
        merged_map(rows, search.floor)[0],
        np.arange(slots) % pipelines,
        np.ascontiguousarray(merged_map(mirror, tail)[0][::-1]),
    ]
    for head, start in itertools.product(heads, maps):
        if search.over:
            break
        search.filler.forget()
        improve(search, head, start)
        search.tighten()
