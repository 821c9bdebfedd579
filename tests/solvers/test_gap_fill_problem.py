from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.solvers._gap_rows import reversed_answer, reversed_problem
from foreplan.solvers.gap_fill import (
    GapFillAnswer,
    GapFillProblem,
    UnitChain,
    evaluate,
    lower_bounds,
    solve,
)

Make = Callable[..., GapFillProblem]


def chain(*units: tuple[int, int, float]) -> UnitChain:
    stage, resource, duration = zip(*units, strict=True)
    return UnitChain(stage=stage, resource=resource, duration_s=duration)


def one_device(**changes: Any) -> GapFillProblem:
    given: dict[str, Any] = {
        "backbone_s": 10.0,
        "busy_s": (([[2, 4], [6, 8]], [[4, 5]]),),
        "stage_device": np.array([[0]]),
        "forward": chain((0, 0, 1.0)),
        "backward": chain((0, 0, 2.0)),
        "deadline_s": [1.0],
        "release_s": [9.0],
    }
    return GapFillProblem(**given | changes)


def answer(pipeline: list[int], forward: list[list[float]], backward: list[list[float]]) -> Any:
    return GapFillAnswer(
        pipeline=np.array(pipeline), forward_start_s=forward, backward_start_s=backward
    )


def test_total_is_head_backbone_and_tail() -> None:
    score = evaluate(one_device(), answer([0], [[-0.5]], [[9.0]]))
    assert (score.head_s, score.tail_s, score.total_s) == (0.5, 1.0, 11.5)
    assert score.inside_fraction == pytest.approx((0.5 + 1.0) / 3.0)


def test_nothing_outside_costs_nothing() -> None:
    problem = one_device(backward=UnitChain.empty())
    score = evaluate(problem, answer([0], [[0.0]], [[]]))
    assert (score.total_s, score.inside_fraction) == (10.0, 1.0)


@pytest.mark.parametrize(
    ("start", "end", "company"),
    [(4.0, 5.5, 1.0), (4.5, 5.25, 0.5), (5.0, 5.5, 0.0), (3.5, 4.0, 0.0), (3.75, 4.5, 0.5)],
)
def test_company_slows_a_unit(start: float, end: float, company: float) -> None:
    """Half speed while the link is busy in [4, 5]; work is that of the end."""
    work = (end - start) - 0.5 * company
    problem = one_device(forward=chain((0, 0, work)), compute_slowdown=2.0)
    score = evaluate(problem, answer([0], [[start]], [[9.0]]))
    assert score.forward_end_s[0, 0] == pytest.approx(end)
    assert score.overlap_s[0, 0] == pytest.approx(company)


def test_link_units_are_slowed_by_computation() -> None:
    problem = one_device(forward=chain((0, 1, 3.0)), link_slowdown=1.5)
    score = evaluate(problem, answer([0], [[1.0]], [[9.0]]))
    # 1 s alone, 2 s in [2, 4] that count 4/3, the rest alone.
    assert score.forward_end_s[0, 0] == pytest.approx(4.0 + 2.0 / 3.0)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"backbone_s": 0.0}, "backbone_s"),
        ({"busy_s": (([[2, 4], [3, 8]], []),)}, "busy_s[0][0]"),
        ({"busy_s": (([], [[4, 11]]),)}, "busy_s[0][1]"),
        ({"busy_s": (([],),)}, "busy_s[0]"),
        ({"busy_s": (([1, 2], []),)}, "busy_s[0][0]"),
        ({"stage_device": np.array([[0, 0]])}, "stage_device"),
        ({"stage_device": np.array([[1]])}, "stage_device"),
        ({"forward": chain((1, 0, 1.0))}, "forward.stage"),
        ({"deadline_s": [2.0, 1.0], "release_s": [9.0, 9.0]}, "deadline_s"),
        ({"deadline_s": [], "release_s": []}, "deadline_s"),
        ({"release_s": [9.0, 9.0]}, "release_s"),
        ({"release_s": [0.5]}, "release_s[0]"),
        ({"forward_lag_s": [[1.0, 2.0]]}, "forward_lag_s"),
        ({"backward_lag_s": -1.0}, "backward_lag_s"),
        ({"compute_slowdown": 0.9}, "compute_slowdown"),
        ({"max_live_jobs": 0}, "max_live_jobs"),
        (
            {"forward": UnitChain(stage=[0], resource=[0], duration_s=[[1.0], [2.0]])},
            "forward.duration_s",
        ),
    ],
)
def test_a_wrong_description_is_one_line(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        one_device(**changes)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"stage": [0], "resource": [2], "duration_s": [1.0]},
        {"stage": [0], "resource": [0], "duration_s": [0.0]},
        {"stage": [0, 0], "resource": [0], "duration_s": [1.0]},
        {"stage": [0.5], "resource": [0], "duration_s": [1.0]},
    ],
)
def test_a_wrong_chain_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        UnitChain(**given)


def test_stages_fall_in_a_backward() -> None:
    busy = (([], []), ([], []))
    rising = chain((0, 0, 1.0), (1, 0, 1.0))
    with pytest.raises(SpecError, match="falling"):
        one_device(busy_s=busy, stage_device=np.array([[0, 1]]), backward=rising)


def test_answers_of_another_shape_are_refused() -> None:
    with pytest.raises(SpecError, match="answer"):
        evaluate(one_device(), answer([0], [[0.0, 1.0]], [[9.0]]))
    with pytest.raises(SpecError, match="pipelines"):
        evaluate(one_device(), answer([1], [[0.0]], [[9.0]]))
    with pytest.raises(SpecError, match="rows"):
        answer([0, 0], [[0.0]], [[9.0]])


def test_arrays_are_read_only() -> None:
    problem = one_device()
    with pytest.raises(ValueError, match="read-only"):
        problem.deadline_s[0] = 0.0
    with pytest.raises(ValueError, match="read-only"):
        problem.busy_s[0][0][0, 0] = 0.0


fixed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@fixed
@given(seed=st.integers(0, 10**6), slowed=st.booleans())
def test_time_can_be_reversed(seed: int, slowed: bool, make_gaps: Make) -> None:
    """Twice is once; an answer keeps its total, the bounds theirs."""
    problem = make_gaps(seed, slowed=slowed)
    turned = reversed_problem(problem)
    back = reversed_problem(turned)
    np.testing.assert_allclose(back.deadline_s, problem.deadline_s)
    np.testing.assert_array_equal(back.forward.stage, problem.forward.stage)
    found = solve(problem).value
    assert found is not None
    mirrored = evaluate(turned, reversed_answer(problem, found))
    score = evaluate(problem, found)
    assert mirrored.total_s == pytest.approx(score.total_s, rel=1e-7)
    assert mirrored.head_s == pytest.approx(score.tail_s, abs=1e-6)
    assert lower_bounds(turned).best_s == pytest.approx(lower_bounds(problem).best_s, rel=1e-7)


def test_a_cap_that_cannot_matter_is_none() -> None:
    assert one_device(max_live_jobs=1).live_cap is None
    two = one_device(deadline_s=[1.0, 2.0], release_s=[9.0, 9.0], max_live_jobs=1)
    assert two.live_cap == 1
    assert replace(two, forward=UnitChain.empty()).live_cap is None
