"""What the page and Perfetto get: the right times, in any number, never overlapping on a track."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from foreplan.cost_models.costs import CostBook, Segment
from foreplan.cost_models.pipeline_step import simulate_pipeline
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import simulate
from foreplan.planner.report.gantt import busy_seconds, gantt_document
from foreplan.planner.report.trace import render_trace
from foreplan.planner.times import Times


def columns(lane):
    """Start, end and count of each block, in ticks."""
    count = len(lane["start"])

    def full(name):
        value = lane[name]
        return np.full(count, value) if isinstance(value, int) else np.asarray(value, dtype=int)

    start = np.cumsum(np.asarray(lane["start"], dtype=int))
    return start, start + full("length"), full("count")


def test_times_survive(measured):
    document = json.loads(json.dumps(gantt_document(measured)))
    s = measured.schedule
    assert not document["joined"]
    assert document["makespan"] * document["tick_s"] == pytest.approx(measured.makespan_s, rel=1e-6)
    for rank in range(s.ranks):
        lane = document["ranks"][rank][0]
        start, end, _ = columns(lane)
        mine = (s.rank == rank) & np.isin(s.op, [s.ops.index("prefill"), s.ops.index("decode")])
        begin = np.sort(measured.start_s[mine]) - measured.start_s.min()
        assert start * document["tick_s"] == pytest.approx(begin, abs=measured.makespan_s * 1e-6)
        assert (start[1:] >= end[:-1]).all()
        assert busy_seconds(document, rank) == pytest.approx(measured.busy_s()[rank], rel=1e-5)


def test_transfers_are_a_lane_of_their_own(timeline):
    document = gantt_document(timeline)
    s = timeline.schedule
    for rank in range(s.ranks):
        sends = (s.rank == rank) & (s.op == s.ops.index("send"))
        assert len(document["ranks"][rank][1]["start"]) == sends.sum()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("most", [1, 50, 400])
def test_too_many_actions_are_joined(schedule, most):
    timeline = simulate_pipeline(
        schedule, stages=4, microbatches=64, forward_s=1.0, backward_input_s=1.0,
        backward_weight_s=1.0, transfer_s=0.1,
    ).timeline  # fmt: skip
    whole = gantt_document(timeline)
    joined = gantt_document(timeline, most)
    assert joined["joined"]
    assert sum(len(lane["start"]) for rank in joined["ranks"] for lane in rank) <= max(most, 8)
    for before, after in zip(whole["ranks"], joined["ranks"], strict=True):
        for old, new in zip(before, after, strict=True):
            if not len(old["start"]):
                continue
            (start, end, count), (first, last, counts) = columns(old), columns(new)
            assert counts.sum() == count.sum()
            assert first.min() == start.min()
            assert last.max() == end.max()


def test_empty_and_instant_timelines():
    empty = ScheduleBuilder(("x",)).build()
    timeline = simulate(empty, CostBook(()))
    assert gantt_document(timeline)["makespan"] == 0
    assert json.loads(render_trace(timeline))["traceEvents"]
    builder = ScheduleBuilder(("x",))
    builder.add("F", 0, Segment("none"))
    instant = simulate(builder.build(), CostBook((), given={Segment("none"): 0.0}))
    assert gantt_document(instant)["ranks"][0][0]["start"] == [0]


def tracks(text):
    found = defaultdict(list)
    for event in json.loads(text)["traceEvents"]:
        if event["ph"] == "X":
            # As Perfetto reads it: microseconds times 1000, the rest cut off.
            start = int(event["ts"] * 1000.0)
            found[event["pid"], event["tid"]].append((start, start + int(event["dur"] * 1000.0)))
    return found


def check_nesting(text):
    for spans in tracks(text).values():
        stack = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


def test_trace_nests(timeline, measured):
    text = render_trace(timeline, measured)
    check_nesting(text)
    events = json.loads(text)["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"predicted", "measured"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert len(threads) == len(set(threads))
    assert sum("compute" in name for name in threads) == 3
    assert min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 1) < 1e-3


def test_trace_of_awkward_times_nests(timeline):
    rng = random.Random(0)
    ends, start = [], []
    clock = 1e-7
    for _ in range(len(timeline.schedule)):
        start.append(clock)
        clock += rng.random() * 10 ** rng.randint(-9, -2)
        ends.append(clock)
    awkward = replace(timeline, start_s=np.asarray(start), end_s=np.asarray(ends))
    check_nesting(render_trace(awkward))


def test_a_queue_stays_on_one_track_when_times_are_kept():
    """A plan keeps whole microseconds; neighbours of a queue must not overlap by one."""
    builder = ScheduleBuilder(("x",))
    works = [Segment(f"unit {i}") for i in range(200)]
    for work in works:
        builder.add("F", 0, work)
    seconds = {work: 498.449e-6 + i * 0.31e-6 for i, work in enumerate(works)}
    timeline = simulate(builder.build(), CostBook((), given=seconds))
    kept = Times.of(timeline)
    assert kept is not None
    again = kept.timeline(timeline.schedule, "simulated")
    assert len(tracks(render_trace(again))) == 1
    assert np.array_equal(again.end_s[:-1], again.start_s[1:])
    assert np.abs(again.end_s - timeline.end_s).max() <= 0.51e-6


def test_trace_leaves_out_what_is_missing(timeline):
    events = json.loads(render_trace(timeline, None))["traceEvents"]
    assert {e["pid"] for e in events} == {0}
    assert json.loads(render_trace(None))["traceEvents"] == []


def test_trace_has_every_action_and_plain_names(timeline):
    s = timeline.schedule
    evil = replace(s, ops=("\x1b[31m<b>", *s.ops[1:]))
    events = json.loads(render_trace(replace(timeline, schedule=evil)))["traceEvents"]
    actions = [e for e in events if e["ph"] == "X"]
    assert len(actions) == len(s)
    assert not any("\x1b" in e["name"] for e in actions)
