from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.pipeline import given_costs, pipeline_schedule
from foreplan.cost_models.schedule import Memory
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import Contention, Simulator, simulate
from foreplan.cost_models.timeline import Exposure, Timeline, chrome_trace
from foreplan.errors import SpecError

mpl.use("Agg")
Draw = Callable[..., Any]


@pytest.fixture
def two_stages() -> Timeline:
    """Rank 0 computes 2 s, sends for 3; rank 1 computes 1 s, waits, computes 4; rank 2 rests."""
    builder = ScheduleBuilder(["a", "b", "c"])
    free = HostLaunch(0)
    builder.add("F", 0, free, stage=0, microbatch=0)
    builder.add("send", 0, free, dependencies=(0,), resources=())
    builder.add("E", 1, free)
    builder.add("recv", 1, free, dependencies=(1,), resources=())
    builder.add("F", 1, free, stage=1, microbatch=0, dependencies=(3,))
    return Simulator(builder.build()).run(np.asarray([2.0, 3.0, 1.0, 0.0, 4.0]))


def test_exposure_by_hand(two_stages: Timeline) -> None:
    assert two_stages.makespan_s == 9.0
    assert two_stages.exposure() == [
        Exposure(compute_s=2.0, communication_s=0.0, bubble_s=7.0),
        # Idle from 1 to 5; the transfer was under way from 2 to 5.
        Exposure(compute_s=5.0, communication_s=3.0, bubble_s=1.0),
        Exposure(compute_s=0.0, communication_s=0.0, bubble_s=9.0),
    ]
    assert two_stages.busy_s() == [2.0, 5.0, 0.0]
    assert two_stages.spans() == [(0.0, 2.0), (0.0, 9.0), (0.0, 0.0)]
    assert two_stages.total_s("F").tolist() == [2.0, 4.0, 0.0]
    assert two_stages.total_s("unknown").tolist() == [0.0, 0.0, 0.0]
    assert two_stages.critical_path() == [0, 1, 3, 4]


def test_exposure_of_a_pipeline_by_hand() -> None:
    """1F1B, two stages, three micro-batches, F = B + W = 2, transfer 1."""
    schedule = pipeline_schedule("1f1b", stages=2, microbatches=3)
    timeline = simulate(schedule, given_costs(2.0, 1.0, 1.0, 1.0))
    # Rank 0: F0 0-2, F1 2-4, B0 8-10, F2 10-12, B1 12-14, B2 18-20.
    # Rank 1: F0 3-5, B0 5-7, F1 7-9, B1 9-11, F2 13-15, B2 15-17.
    # The last second of every gap is a transfer: before B0 and B2 on rank 0, F0 and F2 on rank 1.
    assert timeline.exposure() == [Exposure(12.0, 2.0, 6.0), Exposure(12.0, 2.0, 6.0)]
    assert timeline.spans() == [(0.0, 20.0), (3.0, 17.0)]


@given(st.data())
def test_exposure_adds_up_to_the_makespan(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, shared=True, meetings=True, pressure=True)
    hosts = Contention((0,) * case.schedule.ranks, (1.0, 1.7))
    timeline = Simulator(case.schedule, contention=hosts).run(case.duration)
    for share in timeline.exposure():
        assert min(share.compute_s, share.communication_s, share.bubble_s) >= 0.0
        total = share.compute_s + share.communication_s + share.bubble_s
        assert total == pytest.approx(timeline.makespan_s)


@given(st.data())
def test_critical_path_has_no_gap(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, shared=True, meetings=True, pressure=True)
    hosts = Contention((0,) * case.schedule.ranks, (1.0, 1.7))
    timeline = Simulator(case.schedule, contention=hosts).run(case.duration)
    path = timeline.critical_path()
    if not path:
        assert len(case.schedule) == 0
        return
    assert timeline.start_s[path[0]] == 0.0
    assert timeline.end_s[path[-1]] == timeline.end_s.max()
    for before, after in itertools.pairwise(path):
        assert timeline.end_s[before] == timeline.start_s[after]


@given(st.data())
def test_trace_events_nest_in_every_thread(random_case: Draw, data: st.DataObject) -> None:
    case = random_case(data, shared=True, meetings=True)
    timeline = Simulator(case.schedule, capacities={"shared:a": 3}).run(case.duration)
    threads: dict[int, list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for event in timeline.trace_events(process=4):
        assert event["pid"] == 4
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "thread_name":
            named.add(event["tid"])
    assert set(threads) == named
    assert sum(map(len, threads.values())) == len(case.schedule)
    for spans in threads.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(ordered))


def test_overlapping_transfers_get_threads_of_their_own() -> None:
    builder = ScheduleBuilder(["cpu"])
    for _ in range(3):
        builder.add("send", 0, HostLaunch(0), resources=())
    timeline = Simulator(builder.build()).run(np.asarray([2.0, 1.0, 3.0]))
    events = timeline.trace_events()
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["rank 0 cpu delay", "rank 0 cpu delay 2", "rank 0 cpu delay 3"]


def test_chrome_trace_is_json_with_one_process_a_timeline(two_stages: Timeline) -> None:
    trace = json.loads(chrome_trace([("plan", two_stages), ("measured", two_stages)]))
    assert trace["displayTimeUnit"] == "ms"
    processes = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in processes] == [(0, "plan"), (1, "measured")]
    send = next(e for e in trace["traceEvents"] if e.get("cat") == "send")
    assert (send["ts"], send["dur"]) == (2e6, 3e6)


def memory_timeline(*rows: tuple[float, Memory | None]) -> Timeline:
    builder = ScheduleBuilder(["cpu"])
    for _, memory in rows:
        builder.add("F", 0, HostLaunch(0), memory=memory)
    return Simulator(builder.build()).run(np.asarray([seconds for seconds, _ in rows]))


def test_peak_memory_by_hand() -> None:
    timeline = memory_timeline(
        (1.0, Memory("weights", 100)),
        (1.0, Memory("activations", 10)),
        (1.0, None),
        (1.0, Memory("activations", 5, 15)),  # 115 while it runs
        (1.0, Memory("weights", 8, 0)),  # 108: what ended before has freed
    )
    assert timeline.peak_memory() == [{"weights": 100, "activations": 15}]


def test_what_ends_frees_before_the_next_starts() -> None:
    timeline = memory_timeline((1.0, Memory("x", 7, 7)), (1.0, Memory("x", 7, 7)))
    assert timeline.peak_memory() == [{"x": 7}]


def test_actions_without_duration_hold_memory_in_list_order() -> None:
    once = memory_timeline((0.0, Memory("x", 7, 7)), (0.0, Memory("x", 7, 7)))
    assert once.peak_memory() == [{"x": 7}]
    kept = memory_timeline((0.0, Memory("x", 7)), (0.0, Memory("x", 3)), (0.0, Memory("x", 0, 10)))
    assert kept.peak_memory() == [{"x": 10}]


def test_ranks_without_memory() -> None:
    builder = ScheduleBuilder(["cpu", "cpu"])
    builder.add("F", 1, HostLaunch(0), memory=Memory("x", 3))
    assert Simulator(builder.build()).run(np.ones(1)).peak_memory() == [{}, {"x": 3}]


def test_views_for_people(two_stages: Timeline) -> None:
    frame = two_stages.to_frame()
    assert list(frame.columns) == [
        "rank", "device", "label", "op", "stage", "microbatch", "step", "start_s", "end_s",
    ]  # fmt: skip
    assert frame.label.tolist() == ["0F0", "send", "E", "recv", "1F0"]
    assert frame.device.tolist() == ["a", "a", "b", "b", "b"]
    assert repr(two_stages) == "<Timeline: simulated, 9 s, 5 actions on 3 ranks>"
    html = two_stages._repr_html_()
    assert html.count("<tr>") == 4
    assert "9000 ms" in html
    axes = two_stages.plot()
    assert axes.get_title(loc="left") == "simulated: 9 s"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["F", "E"]
    mpl.pyplot.close("all")


def test_timelines_of_nothing() -> None:
    timeline = Simulator(ScheduleBuilder(["cpu"]).build()).run(np.zeros(0))
    assert timeline.exposure() == [Exposure(0.0, 0.0, 0.0)]
    assert timeline.peak_memory() == [{}]
    assert timeline.spans() == [(0.0, 0.0)]
    assert timeline.to_frame().empty


def test_a_measured_timeline_reads_alike(two_stages: Timeline) -> None:
    """Measured runs have no binding action: their waits are bubbles."""
    measured = Timeline(
        two_stages.schedule, two_stages.start_s + 5.0, two_stages.end_s + 5.0,
        np.full(5, -1), kind="measured",
    )  # fmt: skip
    assert measured.makespan_s == 9.0
    assert measured.exposure()[1] == Exposure(5.0, 0.0, 4.0)
    assert measured.critical_path() == [4]
    with pytest.raises(SpecError):
        Simulator(two_stages.schedule).run(-measured.start_s)
