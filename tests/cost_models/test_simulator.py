"""The simulator against an independent fixed point, laws that any schedule keeps, and hand work."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import CostBook, HostLaunch, Segment
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import Contention, Simulator, durations, simulate
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner.bubbles.widen import widen

FREE = HostLaunch(0)
Draw = Callable[..., Any]


def queues(schedule: Schedule) -> dict[tuple[int, str], list[int]]:
    """Actions of each queue of a rank, in list order."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, action in enumerate(schedule):
        for resource in action.resources:
            if not resource.startswith("shared:"):
                found[action.rank, resource].append(i)
    return found


def fixed_point(schedule: Schedule, duration: Any) -> list[float]:
    """Starts without shared queues: raise each start to what it waits for until nothing moves."""
    before: list[set[int]] = [set(a.dependencies) for a in schedule]
    for members in queues(schedule).values():
        for first, second in itertools.pairwise(members):
            before[second].add(first)
    meeting: dict[int, list[int]] = defaultdict(list)
    for i, a in enumerate(schedule):
        meeting[a.rendezvous if a.rendezvous >= 0 else -1 - i].append(i)
    length = [0.0] * len(schedule)
    for members in meeting.values():
        for m in members:
            length[m] = max(float(duration[other]) for other in members)
    start = [0.0] * len(schedule)
    while True:
        old = list(start)
        for members in meeting.values():
            ends = [start[b] + length[b] for m in members for b in before[m]]
            for m in members:
                start[m] = max(ends, default=0.0)
        if start == old:
            return start


def assert_lawful(timeline: Timeline, duration: Any, *, slowed: bool = False) -> None:
    """Dependencies, queues, conservation and lower bounds of any run."""
    schedule, start, end = timeline.schedule, timeline.start_s, timeline.end_s
    length = end - start
    alone = schedule.rendezvous < 0
    if slowed:
        assert (length[alone] >= duration[alone] - 1e-9).all()
    else:
        assert length[alone] == pytest.approx(duration[alone])
    assert (start >= 0).all()
    for i, action in enumerate(schedule):
        assert all(end[d] <= start[i] + 1e-9 for d in action.dependencies)
    for members in queues(schedule).values():
        assert all(end[a] <= start[b] + 1e-9 for a, b in itertools.pairwise(members))
        assert timeline.makespan_s >= sum(duration[m] for m in members) - 1e-9
    for number in set(schedule.rendezvous[~alone].tolist()):
        together = schedule.rendezvous == number
        assert len(set(start[together])) == 1
        assert (length[together] >= duration[together].max() - 1e-9).all()


@given(st.data())
def test_equals_the_fixed_point(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, meetings=True)
    simulator = Simulator(case.schedule)
    timeline = simulator.run(case.duration)
    assert_lawful(timeline, case.duration)
    assert simulator.makespan_s(case.duration) == timeline.makespan_s
    assert timeline.start_s.tolist() == fixed_point(case.schedule, case.duration)


@given(st.data())
def test_events_equal_the_dag_when_nothing_is_shared(
    random_case: Draw, data: st.DataObject
) -> None:
    case = random_case(data, meetings=True, pressure=True)
    plain = Simulator(case.schedule).run(case.duration)
    hosts = Contention((0,) * case.schedule.ranks, (1.0, 1.0))
    events = Simulator(case.schedule, contention=hosts).run(case.duration)
    assert plain.start_s.tolist() == events.start_s.tolist()
    assert plain.end_s.tolist() == events.end_s.tolist()


@given(st.data())
def test_shared_queues_and_contention_keep_the_laws(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, shared=True, meetings=True, pressure=True)
    capacity = data.draw(st.integers(1, 3))
    hosts = Contention((0, 1, 0, 1)[: case.schedule.ranks], (1.0, 1.5, 2.5))
    simulator = Simulator(case.schedule, contention=hosts, capacities={"shared:a": capacity})
    timeline = simulator.run(case.duration)
    assert_lawful(timeline, case.duration, slowed=True)
    assert simulator.makespan_s(case.duration) == timeline.makespan_s
    for name, places in (("shared:a", capacity), ("shared:b", 1)):
        users = [i for i, a in enumerate(case.schedule) if name in a.resources]
        for i in users:
            at = timeline.start_s[i]
            inside = [u for u in users if timeline.start_s[u] <= at < timeline.end_s[u]]
            assert len(inside) <= places


@given(st.data())
def test_interleaving_between_ranks_does_not_matter(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, shared=True, meetings=True, pressure=True)
    lists = [case.schedule.of_rank(r) for r in range(case.schedule.ranks)]
    turns = data.draw(st.permutations(case.schedule.rank.tolist()))
    other = case.interleaved([lists[rank].pop(0) for rank in turns])
    hosts = Contention((0,) * case.schedule.ranks, (1.0, 2.0))
    for contention in (None, hosts):
        runs = [Simulator(c.schedule, contention=contention).run(c.duration) for c in (case, other)]
        for rank in range(case.schedule.ranks):
            one, two = (t.end_s[t.schedule.rank == rank].tolist() for t in runs)
            assert one == pytest.approx(two)


def build(*rows: tuple[int, float, dict[str, Any]], ranks: int = 2) -> tuple[Schedule, Any]:
    """A schedule from (rank, seconds, fields of the action)."""
    builder = ScheduleBuilder([f"cpu{r}" for r in range(ranks)])
    for rank, _, fields in rows:
        builder.add(fields.pop("op", "F"), rank, FREE, **fields)
    return builder.build(), np.asarray([seconds for _, seconds, _ in rows])


def times(timeline: Timeline) -> list[tuple[float, float]]:
    pairs = zip(timeline.start_s.tolist(), timeline.end_s.tolist(), strict=True)
    return [(round(start, 9), round(end, 9)) for start, end in pairs]


def test_resources_of_a_rank_are_queues_and_others_overlap() -> None:
    schedule, duration = build(
        (0, 2.0, {}),
        (0, 5.0, {"resources": ("send:1",)}),
        (0, 1.0, {}),
        (0, 1.0, {"resources": ("compute", "send:1")}),
        (0, 9.0, {"resources": ()}),
        (1, 1.0, {"dependencies": (2,)}),
    )
    timeline = Simulator(schedule).run(duration)
    assert times(timeline) == [(0, 2), (0, 5), (2, 3), (5, 6), (0, 9), (3, 4)]
    assert timeline.makespan_s == 9.0


def test_shared_queue_serves_in_order_of_readiness() -> None:
    link = {"resources": ("shared:link",)}
    schedule, duration = build(
        (0, 3.0, {}),
        (0, 4.0, {**link, "dependencies": (0,)}),  # ready at 3
        (1, 1.0, {}),
        (1, 4.0, {**link, "dependencies": (2,)}),  # ready at 1
        (2, 2.0, {}),
        (2, 4.0, {**link, "dependencies": (4,)}),  # ready at 2
        ranks=3,
    )
    one = Simulator(schedule).run(duration)
    assert [times(one)[i] for i in (3, 5, 1)] == [(1, 5), (5, 9), (9, 13)]
    assert [int(one.binding[i]) for i in (3, 5, 1)] == [2, 3, 5]
    two = Simulator(schedule, capacities={"shared:link": 2}).run(duration)
    assert [times(two)[i] for i in (3, 5, 1)] == [(1, 5), (2, 6), (5, 9)]


def test_shared_queue_ties_go_to_the_lower_rank_however_the_lists_were_added() -> None:
    link = {"resources": ("shared:link",)}
    schedule, duration = build((1, 1.0, dict(link)), (0, 1.0, dict(link)))
    assert times(Simulator(schedule).run(duration)) == [(1, 2), (0, 1)]


@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
def test_two_memory_bound_ranks_slow_each_other(factor: float) -> None:
    schedule, duration = build((0, 2.0, {"pressure": 1.0}), (1, 2.0, {"pressure": 1.0}))
    hosts = Contention((0, 0), (1.0, factor))
    assert times(Simulator(schedule, contention=hosts).run(duration)) == [(0, 2 * factor)] * 2
    apart = Contention((0, 1), (1.0, factor))
    assert times(Simulator(schedule, contention=apart).run(duration)) == [(0, 2)] * 2


def test_partial_overlap_is_slowed_only_while_it_lasts() -> None:
    schedule, duration = build(
        (0, 4.0, {"pressure": 1.0}),
        (1, 2.0, {"resources": ()}),
        (1, 1.0, {"pressure": 1.0, "dependencies": (1,)}),
    )
    timeline = Simulator(schedule, contention=Contention((0, 0), (1.0, 1.5))).run(duration)
    # Rank 1 works from 2 to 3.5; rank 0 has done 2 + 1 by then and ends 1 s later.
    assert times(timeline) == [(0, 4.5), (0, 2), (2, 3.5)]


def test_partial_pressure_by_hand() -> None:
    schedule, duration = build((0, 8.0, {"pressure": 0.5}), (1, 100.0, {"pressure": 1.0}))
    timeline = Simulator(schedule, contention=Contention((0, 0), (1.0, 3.0))).run(duration)
    # Rank 0 sees one other: half its time at 3x = 2x in all. Rank 1 sees half a one: 2x.
    assert times(timeline) == [(0, 16), (0, 16 + 100 - 8)]


@given(st.data())
def test_a_rank_that_stands_for_lanes_is_slowed_as_all_of_them(
    random_case: Draw, data: st.DataObject
) -> None:
    case, lanes = random_case(data, pressure=True), data.draw(st.integers(2, 4))
    ranks, factors = case.schedule.ranks, (1.0, 1.5, 2.5)
    narrow = Contention((0,) * ranks, factors, (lanes,) * ranks)
    one = Simulator(case.schedule, contention=narrow).run(case.duration)
    wide = widen(case.schedule, case.schedule.devices * lanes, lanes)
    every = Contention((0,) * (ranks * lanes), factors)
    several = Simulator(wide, contention=every).run(np.tile(case.duration, lanes))
    assert several.end_s.reshape(lanes, -1) == pytest.approx(np.tile(one.end_s, (lanes, 1)))
    assert one.makespan_s >= Simulator(case.schedule).run(case.duration).makespan_s


def test_slowdown_beyond_its_entries_is_linear_and_never_below_one() -> None:
    rows: list[tuple[int, float, dict[str, Any]]] = [(r, 1.0, {"pressure": 1.0}) for r in range(4)]
    schedule, duration = build(*rows, ranks=4)
    up = Simulator(schedule, contention=Contention((0,) * 4, (1.0, 1.5))).run(duration)
    assert up.end_s.tolist() == pytest.approx([2.5] * 4)
    down = Simulator(schedule, contention=Contention((0,) * 4, (1.0, 2.0, 1.1))).run(duration)
    assert down.end_s.tolist() == pytest.approx([1.0] * 4)


def test_rendezvous_starts_together_and_takes_the_longest() -> None:
    schedule, duration = build(
        (0, 1.0, {}),
        (1, 5.0, {}),
        (0, 2.0, {"rendezvous": 7, "op": "all_reduce"}),
        (1, 3.0, {"rendezvous": 7, "op": "all_reduce"}),
        (0, 1.0, {}),
    )
    timeline = Simulator(schedule).run(duration)
    assert times(timeline) == [(0, 1), (0, 5), (5, 8), (5, 8), (8, 9)]
    assert timeline.binding.tolist()[2:4] == [1, 1]


def test_rendezvous_on_a_shared_queue_takes_one_place() -> None:
    fields = {"resources": ("compute", "shared:link")}
    schedule, duration = build(
        (0, 2.0, {**fields, "rendezvous": 0}),
        (1, 2.0, {**fields, "rendezvous": 0}),
        (2, 1.0, {**fields}),
        ranks=3,
    )
    assert times(Simulator(schedule).run(duration)) == [(0, 2), (0, 2), (2, 3)]


def test_deadlock_names_ranks_and_what_they_wait_for() -> None:
    schedule, duration = build(
        (0, 1.0, {"op": "recv", "dependencies": (3,), "microbatch": 4}),
        (0, 1.0, {"op": "send", "microbatch": 4}),
        (1, 1.0, {"op": "recv", "dependencies": (1,), "microbatch": 4}),
        (1, 1.0, {"op": "send", "microbatch": 4}),
    )
    hosts = Contention((0, 0), (1.0, 2.0))
    for contention, ask in itertools.product((None, hosts), ("run", "makespan_s")):
        with pytest.raises(SpecError) as caught:
            getattr(Simulator(schedule, contention=contention), ask)(duration)
        assert "rank 0 at recv4 waits for send4 of rank 1" in str(caught.value)
        assert "rank 1 at recv4 waits for send4 of rank 0" in str(caught.value)


def test_deadlock_of_many_ranks_stays_one_line() -> None:
    rows: list[tuple[int, float, dict[str, Any]]] = [
        (r, 1.0, {"dependencies": ((r + 1) % 9,)}) for r in range(9)
    ]
    schedule, duration = build(*rows, ranks=9)
    with pytest.raises(SpecError, match=r"rank 3 at F waits for F of rank 4, 5 more ranks"):
        Simulator(schedule).run(duration)


def test_a_rank_that_skips_a_collective_is_no_deadlock_but_a_half_met_order_is() -> None:
    crossed, duration = build(
        (0, 1.0, {"rendezvous": 1}),
        (0, 1.0, {"rendezvous": 2}),
        (1, 1.0, {"rendezvous": 2}),
        (1, 1.0, {"rendezvous": 1}),
    )
    with pytest.raises(SpecError, match="a deadlock"):
        Simulator(crossed).run(duration)


def test_prices_come_from_a_book_or_a_table() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        builder.add("F", rank, Segment("F"))
    schedule = builder.build()

    class ByDevice:
        def estimate(self, work: Any, device: str) -> Any:
            from foreplan.cost_models.costs import Estimate

            return Estimate.exact({"a": 1.0, "b": 2.0}[device], "measured")

    assert durations(schedule, CostBook([ByDevice()])).tolist() == [1.0, 2.0]
    assert durations(schedule, {Segment("F"): 3.0}).tolist() == [3.0, 3.0]
    assert simulate(schedule, CostBook([ByDevice()])).makespan_s == 2.0
    for empty in ({}, CostBook([])):
        with pytest.raises(MissingDataError, match="no cost for"):
            simulate(schedule, empty)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_durations_must_be_times(seconds: float) -> None:
    schedule, _ = build((0, 0.0, {}), (1, 0.0, {"microbatch": 3}))
    with pytest.raises(SpecError, match="duration of F3 on rank 1"):
        Simulator(schedule).run(np.asarray([0.0, seconds]))
    with pytest.raises(SpecError, match="one for each of 2"):
        Simulator(schedule).run(np.zeros(3))


def test_empty_schedule() -> None:
    schedule = ScheduleBuilder(["cpu"]).build()
    for contention in (None, Contention((0,), (1.0, 2.0))):
        simulator = Simulator(schedule, contention=contention)
        timeline = simulator.run(np.zeros(0))
        assert timeline.makespan_s == simulator.makespan_s(np.zeros(0)) == 0.0
        assert timeline.critical_path() == []


def test_bad_contention_and_queues() -> None:
    schedule, _ = build((0, 1.0, {"resources": ("shared:a", "shared:b")}))
    with pytest.raises(SpecError, match="one shared queue an action"):
        Simulator(schedule)
    schedule, _ = build((0, 1.0, {"resources": ("shared:a",)}))
    with pytest.raises(SpecError, match="capacity of shared:a: got 0"):
        Simulator(schedule, capacities={"shared:a": 0})
    with pytest.raises(SpecError, match="one host for each of 2 ranks"):
        Simulator(schedule, contention=Contention((0,), (1.0, 1.0)))
    for slowdown in ((1.0,), (1.1, 1.2), (1.0, 0.5), (1.0, math.nan), (1.0, math.inf)):
        with pytest.raises(SpecError, match="slowdown"):
            Contention((0, 0), slowdown)
    with pytest.raises(SpecError, match="host"):
        Contention((0, -1), (1.0, 2.0))
    for processes in ((1,), (0, 1)):
        with pytest.raises(SpecError, match="processes"):
            Contention((0, 0), (1.0, 2.0), processes)
