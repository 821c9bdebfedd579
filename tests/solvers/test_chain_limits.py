"""Chains under time limits: brute force over every small assignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest

from foreplan.solvers.chain_limits import (
    TimeLimits,
    first_s,
    least_first_s,
    least_step_s,
    solve_within,
    step_s,
)
from foreplan.solvers.chain_partition import ChainAssignment, ChainProblem, evaluate, make_stage
from foreplan.solvers.chain_score import ChainScore
from foreplan.solvers.enumerate import type_sequences
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., ChainProblem]


def every_score(problem: ChainProblem) -> Iterator[ChainScore]:
    n = problem.n_layers
    for types in type_sequences(problem):
        for inner in itertools.combinations(range(1, n), len(types) - 1):
            cuts = (0, *inner, n)
            for variants in itertools.product(range(problem.n_variants), repeat=n):
                stages = tuple(
                    make_stage(problem, k, a, b, variants[a:b])
                    for k, a, b in zip(types, cuts[:-1], cuts[1:], strict=True)
                )
                score = evaluate(problem, ChainAssignment(stages))
                if score.feasible:
                    yield score


@pytest.mark.parametrize("seed", range(900, 940))
def test_answers_and_bounds_against_brute_force(seed: int, make_problem: Make) -> None:
    problem = make_problem(seed, n_layers=3, n_types=2, n_variants=2)
    scores = list(every_score(problem))
    if not scores:
        assert solve_within(problem, TimeLimits(1.0, 1.0)).status == SolutionStatus.INFEASIBLE
        return
    firsts = sorted(first_s(problem, score) for score in scores)
    steps = sorted(step_s(problem, score) for score in scores)
    assert least_first_s(problem) <= firsts[0] * (1 + 1e-9)
    assert least_step_s(problem) <= steps[0] * (1 + 1e-9)
    for first, step in (
        (firsts[len(firsts) // 4], math.inf), (math.inf, steps[len(steps) // 4] or math.inf),
        (firsts[len(firsts) // 2], steps[len(steps) // 2] or math.inf), (0.9 * firsts[0], math.inf),
    ):  # fmt: skip
        limits = TimeLimits(first, step)
        within = [s.objective for s in scores if max(limits.excess(problem, s)) <= 1e-9]
        best = min(within, default=math.inf)
        found = solve_within(problem, limits, gap=0.0)
        assert found.lower_bound <= best * (1 + 1e-6)
        if found.value is not None:
            assert limits.met(problem, found.value)
            assert found.objective >= best * (1 - 1e-6)
        if found.status == SolutionStatus.OPTIMAL:
            assert found.objective == pytest.approx(best, rel=1e-6)
        if found.status == SolutionStatus.INFEASIBLE:
            assert not within


def test_without_limits_it_is_the_solver(make_problem: Make) -> None:
    problem = make_problem(3, budgets=False)
    assert TimeLimits().none
    assert solve_within(problem, TimeLimits()).lower_bound < math.inf
