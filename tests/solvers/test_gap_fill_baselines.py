from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from foreplan.solvers.gap_fill import GapFillProblem, UnitChain, evaluate, lower_bounds, solve
from foreplan.solvers.gap_fill_baselines import accept_or_stop, coarse, partitions
from foreplan.solvers.gap_fill_check import violations

Make = Callable[..., GapFillProblem]
fixed = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(("slots", "pipelines", "count"), [(8, 2, 7), (16, 4, 455), (32, 4, 4495)])
def test_partitions_are_counted(slots: int, pipelines: int, count: int) -> None:
    """C(N - 1, m - 1); the first is the paper's own example."""
    every = list(partitions(slots, pipelines))
    assert len(every) == len(set(every)) == count == math.comb(slots - 1, pipelines - 1)
    assert all(sum(counts) == slots and min(counts) >= 1 for counts in every)


@fixed
@given(seed=st.integers(0, 10**6), slowed=st.booleans(), capped=st.booleans())
@example(seed=703592, slowed=False, capped=False)  # a forward and a backward meet before a stage
@example(seed=833833, slowed=False, capped=False)  # a forward late in the step, others in gaps
@example(seed=594043, slowed=True, capped=False)  # a backward early in the step, others in gaps
def test_baselines_are_answers(seed: int, slowed: bool, capped: bool, make_gaps: Make) -> None:
    problem = make_gaps(seed, slowed=slowed, capped=capped)
    for answer in (coarse(problem), accept_or_stop(problem)):
        if answer is None:
            assert problem.live_cap is not None
            continue
        assert violations(problem, answer) == ()
        total = evaluate(problem, answer).total_s
        assert total >= lower_bounds(problem).best_s - 1e-6


@fixed
@given(seed=st.integers(0, 10**6), slowed=st.booleans())
def test_ours_is_no_worse(seed: int, slowed: bool, make_gaps: Make) -> None:
    problem = make_gaps(seed, slowed=slowed)
    ours = solve(problem).objective
    for answer in (coarse(problem), accept_or_stop(problem)):
        if answer is None:  # a baseline may break a rule where ours does not
            continue
        assert ours <= evaluate(problem, answer).total_s * (1 + 1e-4)


@pytest.fixture
def problem() -> GapFillProblem:
    """One device, computing in [2, 4], [6, 8] and [10, 12] of 14; two jobs of 2 and 2."""
    return GapFillProblem(
        backbone_s=14.0,
        busy_s=(([[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]], []),),
        stage_device=np.array([[0]]),
        forward=UnitChain(stage=[0], resource=[0], duration_s=[2.0]),
        backward=UnitChain(stage=[0], resource=[0], duration_s=[2.0]),
        deadline_s=[2.0, 6.0],
        release_s=[8.0, 12.0],
    )


def test_coarse_stays_outside(problem: GapFillProblem) -> None:
    """Two forwards need 4 s before 2, two backwards 4 s after 12."""
    answer = coarse(problem)
    assert answer is not None
    assert evaluate(problem, answer).total_s == pytest.approx(2.0 + 14.0 + 2.0)


def test_the_greedy_moves_into_gaps(problem: GapFillProblem) -> None:
    """One forward fits [4, 6] in time, one backward [8, 10]: nothing is left outside."""
    answer = accept_or_stop(problem)
    assert answer is not None
    assert evaluate(problem, answer).total_s == pytest.approx(14.0)
    np.testing.assert_allclose(answer.forward_start_s[:, 0], [0.0, 4.0], atol=1e-6)
    np.testing.assert_allclose(answer.backward_start_s[:, 0], [8.0, 12.0], atol=1e-6)
