"""The policy of a replica: whatever the clock, every request is served once within the limits."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.planner.serving.batching import Batching, BatchLimits, padded
from foreplan.planner.serving.cache_rows import CacheRows, cache_rows
from foreplan.planner.serving.live_order import LiveOrder
from foreplan.planner.serving.traffic import Request

LIMITS = BatchLimits(slots=2, batch=5, share=3, prefill=2, cache_tokens=70)

requests_of = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=20
)


def served(requests: list[Request], limits: BatchLimits, seconds: st.DataObject | None = None):
    """Every pass, with slots that come back after drawn seconds; checks what is held meanwhile."""
    batching = Batching(requests, range(len(requests)), limits)
    back = [(0.0, slot) for slot in range(limits.slots)]
    now, passes, idle = 0.0, [], []
    running: dict[int, set[int]] = {slot: set() for slot in range(limits.slots)}
    while not batching.over:
        if back:
            now, slot = heapq.heappop(back)
            asked = [slot, *idle]
        else:  # nobody is away: somebody has to come
            assert batching.next_arrival_s is not None
            now, asked = max(now, batching.next_arrival_s), list(idle)
        idle = []
        for slot in asked:
            found = batching.next_pass(slot, now)
            if found is None:
                idle.append(slot)
                continue
            assert found.slot == slot
            assert all(requests[i].arrival_s <= now for i in found.members)
            running[slot] -= set(found.ended)
            if found.phase == "prefill":
                assert len(found.members) <= limits.prefill
                assert not running[slot] & set(found.members)
                running[slot] |= set(found.members)
            else:
                assert set(found.members) == running[slot]
            assert len(running[slot]) <= limits.share
            passes.append(found)
            took = 0.1 if seconds is None else seconds.draw(st.floats(0.001, 1))
            heapq.heappush(back, (now + took, slot))
    return batching, passes


@settings(max_examples=60, deadline=None)
@given(requests_of, st.data())
def test_every_request_is_served_once_within_the_limits(drawn, data):
    requests = [Request(t, p, n) for t, p, n in sorted(drawn)]
    batching, passes = served(requests, LIMITS, data)
    prefilled = [i for one in passes if one.phase == "prefill" for i in one.members]
    assert prefilled == sorted(prefilled) == list(range(len(requests)))  # first come, first served
    for index, request in enumerate(requests):
        lengths = [
            length
            for one in passes
            for i, length in zip(one.members, one.lengths, strict=True)
            if i == index
        ]
        # Prefill knows the prompt; each decode one token more.
        assert lengths == list(
            range(request.prompt_tokens, request.prompt_tokens + request.new_tokens)
        )
    assert batching.most_held <= LIMITS.batch
    assert 0 < batching.most_cached <= 1


def test_a_request_waits_until_caches_have_room_for_all_of_it():
    requests = [Request(0.0, 30, 10), Request(0.0, 25, 6)]  # 40 and 31 of 70 tokens
    _, passes = served(requests, LIMITS)
    first = next(k for k, one in enumerate(passes) if 1 in one.members)
    assert sum(0 in one.members for one in passes[:first]) == 10  # all of the first one's tokens
    roomy = replace(LIMITS, cache_tokens=71)
    _, passes = served(requests, roomy)
    assert passes[0].members == (0, 1)


@given(st.data(), st.booleans())
def test_rows_have_no_gaps_and_moves_bring_what_they_say(data, down):
    begin = 8 if down else 3
    rows, memory, known = CacheRows(begin, 6, down=down), dict.fromkeys(range(3, 9), -1), 0
    for _ in range(data.draw(st.integers(1, 8))):
        members = rows.members
        ended = data.draw(st.sets(st.sampled_from(members))) if members else set()
        for source, target, request in rows.drop(ended):
            memory[target] = memory[source]
            assert memory[target] == request
        assert set(rows.members) == set(members) - ended
        joining = data.draw(st.integers(0, 6 - len(rows.members)))
        if joining:
            first = rows.add(range(known, known + joining))
            for k in range(joining):
                memory[first + k] = known + k
            known += joining
        if rows.members:
            assert begin in (rows.first, rows.first + len(rows.members) - 1)
            found = [memory[rows.first + k] for k in range(len(rows.members))]
            assert found == list(rows.members)


@pytest.mark.parametrize("batch", [5, 6, 9])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slots_never_have_a_row_in_common(slots, batch):
    limits = BatchLimits(slots, batch, max(4, -(-batch // slots)), 2, 1000)
    count, rows = cache_rows(limits)
    held = 0
    for k, own in enumerate(rows):  # as many as ever
        joining = min(limits.share, batch - held)
        if joining:
            own.add(range(100 * k, 100 * k + joining))
            held += joining
    taken = [own.first + j for own in rows for j in range(len(own.members))]
    assert len(set(taken)) == len(taken) == held
    assert set(taken) <= set(range(count))


def test_an_order_is_read_as_it_was_written():
    for order in (
        LiveOrder("prefill", 3, 32, (20, 7), ((5, 3, 12),)),
        LiveOrder("decode", 0, 1, (9,)),
    ):
        told = order.write(4)
        assert told.dtype == torch.int64
        assert len(told) == LiveOrder.size(4)
        assert LiveOrder.read(told) == order
    assert LiveOrder.read(LiveOrder.stop(4)) is None
    assert LiveOrder("prefill", 0, 32, (20, 7)).rows == 64
    assert LiveOrder("decode", 0, 1, (20, 7)).rows == 2


def test_prompts_are_padded_to_buckets_within_what_is_planned():
    assert [padded(n, 80) for n in (1, 32, 33, 70, 100)] == [32, 32, 64, 80, 100]


def test_limits_leave_no_stage_idle():
    class Decided:
        stages, decode_microbatch, prefill_microbatch = (1, 2), 2, 1

    assert BatchLimits.of(Decided(), 8, 100) == BatchLimits(2, 8, 4, 1, 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_that_come_at_once_fill_every_slot(slots):
    limits = BatchLimits(slots, 6, 2, 2, 1000)
    batching, passes = served([Request(0.0, 4, 3)] * 12, limits)
    assert {one.slot for one in passes} == set(range(slots))
    assert batching.most_held == min(6, 2 * slots)
