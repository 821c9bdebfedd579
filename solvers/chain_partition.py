"""Exact solver of the chain problem: see ``chain_problem`` for the law and the symbols.

Given caps on the bottlenecks ``max P`` and ``max D``, the law is a sum over stages, so a dynamic
programme over (layer boundary, used devices per type, last type) finds the best chain over all
device orders at once. The search is over boxes of caps::

    bound(box) = cheapest chain within the box's caps + bottlenecks at the box's lower corner

-> boxes, multipliers for budgets and for ``max(sum D, m max D)``, cutting: ``_chain_search``
-> the dynamic programme: ``_chain_path``, in which only devices of types of which a cheapest chain
   would use too many are counted: ``_chain_devices``; boxes settled exactly by labels:
   ``_chain_labels``
-> what a stage can be (labels over prefill, decode, memory, omega, cost2; layers with equal costs
   are interchangeable up to omega): ``_stage_labels``, kept in a ``_stage_table``
-> what it leaves room for, which follows from the variants that it uses: ``_stage_modes``
-> bounds on stages that need no table, and the filter that makes tables small: ``_stage_bound``,
   ``_bound_pricing``
-> the order of events: ``_chain_driver``, ``_chain_course``; of many problems: ``chain_family``

Every part of the plane of caps keeps a proven bound, hence the answer's lower bound; limits are
in evaluations, so that an answer does not depend on the machine.

Source: the decomposition of the LLM-PQ problem in the project's notes (box branch and bound over
caps, arbitrary omega by counts); the bounds, filters, cuts and labels here are our own.
"""

from __future__ import annotations

import math

from foreplan.errors import SpecError
from foreplan.solvers._chain_course import Course
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import (
    ChainAssignment,
    ChainScore,
    ChainStage,
    evaluate,
    make_stage,
)
from foreplan.solvers.solution import Solution

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
    max_evaluations: int = 20_000,
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
    if math.isnan(cutoff):
        raise SpecError("solve.cutoff", got=cutoff, expected="a number")
    if max_evaluations < 1:
        raise SpecError("solve.max_evaluations", got=max_evaluations, expected=">= 1")
    course = Course(problem, gap=gap, cutoff=cutoff, max_evaluations=max_evaluations)
    return course.solution()
