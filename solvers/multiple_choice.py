"""Solvers of the multiple-choice problem: see ``choice_problem`` for the problem and its symbols.

Every method works on the reduction of the problem (``_choice_reduction``) and is judged by the one
:func:`evaluate`:

-> exact, with a proven gap: :func:`solve`, the programme of ``choice_milp`` started by the heap
-> the allocator of QSync: ``choice_heap.solve_heap``
-> exact without a MILP solver, for narrow graphs and few rows: ``choice_frontier.solve_frontier``
-> lower-level baseline, a knapsack without pairs: ``solve(problem.without_pairs())``
-> sweep over a limit, and minimising a row under a cap on the objective: ``choice_tradeoff``
-> which rows lack how much: ``choice_diagnosis.diagnose``
"""

from __future__ import annotations

from foreplan.solvers.choice_problem import Choice, ChoiceItem, ChoicePair, ChoiceProblem
from foreplan.solvers.choice_score import ChoiceScore, evaluate
from foreplan.solvers.solution import Solution

__all__ = [
    "Choice",
    "ChoiceItem",
    "ChoicePair",
    "ChoiceProblem",
    "ChoiceScore",
    "evaluate",
    "solve",
]


def solve(
    problem: ChoiceProblem,
    *,
    start: Choice | None = None,
    gap: float = 1e-9,
    max_nodes: int = 100_000,
) -> Solution[Choice]:
    """Solve to a proven gap; never worse than the heap.

    Args:
        problem: the instance.
        start: a feasible choice that the heap starts from; left out: it looks for one.
        gap: relative gap at which to stop.
        max_nodes: branch-and-bound nodes at which to stop, so that answers repeat anywhere.

    Returns:
        The best choice found; ``optimal`` only if the gap is proven.

    Raises:
        SpecError: ``start`` is no feasible choice; a gap or limit that is no limit.
    """
    # PuLP and HiGHS are loaded with the first solve, not with the problem.
    from foreplan.solvers.choice_milp import solve_milp

    return solve_milp(problem, start=start, gap=gap, max_nodes=max_nodes)
