"""Why no choice of a multiple-choice problem is feasible, and which limits would make it so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreplan.solvers.choice_problem import RELATIVE_TOLERANCE, Choice, ChoiceProblem, FloatArray
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.choice_tradeoff import row_as_objective
from foreplan.solvers.multiple_choice import solve

_NAMED = 3
"""Rows that a message names as lacking."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceDiagnosis:
    """What each row needs, in the row's unit.

    Attributes:
        feasible: whether a choice that meets every row was found.
        proven: whether there is a proof that none exists.
        least: ``[R]`` least that each row can hold if no other row is limited (a proven bound
            where ``max_nodes`` stopped the search).
        needed: ``[R]`` least that each row can hold while all others keep their limits: the
            smallest limit of this row alone that makes the problem feasible. ``inf`` if no limit
            is known to.
        nearest: the choice that breaks the most broken row least, relative to the row's size;
            ``None`` if none was found.
        shortage: ``[R]`` what each row lacks for ``nearest``, 0 where it holds; all zeros if
            ``nearest`` is ``None``.
        message: one line for a person.
    """

    feasible: bool
    proven: bool
    least: FloatArray
    needed: FloatArray
    nearest: Choice | None
    shortage: FloatArray
    message: str


def diagnose(problem: ChoiceProblem, *, max_nodes: int = 100_000) -> ChoiceDiagnosis:
    """Find what stands in the way: single rows first, then rows that cannot be met together.

    Args:
        problem: the instance.
        max_nodes: branch-and-bound nodes of each of at most ``2 R + 1`` programmes.
    """
    from foreplan.solvers.choice_milp import least_excess  # loads PuLP and HiGHS

    unlimited = problem.with_limits(np.full(problem.n_rows, math.inf))
    least, needed = np.full(problem.n_rows, -math.inf), np.full(problem.n_rows, math.inf)
    for r, row in enumerate(problem.rows):
        least[r] = solve(row_as_objective(unlimited, row), max_nodes=max_nodes).lower_bound
    hopeless = least > problem.slack_limits
    for r, row in enumerate(problem.rows):
        # With another row that nothing meets, no limit of this one helps.
        if not np.delete(hopeless, r).any():
            needed[r] = solve(row_as_objective(problem, row), max_nodes=max_nodes).objective
    nearest, bound = least_excess(problem, max_nodes=max_nodes)
    shortage, feasible = np.zeros(problem.n_rows), False
    if nearest is not None:
        score = evaluate(problem, nearest)
        feasible = score.feasible
        shortage = np.where(score.usage > problem.slack_limits, score.usage - problem.limits, 0.0)
    proven = not feasible and (bool(hopeless.any()) or bound > RELATIVE_TOLERANCE)
    for array in (least, needed, shortage):
        array.setflags(write=False)
    return ChoiceDiagnosis(
        feasible=feasible,
        proven=proven,
        least=least,
        needed=needed,
        nearest=nearest,
        shortage=shortage,
        message=_message(problem, feasible, proven, least, needed, shortage),
    )


def _message(
    problem: ChoiceProblem,
    feasible: bool,
    proven: bool,
    least: FloatArray,
    needed: FloatArray,
    shortage: FloatArray,
) -> str:
    if feasible:
        return "no limit stands in the way"
    hopeless = [
        f"{problem.rows[r]} holds at least {least[r]:.6g}, {least[r] - problem.limits[r]:.6g} "
        f"above its limit of {problem.limits[r]:.6g}"
        for r in np.flatnonzero(least > problem.slack_limits)
    ]
    if hopeless:
        return "; ".join(hopeless)
    if not proven:
        return "found no choice that meets every row, nor a proof that there is none"
    text = "each row can be met, but not all together"
    enough = [
        f"{problem.rows[r]} at {needed[r]:.6g} instead of {problem.limits[r]:.6g}"
        for r in np.flatnonzero(np.isfinite(needed) & (needed > problem.slack_limits))
    ]
    if enough:
        text += f"; one of these would do: {', '.join(enough)}"
    worst = np.argsort(-shortage / problem.row_units, kind="stable")[:_NAMED]
    lacking = [f"{problem.rows[r]} {shortage[r]:.6g}" for r in worst if shortage[r] > 0]
    if lacking:
        text += f"; the nearest choice lacks most of {', '.join(lacking)}"
    return text
