from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreplan.cost_models.pipeline import (
    PipelineWorks,
    assemble,
    given_costs,
    pipeline_order,
    pipeline_schedule,
)
from foreplan.cost_models.simulator import simulate
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError
from foreplan.solvers._gap_filler import least_head, merged_map, place
from foreplan.solvers._gap_rows import Rows, reversed_problem
from foreplan.solvers.gap_fill import (
    GapFillBounds,
    GapFillProblem,
    UnitChain,
    evaluate,
    lower_bounds,
    solve,
)
from foreplan.solvers.gap_fill_check import violations
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., GapFillProblem]
fixed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 10**6)


def completions(problem: GapFillProblem, head: float) -> list[np.ndarray]:
    """When each job reaches the backbone, pipeline by pipeline, all slots on each."""
    rows, n = Rows.of(problem), problem.n_slots
    way, result = rows.forward, []
    for j in range(problem.n_pipelines):
        _, ends = place(rows.of_pipeline(j), way, j, np.full(n, -head), rows.tolerance)
        result.append(ends[:, -1] + way.edge[j] if len(way.row) else np.full(n, -np.inf))
    return result


@fixed
@given(seed=SEEDS, slowed=st.booleans(), capped=st.booleans())
def test_answers_obey_every_rule(seed: int, slowed: bool, capped: bool, make_gaps: Make) -> None:
    problem = make_gaps(seed, slowed=slowed, capped=capped)
    solution = solve(problem)
    if solution.value is None:
        assert problem.live_cap is not None
        assert solution.status in (SolutionStatus.LIMIT, SolutionStatus.INFEASIBLE)
        return
    assert violations(problem, solution.value) == ()
    assert evaluate(problem, solution.value).total_s == solution.objective
    assert solution.lower_bound <= solution.objective


@fixed
@given(seed=SEEDS, slowed=st.booleans())
def test_bounds_are_ordered(seed: int, slowed: bool, make_gaps: Make) -> None:
    """LB4 implies LB2 and LB3, all imply LB0; none passes an answer."""
    problem = make_gaps(seed, slowed=slowed)
    bounds, slack = lower_bounds(problem), 1e-6
    assert bounds.backbone_s == problem.backbone_s
    for field in fields(GapFillBounds):
        value = getattr(bounds, field.name)
        assert problem.backbone_s <= value <= solve(problem).objective + slack
    assert max(bounds.path_s, bounds.fluid_s) <= bounds.separate_s + slack


@fixed
@given(seed=SEEDS, head=st.floats(0.0, 30.0), slowed=st.booleans())
def test_merging_replaces_partitions(seed: int, head: float, slowed: bool, make_gaps: Make) -> None:
    """L2: the merge meets all deadlines exactly if some map does."""
    problem = make_gaps(seed, slowed=slowed)
    every, n = completions(problem, head), problem.n_slots
    feasible = False
    for pipeline in itertools.product(range(problem.n_pipelines), repeat=n):
        arrive = [every[j][pipeline[:i].count(j)] for i, j in enumerate(pipeline)]
        feasible |= bool((arrive <= problem.deadline_s + 1e-7).all())
    assert feasible == (merged_map(Rows.of(problem), head)[1] == n)


@fixed
@given(seed=SEEDS, head=st.floats(0.0, 30.0), more=st.floats(0.0, 30.0), slowed=st.booleans())
def test_a_longer_head_never_delays(
    seed: int, head: float, more: float, slowed: bool, make_gaps: Make
) -> None:
    """L3: what is feasible at a head is feasible at any longer one; bisection finds the edge."""
    problem = make_gaps(seed, slowed=slowed)
    for late, early in zip(
        completions(problem, head), completions(problem, head + more), strict=True
    ):
        assert (early <= late + 1e-7).all()
    rows = Rows.of(problem)
    low, high = least_head(rows)
    assert merged_map(rows, high)[1] == problem.n_slots
    assert low == high or merged_map(rows, low)[1] < problem.n_slots


@fixed
@given(seed=SEEDS, delay=st.floats(0.01, 5.0), pick=st.integers(0, 99), slowed=st.booleans())
def test_waiting_helps_nobody(
    seed: int, delay: float, pick: int, slowed: bool, make_gaps: Make
) -> None:
    """L1: holding back any one job delays it or leaves everything as it was."""
    problem = make_gaps(seed, slowed=slowed)
    rows, n, way = Rows.of(problem), problem.n_slots, Rows.of(problem).forward
    release = np.full(n, -5.0)
    results = []
    for wait in (0.0, delay):
        release[pick % n] += wait
        _, ends = place(rows.of_pipeline(0), way, 0, release, rows.tolerance)
        results.append(ends)
    assert (results[0] <= results[1] + 1e-7).all()


@fixed
@given(seed=SEEDS, factor=st.floats(1.0, 3.0))
def test_bounds_follow_the_instance(seed: int, factor: float, make_gaps: Make) -> None:
    """Longer units, longer lags, slower company and a busier backbone never lower the bound."""
    problem = make_gaps(seed)
    base = lower_bounds(problem).separate_s

    def longer(chain: UnitChain) -> UnitChain:
        return replace(chain, duration_s=chain.duration_s * factor)

    harder: list[dict[str, Any]] = [
        {"forward": longer(problem.forward)},
        {"backward": longer(problem.backward)},
        {"forward_lag_s": problem.forward_lag_s + factor},
        {"compute_slowdown": factor, "link_slowdown": factor},
        {"deadline_s": problem.deadline_s - factor},
        {"release_s": problem.release_s + factor},
    ]
    for changes in harder:
        assert lower_bounds(replace(problem, **changes)).separate_s >= base - 1e-6
    idle = ((np.empty((0, 2)), np.empty((0, 2))),) * problem.n_devices
    assert lower_bounds(replace(problem, busy_s=idle)).separate_s <= base + 1e-6


@fixed
@given(seed=SEEDS)
def test_seconds_are_arbitrary(seed: int, make_gaps: Make) -> None:
    """Milliseconds instead of seconds change nothing but the unit."""
    problem, scale = make_gaps(seed), 1e-3

    def scaled(chain: UnitChain) -> UnitChain:
        return replace(chain, duration_s=chain.duration_s * scale)

    small = replace(
        problem,
        backbone_s=problem.backbone_s * scale,
        busy_s=tuple((c * scale, k * scale) for c, k in problem.busy_s),
        forward=scaled(problem.forward),
        backward=scaled(problem.backward),
        deadline_s=problem.deadline_s * scale,
        release_s=problem.release_s * scale,
        forward_lag_s=problem.forward_lag_s * scale,
        backward_lag_s=problem.backward_lag_s * scale,
    )
    assert solve(small).objective == pytest.approx(solve(problem).objective * scale, rel=1e-6)


def test_the_same_problem_gives_the_same_answer(make_gaps: Make) -> None:
    first, second = (solve(make_gaps(11)).value for _ in range(2))
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first.pipeline, second.pipeline)
    np.testing.assert_array_equal(first.backward_start_s, second.backward_start_s)


def test_bad_limits_are_refused(make_gaps: Make) -> None:
    with pytest.raises(SpecError, match="gap"):
        solve(make_gaps(0), gap=-1.0)
    with pytest.raises(SpecError, match="max_evaluations"):
        solve(make_gaps(0), max_evaluations=0)


def test_the_bounds_by_hand() -> None:
    """One device, two jobs of 2 + 3, idle in [4, 5] and [6, 10] of a backbone of 10."""
    problem = GapFillProblem(
        backbone_s=10.0,
        busy_s=(([[0, 4], [5, 6]], []),),
        stage_device=np.array([[0]]),
        forward=UnitChain(stage=[0], resource=[0], duration_s=[2.0]),
        backward=UnitChain(stage=[0], resource=[0], duration_s=[3.0]),
        deadline_s=[0.0, 5.0],
        release_s=[6.0, 9.0],
    )
    bounds = lower_bounds(problem)
    # [4, 5] is too short for a unit: 4 + 1 + 1 busy or useless, 2 * (2 + 3) to do.
    assert bounds.work_s == pytest.approx(16.0)
    # The head holds one forward, the tail what is left of one backward.
    assert bounds.path_s == pytest.approx(2.0 + 10.0 + 2.0)
    # Work of two forwards before 5 has 1 s of gap; backwards after 6 have 4 s, after 9 one.
    assert bounds.fluid_s == pytest.approx(3.0 + 10.0 + 2.0)
    # Units do not fit [4, 5]: two forwards in the head.
    assert bounds.separate_s == pytest.approx(4.0 + 10.0 + 2.0)
    assert bounds.best_name == "work_s"
    assert bounds.gap(20.0) == pytest.approx(0.25)
    assert solve(problem).objective == pytest.approx(16.0)


def interleaved(
    p: int, v: int, n: int, *, transfer: float = 0.0, warmup: list[int] | None = None
) -> Timeline:
    """Chunks of one second forward and two backward."""
    order = pipeline_order("interleaved-1f1b", stages=p, microbatches=n, chunks=v, warmup=warmup)
    schedule = assemble(order, PipelineWorks.uniform(p, v))
    return simulate(schedule, given_costs(1.0, 1.0, 1.0, transfer))


def points(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """F_i and B_i: starts of the first chunk's forwards, ends of its backwards."""
    schedule = timeline.schedule
    first = timeline.is_compute & (schedule.stage == 0)
    forward = schedule.op == schedule.ops.index("F")
    return np.sort(timeline.start_s[first & forward]), np.sort(timeline.end_s[first & ~forward])


def busy(timeline: Timeline) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    schedule = timeline.schedule
    rows = []
    for rank in range(schedule.ranks):
        mine = timeline.is_compute & (schedule.rank == rank)
        spans = np.stack([timeline.start_s[mine], timeline.end_s[mine]], axis=1)
        rows.append((spans[np.argsort(spans[:, 0])], np.empty((0, 2))))
    return tuple(rows)


def test_dependency_points_of_both_warmups() -> None:
    """Optimus, figure 12, by exhaustive search in the project's notes (p = 4, v = 2, N = 8)."""
    forward, backward = points(interleaved(4, 2, 8))
    np.testing.assert_allclose(forward, [0, 1, 2, 3, 8, 9, 10, 16])
    np.testing.assert_allclose(backward, [29, 32, 34, 37, 51, 53, 55, 57])
    adjusted = interleaved(4, 2, 8, warmup=[7, 6, 5, 4])
    forward, backward = points(adjusted)
    np.testing.assert_allclose(forward, [0, 1, 2, 3, 16, 19, 22, 25])
    np.testing.assert_allclose(backward, [28, 31, 34, 37, 51, 53, 55, 57])
    assert adjusted.makespan_s == interleaved(4, 2, 8).makespan_s == 57.0


@pytest.mark.parametrize(
    ("p", "v", "n", "transfer", "rise"),
    [(4, 2, 8, 0.1, 0.027), (8, 12, 16, 0.1, 0.029), (8, 12, 16, 0.3, 0.083)],
)
def test_the_adjusted_warmup_costs_time_with_transfers(
    p: int, v: int, n: int, transfer: float, rise: float
) -> None:
    adjusted = [(p - 1 - r) + (v - 1) * p for r in range(p)]
    base = interleaved(p, v, n, transfer=transfer).makespan_s
    changed = interleaved(p, v, n, transfer=transfer, warmup=adjusted).makespan_s
    assert changed / base - 1 == pytest.approx(rise, abs=1e-3)


def test_whole_jobs_on_three_ranks() -> None:
    """Kimi K3 (arXiv 2607.24653), figure 11: who encodes what, up front and in opening bubbles."""
    timeline = simulate(
        pipeline_schedule("1f1b", stages=3, microbatches=6), given_costs(1.0, 1.0, 1.0, 0.0)
    )
    deadline, release = points(timeline)
    problem = GapFillProblem(
        backbone_s=timeline.makespan_s,
        busy_s=busy(timeline),
        stage_device=np.arange(3)[:, None],
        forward=UnitChain(stage=[0], resource=[0], duration_s=[1.0]),
        backward=UnitChain(stage=[0], resource=[0], duration_s=[2.0]),
        deadline_s=deadline,
        release_s=release,
    )
    for side, job in ((problem, 1.0), (reversed_problem(problem), 2.0)):
        rows = Rows.of(side)
        head = least_head(rows)[1]
        assert head == pytest.approx(job)
        pipeline, met = merged_map(rows, head)
        assert met == 6
        # Forwards: micro-batches 1; 2, 4; 3, 5, 6 on ranks 0; 1; 2. Backwards alone: as many a
        # rank, one of them after the step. (There they follow no map: activations are dropped.)
        np.testing.assert_array_equal(pipeline, [0, 1, 2, 1, 2, 2])
    solution = solve(problem)
    assert solution.status == SolutionStatus.OPTIMAL
    assert solution.objective == pytest.approx(problem.backbone_s + 3.0)
