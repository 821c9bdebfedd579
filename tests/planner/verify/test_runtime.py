from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from foreplan.cost_models.costs import HostLaunch, Segment
from foreplan.cost_models.pipeline import pipeline_schedule
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import simulate
from foreplan.errors import VerificationError
from foreplan.planner.verify.clock import HostClock
from foreplan.planner.verify.connections import ConnectionLost
from foreplan.planner.verify.measured import measured_timeline
from foreplan.planner.verify.rank_program import rank_programs
from foreplan.planner.verify.runtime import Record, Runtime

FREE = HostLaunch(0)


class Idle:
    """Kernels that do nothing, or fail at one action."""

    def __init__(self, fail: str = "", computes_nothing: frozenset[str] = frozenset()) -> None:
        self.fail, self.computes_nothing = fail, computes_nothing
        self.log: list[str] = []

    def reset(self) -> None: ...

    def run(self, action: Any) -> None:
        if self.fail and action.label == self.fail:
            raise ValueError("a bad kernel")

    def payload(self, action: Any) -> Any:
        return None

    def buffer(self, action: Any) -> Any:
        return None

    def result(self) -> dict[str, Any]:
        return {}

    def memory_bytes(self) -> dict[str, int]:
        return {}


class Loopback:
    """Channels whose transfers are done at once."""

    messages = "nothing"

    def __init__(self, clock: HostClock, *, lost: bool = False) -> None:
        self.clock, self.lost = clock, lost
        self.log: list[str] = []

    def prepare(self, sends: Any, buffers: Any, collectives: Any) -> None:
        self.log.clear()

    def post(self, place: int, step: Any, tensor: Any) -> None:
        self.clock.start(place)
        self.log.append(f"post {step.action.label}")

    def wait(self, place: int) -> None:
        if self.lost:
            raise ConnectionLost("peer closed")
        self.clock.end(place)
        self.log.append(f"wait {place}")


def runtime(schedule: Schedule, rank: int = 0, **options: Any) -> tuple[Runtime, Loopback]:
    program = rank_programs(schedule)[rank]
    clock = HostClock(len(program.steps))
    channels = Loopback(clock, lost=options.pop("lost", False))
    return Runtime(program, Idle(**options), channels, clock), channels


def test_a_run_collects_what_is_young_and_nothing_in_between() -> None:
    made, _ = runtime(pipeline_schedule("1f1b", stages=2, microbatches=2))
    seen: list[int] = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(look)
    try:
        made.execute(lambda: seen.append(-1))
    finally:
        gc.callbacks.remove(look)
    assert seen[-2:] == [1, -1]  # 2 is all that the process has; -1 is where the ranks meet
    assert gc.isenabled()


def test_waits_come_where_they_are_needed_and_at_the_end() -> None:
    made, channels = runtime(pipeline_schedule("1f1b", stages=2, microbatches=2))
    record = made.execute()
    assert channels.log == [
        "post 1send0", "post 0recv0", "post 1send1", "post 0recv1",
        "wait 1", "wait 2", "wait 4", "wait 5",
    ]  # fmt: skip
    assert len(record.start_ns) == 8
    assert all(e >= s > 0 for s, e in zip(record.start_ns, record.end_ns, strict=True))


def test_what_stands_for_time_alone_is_not_run() -> None:
    schedule = pipeline_schedule("1f1b", stages=1, microbatches=2)
    made, _ = runtime(schedule, fail="0F1", computes_nothing=frozenset({"F"}))
    record = made.execute()  # the kernel that would fail is not asked
    times = zip(record.start_ns, record.end_ns, schedule, strict=True)
    assert all(start == end for start, end, action in times if action.op == "F")


def test_failures_name_the_action_and_tell_peers_from_culprits() -> None:
    schedule = pipeline_schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(VerificationError, match="at 0F1: ValueError: a bad kernel"):
        runtime(schedule, fail="0F1")[0].execute()
    with pytest.raises(ConnectionLost):
        runtime(schedule, lost=True)[0].execute()


def test_a_run_says_where_it_stands() -> None:
    """Of a device that is behind its host: what it computes, and which messages are not over."""

    class Behind(HostClock):
        def ended(self, place: int) -> bool:
            return place not in (0, 2, 3)

    program = rank_programs(pipeline_schedule("1f1b", stages=2, microbatches=2))[0]
    steps = [(step.kind, step.action.label) for step in program.steps]
    assert steps[:4] == [("run", "0F0"), ("send", "1send0"), ("recv", "0recv0"), ("run", "0F1")]
    clock = Behind(len(program.steps))
    made = Runtime(program, Idle(fail="0BW1"), Loopback(clock), clock)
    with pytest.raises(VerificationError):
        made.execute()
    assert made.standing() == (
        "the host at step 8 of 8, 0BW1; the device at 0F0; not over: 0recv0 of ranks 1 0"
    )


def records_of(schedule: Schedule, late_ns: int) -> list[Record]:
    """What ranks would record of a simulated run: posted early, seen late."""
    prices = dict.fromkeys(schedule.works, 0.001) | {FREE: 0.0}
    timeline = simulate(schedule, prices)
    found = []
    for rank in range(schedule.ranks):
        mine = schedule.of_rank(rank)
        start = np.rint(timeline.start_s[mine] * 1e9).astype(int)
        end = np.rint(timeline.end_s[mine] * 1e9).astype(int)
        for k, i in enumerate(mine):
            if schedule[i].op == "recv":
                start[k] = 0  # posted at the very beginning
                end[k] += late_ns
        found.append(Record(tuple(start.tolist()), tuple(end.tolist())))
    return found


def assert_obeys(schedule: Schedule, start: Any, end: Any, slack: float = 1e-9) -> None:
    for i, action in enumerate(schedule):
        assert end[i] >= start[i] >= 0.0
        for needed in action.dependencies:
            assert start[i] >= end[needed] - slack, (action, schedule[needed])
    for rank in range(schedule.ranks):
        last: dict[str, int] = {}
        for i in schedule.of_rank(rank):
            for resource in schedule[i].resources:
                if resource in last:
                    assert start[i] >= end[last[resource]] - slack, (schedule[i], resource)
                last[resource] = i


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_records_become_a_timeline_in_the_schedules_terms(name: str) -> None:
    schedule = pipeline_schedule(name, stages=3, microbatches=5)
    timeline = measured_timeline(schedule, records_of(schedule, 0))
    assert timeline.kind == "measured"
    simulated = simulate(schedule, dict.fromkeys(schedule.works, 0.001) | {FREE: 0.0})
    np.testing.assert_allclose(timeline.start_s, simulated.start_s, atol=1e-8)
    np.testing.assert_allclose(timeline.end_s, simulated.end_s, atol=1e-8)
    assert timeline.makespan_s == pytest.approx(simulated.makespan_s)
    assert_obeys(schedule, timeline.start_s, timeline.end_s)


def test_clocks_of_hosts_are_brought_together() -> None:
    schedule = pipeline_schedule("gpipe", stages=2, microbatches=2)
    first, second = records_of(schedule, 0)
    shifted = Record(
        tuple(t + 10**9 for t in second.start_ns), tuple(t + 10**9 for t in second.end_ns)
    )
    here = measured_timeline(schedule, [first, second])
    there = measured_timeline(schedule, [first, shifted], [0, -(10**9)])
    np.testing.assert_allclose(there.start_s, here.start_s, atol=1e-9)


def test_a_collective_starts_when_the_last_member_does() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        done = builder.add("F", rank, Segment("F"))
        builder.add(
            "all_reduce", rank, Segment("ar"), dependencies=(done,), resources=("wire",),
            rendezvous=3,
        )  # fmt: skip
    schedule = builder.build()
    records = [Record((0, 10), (10, 500)), Record((0, 300), (300, 510))]
    timeline = measured_timeline(schedule, records)
    assert list(timeline.start_s * 1e9) == pytest.approx([0, 300, 0, 300])
    assert list(timeline.end_s * 1e9) == pytest.approx([10, 500, 300, 510])
    assert list(timeline.binding) == [-1, 0, -1, 2]


def test_the_root_of_a_broadcast_may_be_done_before_the_others_come() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        done = builder.add(
            "broadcast", rank, Segment("b"), peer=0, resources=("wire",), rendezvous=3
        )
        builder.add("end", rank, FREE, dependencies=(done,))
    schedule = builder.build()
    records = [Record((0, 50), (40, 50)), Record((300, 510), (500, 510))]
    timeline = measured_timeline(schedule, records)
    assert_obeys(schedule, timeline.start_s, timeline.end_s)
    assert list(timeline.start_s * 1e9) == pytest.approx([0, 50, 300, 510])
    assert list(timeline.end_s * 1e9) == pytest.approx([40, 50, 500, 510])


def test_a_queue_of_sends_is_drawn_as_a_queue() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for batch in range(3):
        sent = builder.add("send", 0, Segment("hop"), microbatch=batch, peer=1, resources=("link",))
        builder.add("recv", 1, FREE, microbatch=batch, peer=0, dependencies=(sent,), resources=())
    schedule = builder.build()
    # The receiver saw the first message last.
    records = [Record((0, 10, 20), (900, 900, 900)), Record((0, 0, 0), (800, 300, 500))]
    timeline = measured_timeline(schedule, records)
    assert_obeys(schedule, timeline.start_s, timeline.end_s)
    assert list(timeline.end_s[::2] * 1e9) == pytest.approx([300, 300, 500])


def test_a_copy_has_arrived_when_it_was_sent() -> None:
    """However late its receiver looked: its stream asked only before it needed the message."""
    builder = ScheduleBuilder(["a", "b"])
    sent = builder.add("send", 0, Segment("hop"), peer=1, resources=("link",))
    builder.add("recv", 1, FREE, peer=0, dependencies=(sent,), resources=())
    schedule = builder.build()
    records = [Record((0,), (40,)), Record((700,), (800,))]
    for by_copy, arrival_ns in ((False, 800), (True, 40)):
        timeline = measured_timeline(schedule, records, sent_by_copy=by_copy)
        assert_obeys(schedule, timeline.start_s, timeline.end_s)
        assert timeline.end_s[0] * 1e9 == pytest.approx(arrival_ns)
