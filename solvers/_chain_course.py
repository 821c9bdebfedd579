"""One solve from the problem to its `Solution`, with a first glance before the whole of it."""

from __future__ import annotations

import math
from dataclasses import replace

from foreplan.solvers._bound_pricing import BoundPricing
from foreplan.solvers._chain_box import Box
from foreplan.solvers._chain_driver import few_stages, glance, look, refine, run_search
from foreplan.solvers._chain_merge import merge_types, split_types
from foreplan.solvers._chain_model import model_of
from foreplan.solvers._chain_search import Search
from foreplan.solvers._chain_within import Within
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import ChainAssignment
from foreplan.solvers.solution import Solution, SolutionStatus


class Course:
    """A solve that can be looked at early; arguments as in `chain_partition.solve`.

    With ``within`` objectives are those of `Within.objective`.
    """

    def __init__(
        self, problem: ChainProblem, *, gap: float, cutoff: float, max_evaluations: int,
        within: Within | None = None,
    ) -> None:  # fmt: skip
        self.problem = problem
        merged, self._groups = merge_types(problem)
        model = model_of(merged)
        if within is not None and problem.theta > 0:
            model = replace(model, omega_apart=True)
        self._search = Search(model, gap, cutoff, max_evaluations, within=within)
        self._bounds: BoundPricing | None = None
        self._frontier: list[Box] = []

    @property
    def objective(self) -> float:
        """Of the incumbent so far, seconds; ``inf`` without one."""
        return self._search.objective

    def glance(self) -> float:
        """Spend a few evaluations, none where a table of all stages is small.

        Returns:
            A proven bound, seconds.
        """
        if few_stages(self._search.model):
            return -math.inf
        self._bounds = BoundPricing(self._search.model)
        self._frontier = glance(self._search, self._bounds)
        return self._frontier[0].bound if self._frontier else math.inf

    def look(self, cutoff: float) -> float:
        """Spend some evaluations more than `glance` did.

        Args:
            cutoff: a better one than that known at the start, seconds.

        Returns:
            As `glance`.
        """
        if self._bounds is None:
            return -math.inf
        self._search.cutoff = min(self._search.cutoff, cutoff)
        self._frontier = look(self._search, self._bounds, self._frontier)
        return self._frontier[0].bound if self._frontier else math.inf

    def solution(self, cutoff: float = math.inf) -> Solution[ChainAssignment]:
        """Go on to the end.

        Args:
            cutoff: a better one than that known at the start, seconds.
        """
        search = self._search
        search.cutoff = min(search.cutoff, cutoff)
        if self._bounds is None:
            boxes = run_search(search)
        else:
            boxes = refine(search, self._bounds, self._frontier)
        lower = min([search.objective, search.dropped, *(box.bound for box in boxes)])
        done = lower >= search.stop
        # A glance may have found something before the cutoff was known.
        found = search.best if search.objective < search.cutoff else None
        if found is not None:
            status = SolutionStatus.OPTIMAL if done else SolutionStatus.FEASIBLE
        elif lower == math.inf:
            status = SolutionStatus.INFEASIBLE
        else:
            status = SolutionStatus.CUTOFF if done else SolutionStatus.LIMIT
        return Solution(
            status=status,
            value=None if found is None else split_types(self.problem, self._groups, found),
            objective=math.inf if found is None else search.objective,
            lower_bound=lower,
            evaluations=search.evaluations,
            solver="chain box search",
        )
