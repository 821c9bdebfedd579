"""Chain problems of which the best answer over all is wanted, such as pairs of micro-batch sizes.

A glance at each (a few bound evaluations) finds some answer and says which problem looks best. A
longer look at those that may still be better puts them in order; solved in that order, most of the
others only have to be shown to be no better than the best so far, which takes a bound and no
search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.errors import SpecError
from foreplan.solvers._chain_course import Course
from foreplan.solvers.chain_limits import TimeLimits, solve_within
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import ChainAssignment
from foreplan.solvers.solution import Solution


def solve_family(
    problems: Sequence[ChainProblem],
    limits: TimeLimits | None = None,
    *,
    gap: float = 1e-6,
    within: float = 0.0,
    max_evaluations: int = 20_000,
) -> list[Solution[ChainAssignment]]:
    """Find the best answer over all problems, and every problem's answer that comes near it.

    Args:
        problems: the instances.
        limits: on times, of every problem; see `chain_limits.solve_within`.
        gap: as in `chain_partition.solve`, of each problem.
        within: relative distance from the best objective within which a problem's own best answer
            is wanted too, ``>= 0``.
        max_evaluations: as in `chain_partition.solve`, of each problem.

    Returns:
        One solution a problem, in their order. ``cutoff`` means that nothing of the problem is
        better than ``1 + within`` times the least objective of all. The least lower bound is
        proven for the whole family.

    Raises:
        SpecError: an argument out of range.
    """
    if not gap >= 0:
        raise SpecError("solve_family.gap", got=gap, expected=">= 0")
    if not within >= 0:
        raise SpecError("solve_family.within", got=within, expected=">= 0")
    if max_evaluations < 1:
        raise SpecError("solve_family.max_evaluations", got=max_evaluations, expected=">= 1")
    courses = [
        Course(problem, gap=gap, cutoff=math.inf, max_evaluations=max_evaluations)
        for problem in problems
    ]
    looks = [course.glance() for course in courses]
    free = limits is None or limits.none
    best = min([course.objective for course in courses], default=math.inf) if free else math.inf

    def order() -> list[int]:
        return sorted(range(len(courses)), key=lambda i: (courses[i].objective, looks[i], i))

    if free and len(courses) > 1:
        for at in order():
            if looks[at] < best * (1 + within):
                looks[at] = courses[at].look(_above(best * (1 + within)))
                best = min(best, courses[at].objective)
    solutions: dict[int, Solution[ChainAssignment]] = {}
    for at in order():
        known = _above(best * (1 + within))
        solutions[at] = (
            courses[at].solution(known)
            if limits is None or limits.none
            else solve_within(
                problems[at], limits, gap=gap, cutoff=known, max_evaluations=max_evaluations
            )
        )
        best = min(best, solutions[at].objective)
    return [solutions[at] for at in range(len(courses))]


def _above(value: float) -> float:
    """A cutoff by which the answer that has set it is not cut off itself."""
    return math.nextafter(value, math.inf)
