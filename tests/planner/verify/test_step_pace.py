"""A step's pace from the ranks', on timelines made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import CostBook, HostLaunch, Segment
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import simulate
from foreplan.cost_models.timeline import Timeline
from foreplan.planner.verify.step_pace import step_pace

PACE = st.floats(0.2, 5.0)


def chain(first_s: float, second_s: float) -> Timeline:
    """Rank 0 computes, then rank 1; rank 2 computes a little beside them."""
    works = {Segment("a"): first_s, Segment("b"): second_s, Segment("c"): 0.001, HostLaunch(0): 0.0}
    build = ScheduleBuilder(["x", "y", "z"])
    done = build.add("F", 0, Segment("a"))
    build.add("F", 1, Segment("b"), dependencies=(done,))
    build.add("F", 2, Segment("c"))
    return simulate(build.build(), CostBook((), given=works))


@given(PACE)
def test_equal_paces_are_the_steps(pace: float) -> None:
    assert step_pace(chain(1.0, 3.0), [pace] * 3) == pytest.approx(pace)


@given(PACE, PACE, PACE)
def test_it_lies_between_the_ranks(a: float, b: float, c: float) -> None:
    assert min(a, b, c) * 0.999 <= step_pace(chain(1.0, 3.0), [a, b, c]) <= max(a, b, c) * 1.001


@given(PACE, PACE, st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_chain_of_slowed_ranks_is_told_exactly(a: float, b: float, x: float, y: float) -> None:
    """What would have taken x + y took a x + b y."""
    assert step_pace(chain(a * x, b * y), [a, b, 1.0]) == pytest.approx((a * x + b * y) / (x + y))


def test_a_rank_that_nobody_waits_for_does_not_count() -> None:
    assert step_pace(chain(1.0, 1.0), [1.0, 1.0, 9.0]) == 1.0


def test_where_nothing_computes_all_ranks_count() -> None:
    build = ScheduleBuilder(["x", "y"])
    build.add("send", 0, Segment("hop"), resources=("wire",), peer=1)
    schedule = build.build()
    idle = Timeline(schedule, np.zeros(1), np.ones(1), np.full(1, -1), "measured")
    assert step_pace(idle, [1.0, 1.0]) == 1.0
