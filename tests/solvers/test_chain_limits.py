"""Chains under time limits: brute force over every small assignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from foreplan.solvers.chain_fluid import fluid_latency_s, quick_latency_s
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
        known = solve_within(problem, limits, gap=0.0, cutoff=found.objective * (1 - 1e-6))
        assert known.value is None
        assert known.lower_bound <= best * (1 + 1e-6)
        again = solve_within(problem, limits, gap=0.0, cutoff=found.objective * (1 + 1e-6))
        assert again.objective == pytest.approx(found.objective, rel=1e-6)
        if found.value is not None:
            assert limits.met(problem, found.value)
            assert found.objective >= best * (1 - 1e-6)
        # Between supported points too.
        if within:
            assert found.status == SolutionStatus.OPTIMAL
            assert found.objective == pytest.approx(best, rel=1e-6)
        else:
            assert found.value is None


@pytest.mark.parametrize("seed", range(900, 940))
def test_fluid_bounds_are_below_what_is_within_the_limits(seed: int, make_problem: Make) -> None:
    problem = replace(make_problem(seed, n_layers=3, n_types=2, n_variants=2), theta=0.0)
    scores = list(every_score(problem)) or pytest.skip("nothing fits")
    firsts = sorted(first_s(problem, score) for score in scores)
    steps = sorted(step_s(problem, score) or math.inf for score in scores)
    half = len(scores) // 2
    for limits in (
        TimeLimits(firsts[0]), TimeLimits(step_s=steps[0]), TimeLimits(firsts[half], steps[half]),
    ):  # fmt: skip
        within = [s.objective for s in scores if max(limits.excess(problem, s)) <= 1e-9]
        best = min(within, default=math.inf)
        assert quick_latency_s(problem, problem.counts[None, :], limits)[0] <= best * (1 + 1e-9)
        fluid = fluid_latency_s(problem, limits)
        assert fluid_latency_s(problem) * (1 - 1e-6) <= fluid <= best * (1 + 1e-9)


def test_fluid_bounds_see_a_limit_that_nothing_meets(make_problem: Make) -> None:
    problem = make_problem(3, n_layers=4, n_types=2, n_variants=2, budgets=False)
    assert problem.new_tokens > 1
    for limits in (TimeLimits(first_s=1e-9), TimeLimits(step_s=1e-9)):
        assert quick_latency_s(problem, problem.counts[None, :], limits)[0] == math.inf
        assert fluid_latency_s(problem, limits) == math.inf


def test_without_limits_it_is_the_solver(make_problem: Make) -> None:
    problem = make_problem(3, budgets=False, workspace=False)
    assert TimeLimits().none
    assert solve_within(problem, TimeLimits()).lower_bound < math.inf
