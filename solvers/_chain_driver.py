"""The course of a solve: a full table if that is small, else bounds first and filtered tables.

The bounds (``_bound_pricing``) find good chains and narrow boxes; the filter they give makes the
table of stages small enough to list, and the same search then settles the boxes on it. Targets
close to the bound make small tables, so they grow step by step until nothing is left below the
incumbent.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from foreplan.solvers._bound_pricing import BoundPricing
from foreplan.solvers._chain_box import Box, Multipliers, whole
from foreplan.solvers._chain_model import ChainModel, model_of
from foreplan.solvers._chain_search import Search
from foreplan.solvers._chain_settle import settle_boxes
from foreplan.solvers._stage_filter import filter_stages, no_filter
from foreplan.solvers._stage_table import TablePricing, build_table
from foreplan.solvers.chain_problem import ChainProblem, FloatArray
from foreplan.solvers.chain_score import make_stage

_SMALL = 25_000
"""Labels up to which a table of all stages is built at once."""
_GLANCE = 12
"""Evaluations of a first look."""
_LOOK = 24
"""Evaluations of a second one: of 36 pairs of micro-batches with links, all were solved in 1.43 CPU
seconds without, in 0.88, 0.93 and 1.07 with 24, 48 and 100 (measured)."""
_LARGE = 1_500_000
"""Labels up to which one table serves all boxes; with more, each gets one of its own."""


_SOME = 300_000
"""Labels up to which a table of the stages near an incumbent's is built."""
_NEAR = 2
"""Layers by which these may start or end elsewhere."""
_FAR = 0.05
"""Relative distance of incumbent and bound from which that is worth it."""
_LONG = 0.1
"""The same from which one small table of all that is left is built at once: the way in steps is
long, and proves boxes again and again."""
_IMPROVEMENTS = 4
"""Times that the neighbourhood moves on with the incumbent."""
_LABELS_EACH = 1_000
"""Labels listed that count as one evaluation: they take about as long."""
_COARSE = 200
"""Evaluations spent on narrowing boxes before each table."""
_REACH = 5e-3
"""Relative distance of the first target from the bound."""


def run_search(search: Search) -> list[Box]:
    """Find the best chain and what is left to prove.

    Args:
        search: fresh state; holds the incumbent afterwards.

    Returns:
        Boxes that hold everything not proven to be no better than the incumbent, with bounds.
    """
    model = search.model
    if few_stages(model):
        table = build_table(model, no_filter(model), _SMALL)
        if table is not None:
            pricing = TablePricing(table)
            return search.run(pricing, [whole(model, pricing.view())])
    return refine(search, BoundPricing(model), [whole(model, None)])


def glance(search: Search, bounds: BoundPricing) -> list[Box]:
    """Spend a few evaluations on bounds alone; for `refine` to go on from."""
    return search.coarsen(bounds, [whole(search.model, None)], _REACH, _GLANCE)


def look(search: Search, bounds: BoundPricing, frontier: list[Box]) -> list[Box]:
    """Spend some more on what a glance has left."""
    return search.coarsen(bounds, frontier, _REACH, _LOOK)


def few_stages(model: ChainModel) -> bool:
    """Whether a table of all stages looks small, judged by the stages from the first layer.

    Counts of V variants over n layers grow as n^V, so that summed over all starts there are about
    L / (V + 1) times those of the longest.
    """
    keep = no_filter(model)
    keep.stop[:, 1:] = 0
    share = (model.problem.n_variants + 1) / model.problem.n_layers
    return build_table(model, keep, int(_SMALL * share)) is not None


def refine(search: Search, bounds: BoundPricing, frontier: list[Box]) -> list[Box]:
    """Bounds, then tables of the stages that they leave, step by step.

    Args:
        search: holds the incumbent.
        bounds: stage bounds.
        frontier: boxes that hold everything of interest.

    Returns:
        As `run_search`.
    """
    model = search.model
    reach, asked, improved, in_steps = _REACH, False, math.inf, False
    while frontier and search.evaluations < search.max_evaluations:
        frontier = search.coarsen(bounds, frontier, reach, _COARSE)
        if search.evaluations >= search.max_evaluations:
            break
        if not frontier or frontier[0].bound >= search.stop:
            break
        if search.best is None and not asked and search.has_budgets:
            asked = True
            if not meet_budgets(search):
                return []
            if frontier[0].bound >= search.stop:
                break
        best = frontier[0]
        step = reach * max(abs(best.bound), 1e-6 * model.ceiling_s)
        target = min(search.stop, best.bound + step)
        if target > model.ceiling_s:
            target = math.inf
        ahead = (search.stop - best.bound) / max(abs(best.bound), 1e-300)
        far = ahead > _FAR
        if far and target < search.stop and search.objective < improved:
            improve(search, bounds, best.multipliers)
            improved = search.objective
            if best.bound >= search.stop:
                break
            target = min(target, search.stop)
        long = _LONG < ahead < math.inf and not in_steps
        for within, most in ((search.stop, _SMALL), (target, _LARGE))[not long :]:
            alive = [box for box in frontier if box.bound < within]
            keep = filter_stages(search, bounds, alive, best.multipliers, within)
            table = build_table(model, keep, most)
            search.evaluations += (most if table is None else len(table.parent)) // _LABELS_EACH
            if table is not None:
                target = within
                break
            in_steps = True  # asked once: later more is left, or as much
        if table is None:
            return settle_boxes(search, bounds, frontier)
        pricing = TablePricing(table)
        view = pricing.view()
        rest = search.run(pricing, [replace(box, view=view, priced=False) for box in alive])
        proven = min(rest[0].bound if rest else math.inf, target)
        for box in alive:
            box.bound = max(box.bound, proven)
        if proven < min(target, search.stop):
            if not long:
                break
            in_steps = True  # the one table was too hard: what steps leave of it may not be
            continue
        frontier = [box for box in frontier if box.bound < math.inf]
        reach *= 4
    return frontier


def improve(search: Search, bounds: BoundPricing, multipliers: Multipliers) -> None:
    """Look for a better chain near the incumbent: stages that start and end close to its own.

    Args:
        search: holds the incumbent.
        bounds: stage bounds.
        multipliers: lambda, u, w that filter stages.
    """
    model, everything = search.model, whole(search.model, None)
    boundary = np.arange(model.problem.n_layers + 1)
    for _ in range(_IMPROVEMENTS):
        if search.best is None or search.evaluations >= search.max_evaluations:
            return
        near = np.zeros((model.problem.n_types, len(boundary) - 1, len(boundary)), dtype=bool)
        for stage in search.best.stages:
            starts = np.abs(boundary[:-1] - stage.start) <= _NEAR
            ends = np.abs(boundary - stage.end) <= _NEAR
            near[stage.device_type] |= starts[:, None] & ends
        keep = filter_stages(search, bounds, [everything], multipliers, search.stop, near)
        table = build_table(model, keep, _SOME)
        search.evaluations += (_SOME if table is None else len(table.parent)) // _LABELS_EACH
        if table is None:
            return
        left = min(_COARSE, search.max_evaluations - search.evaluations)
        inner = Search(model, max(search.gap, 1e-3), search.objective, left, within=search.within)
        pricing = TablePricing(table)
        inner.run(pricing, [replace(everything, multipliers=multipliers, view=pricing.view())])
        search.evaluations += inner.evaluations
        if inner.best is None:
            return
        search.accept(inner.best.stages)


def meet_budgets(search: Search) -> bool:
    """Look for any assignment that meets the budgets; it becomes the incumbent.

    Returns:
        False if it is proven that there is none.
    """
    problem = search.model.problem
    relaxed, goal = least_budget(problem)
    above = math.nextafter(goal, math.inf)
    left = search.max_evaluations - search.evaluations
    inner = Search(model_of(relaxed), 0.0, above, left, goal=goal)
    rest = run_search(inner)
    search.evaluations += inner.evaluations
    if inner.best is not None:
        search.accept(
            tuple(
                make_stage(problem, s.device_type, s.start, s.end, s.variants)
                for s in inner.best.stages
            )
        )
        return True
    return min([inner.dropped, *(box.bound for box in rest)]) < inner.stop


def least_budget(problem: ChainProblem) -> tuple[ChainProblem, float]:
    """The problem of meeting one budget: omega under the cost2 budget, or else cost2 alone.

    Returns:
        A problem without times whose objective is the budgeted cost (cost2 is shifted so that no
        layer's least cost is negative), and the largest value that meets the budget.
    """
    if problem.max_omega is not None:
        return timeless(problem, problem.omega, problem.max_cost2), problem.omega_limit
    least = problem.cost2.min(axis=1)
    return timeless(problem, problem.cost2 - least[:, None], None), problem.cost2_limit - float(
        least.sum()
    )


def timeless(problem: ChainProblem, omega: FloatArray, max_cost2: float | None) -> ChainProblem:
    """The same devices, memory and availability, but only a cost by variant to minimise."""

    def zeros(array: FloatArray) -> FloatArray:
        return np.where(np.isfinite(array), 0.0, math.inf)

    times = [
        *(f"{part}_{phase}_s" for part in ("first", "last") for phase in ("prefill", "decode")),
        *("prefill_s", "decode_s", "link_prefill_s", "link_decode_s", "link_return_decode_s"),
    ]
    changes: dict[str, Any] = {name: zeros(getattr(problem, name)) for name in times}
    return replace(
        problem,
        **changes,
        prefill_microbatches=1,
        decode_microbatches=1,
        new_tokens=1,
        omega=omega,
        theta=1.0,
        max_omega=None,
        max_cost2=max_cost2,
    )
