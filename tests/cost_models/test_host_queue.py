"""Hosts: hand work, an independent fixed point, and laws that any host keeps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import CostBook, HostLaunch, Segment
from foreplan.cost_models.host_queue import HostedSimulator, simulator
from foreplan.cost_models.schedule import Schedule, ScheduleBuilder
from foreplan.cost_models.simulator import Simulator
from foreplan.errors import SpecError

FREE = HostLaunch(0)
Draw = Callable[..., Any]


def in_a_row(count: int) -> Schedule:
    """Actions of one rank."""
    builder = ScheduleBuilder(["cuda:0"])
    for _ in range(count):
        builder.add("F", 0, FREE)
    return builder.build()


def spans(schedule: Schedule, issue_s: list[float], duration: list[float]) -> list[tuple[Any, Any]]:
    """(start, end) of every action."""
    made = HostedSimulator(schedule, np.array(issue_s)).run(np.array(duration))
    assert made.schedule is schedule
    return list(zip(made.start_s.tolist(), made.end_s.tolist(), strict=True))


def test_the_slower_of_host_and_device_decides() -> None:
    row = in_a_row(3)
    # The host: each action lasts as long as its issue.
    assert spans(row, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0)]
    # The device, which begins with what has been issued of the first.
    assert spans(row, [1.0, 1.0, 1.0], [3.0, 3.0, 3.0]) == [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)]
    # The host is ahead by 8 s behind the first and loses it again: issued at 2, 7 and 12.
    assert spans(row, [2.0, 5.0, 5.0], [10.0, 1.0, 1.0]) == [
        (0.0, 10.0),
        (10.0, 11.0),
        (11.0, 12.0),
    ]
    assert spans(row, [2.0, 5.0, 6.0], [10.0, 1.0, 1.0])[-1] == (11.0, 13.0)


def test_a_host_runs_ahead_while_its_device_waits() -> None:
    builder = ScheduleBuilder(["cuda:0", "cuda:1"])
    sent = builder.add("F", 0, FREE)
    arrived = builder.add("recv", 1, FREE, dependencies=[sent], resources=())
    for k in range(3):
        builder.add("F", 1, FREE, dependencies=[arrived] if k == 0 else ())
    found = spans(builder.build(), [1.0, 0.0, 2.0, 2.0, 2.0], [5.0, 0.0, 1.0, 1.0, 1.0])
    # Rank 1 waits until 5; all is issued at 6, the second action at 4.
    assert found == [(0.0, 5.0), (5.0, 5.0), (5.0, 6.0), (6.0, 7.0), (7.0, 8.0)]


def test_a_collective_waits_for_the_slowest_host() -> None:
    builder = ScheduleBuilder(["cuda:0", "cuda:1"])
    for rank in (0, 1):
        builder.add("F", rank, FREE)
        builder.add("all_reduce", rank, FREE, resources=("dp",), rendezvous=0)
    found = spans(builder.build(), [1.0, 1.0, 4.0, 1.0], [1.0, 2.0, 1.0, 2.0])
    # It does not depend on F; rank 1 comes to issue it at 4.
    assert found == [(0.0, 1.0), (4.0, 6.0), (0.0, 4.0), (4.0, 6.0)]


@given(st.data())
def test_without_host_time_nothing_changes(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, shared=True, meetings=True)
    bare = Simulator(case.schedule).run(case.duration)
    hosted = HostedSimulator(case.schedule, np.zeros(len(case.schedule))).run(case.duration)
    assert hosted.start_s.tolist() == bare.start_s.tolist()
    assert hosted.end_s.tolist() == bare.end_s.tolist()
    assert hosted.binding.tolist() == bare.binding.tolist()
    assert hosted.peak_memory() == bare.peak_memory()


@given(st.data())
def test_equals_the_fixed_point_and_keeps_both_bounds(
    random_case: Draw, data: st.DataObject
) -> None:
    case = random_case(data, meetings=True)
    schedule, count = case.schedule, len(case.schedule)
    eighths = data.draw(st.lists(st.integers(0, 16), min_size=count, max_size=count))
    issue_s = np.array(eighths, dtype=np.float64) / 8
    made = HostedSimulator(schedule, issue_s).run(case.duration)
    start, end = fixed_point(schedule, case.duration, issue_s)
    assert made.start_s.tolist() == start
    assert made.end_s.tolist() == end
    if not count:
        return
    bare = Simulator(schedule).run(case.duration)
    assert (made.start_s >= bare.start_s).all()
    assert (made.end_s >= bare.end_s).all()
    hosts = np.bincount(schedule.rank, weights=issue_s, minlength=schedule.ranks)
    assert made.end_s.max() >= max(hosts.max(), bare.end_s.max())
    # Whoever let an action start had ended by then.
    released = made.binding >= 0
    assert (made.end_s[made.binding[released]] <= made.start_s[released]).all()


def fixed_point(schedule: Schedule, duration: Any, issue_s: Any) -> tuple[list[float], list[float]]:
    """Starts and ends: raise them to what they wait for until nothing moves."""
    before: list[set[int]] = [set(action.dependencies) for action in schedule]
    queues: dict[tuple[int, str], list[int]] = defaultdict(list)
    meeting: dict[int, list[int]] = defaultdict(list)
    begun, issued, clock = [0.0] * len(schedule), [0.0] * len(schedule), [0.0] * schedule.ranks
    for i, action in enumerate(schedule):
        for resource in action.resources:
            queues[action.rank, resource].append(i)
        meeting[action.rendezvous if action.rendezvous >= 0 else -1 - i].append(i)
        if issue_s[i] > 0.0:
            begun[i] = clock[action.rank]
            clock[action.rank] = issued[i] = begun[i] + float(issue_s[i])
    for members in queues.values():
        for first, second in itertools.pairwise(members):
            before[second].add(first)
    start, end = list(begun), list(issued)
    while True:
        old = list(start), list(end)
        for members in meeting.values():
            length = max(float(duration[m]) for m in members)
            ready = [end[b] for m in members for b in before[m]]
            met = max([begun[m] for m in members] + ready)
            for m in members:
                start[m], end[m] = met, max(met + length, issued[m])
        if (start, end) == old:
            return start, end


def test_a_book_knows_what_hosts_take() -> None:
    half, other = Segment("half"), Segment("other")
    layer, piece = Segment("F", ((half, 2), (other, 1))), Segment("piece", ((half, 1),))
    book = CostBook([], given={half: 1.0, other: 1.0}, issued={half: 0.5, piece: 0.75})
    assert (book.issue_s(layer), book.issue_s(piece), book.issue_s(other)) == (1.0, 0.75, 0.0)
    builder = ScheduleBuilder(["cuda:0"])
    for work in (piece, layer):
        builder.add("F", 0, work)
    schedule = builder.build()
    made = simulator(schedule, book).run(np.array([0.25, 0.25]))
    assert made.end_s.tolist() == [0.75, 1.75]
    assert type(simulator(schedule, CostBook([]))) is Simulator


def test_host_time_that_is_none_is_refused() -> None:
    row = in_a_row(2)
    with pytest.raises(SpecError, match="one for each of 2"):
        HostedSimulator(row, np.zeros(3))
    with pytest.raises(SpecError, match="times of at least 0"):
        HostedSimulator(row, np.array([0.0, -1.0]))
    with pytest.raises(SpecError, match="duration"):
        HostedSimulator(row, np.zeros(2)).run(np.zeros(3))
