"""A family of chains: its best answer, what comes near it, and a bound on all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from foreplan.errors import SpecError
from foreplan.solvers import _chain_driver
from foreplan.solvers.chain_family import solve_family
from foreplan.solvers.chain_limits import TimeLimits
from foreplan.solvers.chain_partition import ChainProblem, evaluate
from foreplan.solvers.enumerate import brute_force
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., ChainProblem]


def family(problem: ChainProblem) -> list[ChainProblem]:
    """The same chain cut into more or fewer micro-batches, each the faster the smaller it is."""
    return [
        replace(
            problem,
            prefill_s=problem.prefill_s * (0.2 + 1 / prefill),
            decode_s=problem.decode_s * (0.5 + 1 / decode),
            prefill_microbatches=prefill,
            decode_microbatches=decode,
        )
        for prefill in (1, 4)
        for decode in (1, 2, 4)
    ]


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("within", [0.0, 0.1])
def test_equals_brute_force(
    tables: bool, within: float, make_problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tables:
        monkeypatch.setattr(_chain_driver, "_SMALL", -1)
    cut = 0
    for seed in range(7000, 7012):
        problems = family(make_problem(seed))
        expected = [brute_force(problem).objective for problem in problems]
        found = solve_family(problems, gap=0.0, within=within)
        best = min(expected)
        assert min(s.objective for s in found) == pytest.approx(best, rel=1e-9)
        assert min(s.lower_bound for s in found) <= best * (1 + 1e-9)
        for problem, solution, objective in zip(problems, found, expected, strict=True):
            assert solution.lower_bound <= objective * (1 + 1e-9)
            if solution.value is not None:
                score = evaluate(problem, solution.value)
                assert score.feasible
                assert score.objective == pytest.approx(solution.objective, rel=1e-12)
            if objective <= best * (1 + within) * (1 - 1e-9):
                assert solution.objective == pytest.approx(objective, rel=1e-9)
            elif solution.value is None and best < math.inf:
                # What is far away is shown to be far away, not looked for.
                cut += solution.status == SolutionStatus.CUTOFF
                assert solution.lower_bound >= best * (1 + within) * (1 - 1e-9)
    assert cut > 5


def test_limits_hold_for_every_member(make_problem: Make) -> None:
    problems = family(make_problem(7003, n_layers=4, n_types=2, n_variants=2, budgets=False))
    free = solve_family(problems, gap=0.0)
    at = min(range(len(free)), key=lambda i: free[i].objective)
    value = free[at].value
    assert value is not None
    score = evaluate(problems[at], value)
    first = score.prefill_sum_s + (problems[at].prefill_microbatches - 1) * score.prefill_max_s
    found = solve_family(problems, TimeLimits(first_s=first), gap=0.0)
    assert min(s.objective for s in found) == pytest.approx(free[at].objective, rel=1e-9)
    tight = solve_family(problems, TimeLimits(first_s=1e-9), gap=0.0)
    assert all(s.value is None for s in tight)


def test_the_same_every_time(make_problem: Make) -> None:
    problems = family(make_problem(7001))
    assert solve_family(problems, gap=0.0) == solve_family(problems, gap=0.0)
    assert solve_family([]) == []


@pytest.mark.parametrize(
    "arguments", [{"gap": -1.0}, {"within": -0.1}, {"within": math.nan}, {"max_evaluations": 0}]
)
def test_bad_arguments(arguments: dict[str, float], make_problem: Make) -> None:
    with pytest.raises(SpecError, match=r"solve_family\."):
        solve_family([make_problem(1)], **arguments)  # type: ignore[arg-type]
