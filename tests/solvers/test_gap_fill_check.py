"""The checker finds nothing wrong with solvers' answers, and every mutation of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from foreplan.solvers.gap_fill import GapFillAnswer, GapFillProblem, UnitChain, evaluate, solve
from foreplan.solvers.gap_fill_check import Rule, violations

Make = Callable[..., GapFillProblem]
fixed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 10**6)


def rules(problem: GapFillProblem, answer: GapFillAnswer) -> set[Rule]:
    return {broken.rule for broken in violations(problem, answer)}


def solved(problem: GapFillProblem) -> GapFillAnswer:
    found = solve(problem).value
    assert found is not None
    return found


@pytest.fixture
def problem() -> GapFillProblem:
    """Two pipelines of two stages, both resources, lags, four slots."""
    busy = np.array([[3.0, 6.0], [9.0, 12.0], [15.0, 18.0], [22.0, 25.0]])
    units = {"resource": [0, 1, 0], "duration_s": [2.0, 1.0, 1.5]}
    return GapFillProblem(
        backbone_s=30.0,
        busy_s=((busy, busy[:2] + 1.5),) * 4,
        stage_device=np.arange(4).reshape(2, 2),
        forward=UnitChain(stage=[0, 0, 1], **units),
        backward=UnitChain(stage=[1, 0, 0], **units),
        deadline_s=[5.0, 9.0, 14.0, 16.0],
        release_s=[17.0, 19.0, 21.0, 28.0],
        forward_lag_s=0.5,
        backward_lag_s=0.25,
        max_live_jobs=2,
    )


def test_a_solution_breaks_nothing(problem: GapFillProblem) -> None:
    assert violations(problem, solved(problem)) == ()


def shifted(answer: GapFillAnswer, side: str, slot: int, unit: int, by: float) -> GapFillAnswer:
    starts = getattr(answer, side).copy()
    starts[slot, unit] += by
    return replace(answer, **{side: starts})


def test_a_unit_on_the_backbone_is_found(problem: GapFillProblem) -> None:
    answer = solved(problem)
    starts = answer.forward_start_s.copy()
    starts[0, 2] = 4.0
    assert Rule.GAP in rules(problem, replace(answer, forward_start_s=starts))


def test_two_units_at_once_are_found(problem: GapFillProblem) -> None:
    answer = solved(problem)
    same = np.flatnonzero(answer.pipeline == answer.pipeline[0])
    starts = answer.backward_start_s.copy()
    starts[same[1]] = starts[same[0]]
    assert {Rule.GAP, Rule.FIFO} <= rules(problem, replace(answer, backward_start_s=starts))


def test_a_unit_inside_another_is_found_past_its_neighbour(problem: GapFillProblem) -> None:
    """A long unit can overlap the interval after next."""
    lone = replace(
        problem,
        busy_s=(([[1.0, 20.0], [21.0, 22.0]], []), *problem.busy_s[1:]),
        max_live_jobs=None,
    )
    answer = solved(problem)
    starts = answer.forward_start_s.copy()
    starts[0, 0] = 18.0
    broken = violations(lone, replace(answer, forward_start_s=starts))
    assert any(v.rule == Rule.GAP and "slot 0 unit 0" in v.message for v in broken)


def test_a_dropped_lag_is_found(problem: GapFillProblem) -> None:
    """An answer to the problem without lags has transfers that take no time."""
    none = solved(replace(problem, forward_lag_s=0.0, backward_lag_s=0.0))
    assert violations(replace(problem, forward_lag_s=0.0, backward_lag_s=0.0), none) == ()
    found = rules(replace(problem, forward_lag_s=4.0), none)
    assert {Rule.CHAIN, Rule.DEADLINE} <= found
    assert {Rule.CHAIN, Rule.RELEASE} <= rules(replace(problem, backward_lag_s=4.0), none)


def test_an_earlier_deadline_and_a_later_release_are_found(problem: GapFillProblem) -> None:
    answer = solved(problem)
    early = replace(problem, deadline_s=problem.deadline_s - 40.0)
    assert rules(early, answer) == {Rule.DEADLINE}
    late = replace(problem, release_s=problem.release_s + 40.0)
    assert rules(late, answer) == {Rule.RELEASE}


def test_a_tighter_cap_is_found(problem: GapFillProblem) -> None:
    answer = solved(replace(problem, max_live_jobs=None))
    assert rules(replace(problem, max_live_jobs=1), answer) == {Rule.CAP}


def test_an_unknown_pipeline_is_found(problem: GapFillProblem) -> None:
    answer = replace(solved(problem), pipeline=np.array([0, 1, 2, 0]))
    assert rules(problem, answer) == {Rule.MAP}


def test_another_pipeline_for_one_job_is_found(problem: GapFillProblem) -> None:
    """Moving a job without its start times puts it on top of others or out of order."""
    answer = solved(problem)
    for slot in range(problem.n_slots):
        pipeline = answer.pipeline.copy()
        pipeline[slot] = 1 - pipeline[slot]
        assert rules(problem, replace(answer, pipeline=pipeline))


@fixed
@given(seed=SEEDS, slowed=st.booleans(), pick=st.integers(0, 10**6))
def test_swapped_units_are_found(seed: int, slowed: bool, pick: int, make_gaps: Make) -> None:
    """Two units of one job change places."""
    problem = make_gaps(seed, slowed=slowed)
    side = ("forward", "backward")[pick % 2]
    units = len(getattr(problem, side))
    assume(units >= 2)
    answer = solved(problem)
    assert violations(problem, answer) == ()
    starts = getattr(answer, f"{side}_start_s").copy()
    slot, u = pick % problem.n_slots, pick % (units - 1)
    starts[slot, [u, u + 1]] = starts[slot, [u + 1, u]]
    assert Rule.CHAIN in rules(problem, replace(answer, **{f"{side}_start_s": starts}))


@fixed
@given(seed=SEEDS, pick=st.integers(0, 10**6))
def test_a_moved_last_unit_is_found_or_harmless(seed: int, pick: int, make_gaps: Make) -> None:
    """Starting a backward's last unit before its predecessor ends is always flagged."""
    problem = make_gaps(seed)
    units = len(problem.backward)
    assume(units >= 2)
    answer = solved(problem)
    slot = pick % problem.n_slots
    end = evaluate(problem, answer).backward_end_s[slot, -2]
    by = end - answer.backward_start_s[slot, -1] - 0.5
    moved = shifted(answer, "backward_start_s", slot, units - 1, by)
    assert Rule.CHAIN in rules(problem, moved)
