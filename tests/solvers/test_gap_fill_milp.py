"""The programme, the heuristic, the bounds and an exact dynamic programme, against each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from foreplan.errors import SpecError
from foreplan.solvers.gap_fill import GapFillProblem, evaluate, lower_bounds, solve
from foreplan.solvers.gap_fill_check import violations
from foreplan.solvers.gap_fill_milp import solve_milp
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., GapFillProblem]


def tail_at(problem: GapFillProblem, head: float) -> float:
    """Exact least tail at a head on one device with one resource: two FIFO chains merged.

    State: units done of either chain; value: earliest time at which both are, ``inf`` if late.
    """
    assert problem.n_pipelines == problem.n_stages == 1
    unit_f, unit_b = len(problem.forward), len(problem.backward)
    spans = problem.busy_s[problem.stage_device[0, 0]][0]
    lag_f, lag_b = float(problem.forward_lag_s[0, 0]), float(problem.backward_lag_s[0, 0])

    def placed(t: float, duration: float) -> float:
        """End of a unit that starts no sooner than ``t``."""
        for a, b in spans:
            if t + duration <= a:
                break
            t = max(t, b)
        return t + duration

    @cache
    def earliest(f: int, b: int) -> float:
        if f == b == 0:
            return -head
        best = math.inf
        if f:
            slot, u = divmod(f - 1, unit_f)
            end = placed(earliest(f - 1, b), float(problem.forward.duration_s[0, u]))
            late = u == unit_f - 1 and end + lag_f > problem.deadline_s[slot]
            best = math.inf if late else end
        if b:
            slot, u = divmod(b - 1, unit_b)
            before = earliest(f, b - 1)
            if u == 0:
                before = max(before, float(problem.release_s[slot]) + lag_b)
            best = min(best, placed(before, float(problem.backward.duration_s[0, u])))
        return best

    last = earliest(problem.n_slots * unit_f, problem.n_slots * unit_b)
    return max(0.0, last - problem.backbone_s)


def optimum(problem: GapFillProblem, pipeline: np.ndarray) -> float:
    """Exact optimum of a map: pipelines share nothing but the head, so scan it.

    Times are integers, and so is an optimal head, as every start is a sum of them.
    """
    parts = []
    for j in np.unique(pipeline):
        mine, row = pipeline == j, slice(j, j + 1)
        chains = {
            name: replace(chain, duration_s=chain.duration_s[row])
            for name, chain in (("forward", problem.forward), ("backward", problem.backward))
        }
        parts.append(
            replace(
                problem,
                stage_device=problem.stage_device[row],
                forward_lag_s=problem.forward_lag_s[row],
                backward_lag_s=problem.backward_lag_s[row],
                deadline_s=problem.deadline_s[mine],
                release_s=problem.release_s[mine],
                **chains,
            )
        )
    work = problem.n_slots * float(problem.forward.duration_s.sum(axis=1).max())
    longest = int(work + problem.forward_lag_s.max())
    return min(
        head + problem.backbone_s + max(tail_at(part, float(head)) for part in parts)
        for head in range(longest + 1)
    )


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_one_device_equals_the_dynamic_programme(first: int, make_gaps: Make) -> None:
    for seed in range(first, first + 30):
        problem = make_gaps(seed, n_pipelines=1, n_stages=1, links=False)
        exact = optimum(problem, np.zeros(problem.n_slots, dtype=np.int64))
        milp = solve_milp(problem)
        assert milp.status == SolutionStatus.OPTIMAL, seed
        assert milp.objective == pytest.approx(exact, abs=1e-5), seed
        assert solve(problem).objective >= exact - 1e-5, seed
        assert lower_bounds(problem).best_s <= exact + 1e-5, seed


@pytest.mark.parametrize("first", range(1000, 1120, 30))
def test_bounds_programme_and_heuristic_agree(first: int, make_gaps: Make) -> None:
    """Bound <= optimum <= heuristic on several pipelines, stages and resources."""
    gaps = []
    for seed in range(first, first + 30):
        problem = make_gaps(seed)
        milp, found = solve_milp(problem), solve(problem, gap=0.0)
        assert milp.status == SolutionStatus.OPTIMAL, seed
        assert milp.value is not None
        assert violations(problem, milp.value) == (), seed
        assert milp.objective == pytest.approx(round(milp.objective), abs=1e-5), seed
        assert lower_bounds(problem).best_s <= milp.objective + 1e-5, seed
        gaps.append(found.objective / milp.objective - 1)
        assert gaps[-1] >= -1e-7, seed
    # Measured on these seeds: optimal on all of them.
    assert max(gaps) <= 0.02


def test_programmes_know_the_cap(make_gaps: Make) -> None:
    """With a cap: feasible where the heuristic is, never worse, never below the free optimum."""
    outcomes = set()
    for seed in range(20):
        problem = make_gaps(seed, n_slots=3, capped=True)
        milp, found = solve_milp(problem), solve(problem)
        outcomes.add(milp.status)
        if found.found:
            assert milp.objective <= found.objective + 1e-6, seed
        if milp.value is not None:
            assert violations(problem, milp.value) == (), seed
            free = solve_milp(replace(problem, max_live_jobs=None))
            assert milp.objective >= free.objective - 1e-5, seed
    assert outcomes == {SolutionStatus.OPTIMAL, SolutionStatus.INFEASIBLE}


def test_a_map_is_a_decision(make_gaps: Make) -> None:
    """Against all maps, each solved exactly by itself."""
    for seed in range(8):
        problem = make_gaps(seed, n_pipelines=2, n_stages=1, n_slots=3, links=False)
        maps = itertools.product(range(2), repeat=problem.n_slots)
        best = min(optimum(problem, np.array(pipeline)) for pipeline in maps)
        assert solve_milp(problem).objective == pytest.approx(best, abs=1e-5), seed


def test_interference_is_refused(make_gaps: Make) -> None:
    problem = make_gaps(3, slowed=True)
    with pytest.raises(SpecError, match="interference"):
        solve_milp(problem)


def test_a_node_limit_is_not_optimal(make_gaps: Make) -> None:
    """Whatever the limit leaves is an answer with a bound, not a proof."""
    problem = make_gaps(248)
    solution = solve_milp(problem, max_nodes=0)
    assert solution.value is not None
    assert solution.lower_bound <= solution.objective == evaluate(problem, solution.value).total_s
