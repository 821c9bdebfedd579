"""Compiled loops of the simulator; times in seconds, indices into flat arrays.

Two loops: without shared resources and contention a schedule is a DAG and one pass in topological
order times it; with them, events are popped from a binary heap and running actions slow each other
down.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled


@compiled
def successors(source: Any, target: Any, count: int) -> Any:
    """Edges in compressed rows by source: (start[count + 1], target)."""
    start = np.zeros(count + 1, dtype=np.int64)
    for s in source:
        start[s + 1] += 1
    for i in range(count):
        start[i + 1] += start[i]
    cursor = start[:-1].copy()
    out = np.empty(len(target), dtype=np.int64)
    for e in range(len(source)):
        s = source[e]
        out[cursor[s]] = target[e]
        cursor[s] += 1
    return start, out


@compiled
def queue_edges(key: Any, owner: Any, keys: int) -> Any:
    """For entries (key, owner) in list order: an edge from each owner to the next of its key."""
    last = np.full(keys, -1, dtype=np.int64)
    source = np.empty(len(key), dtype=np.int64)
    target = np.empty(len(key), dtype=np.int64)
    edges = 0
    for i in range(len(key)):
        before = last[key[i]]
        if before >= 0:
            source[edges] = before
            target[edges] = owner[i]
            edges += 1
        last[key[i]] = owner[i]
    return source[:edges], target[:edges]


@compiled
def run_dag(duration: Any, edge_start: Any, edge_target: Any, indegree: Any) -> Any:
    """Times of a DAG: (start, end, binding predecessor, number of actions that ran)."""
    count = len(duration)
    start = np.zeros(count)
    end = np.zeros(count)
    binding = np.full(count, -1, dtype=np.int64)
    stack = np.empty(count, dtype=np.int64)
    top = 0
    for i in range(count):
        if indegree[i] == 0:
            stack[top] = i
            top += 1
    ran = 0
    while top:
        top -= 1
        unit = stack[top]
        ran += 1
        finish = start[unit] + duration[unit]
        end[unit] = finish
        for e in range(edge_start[unit], edge_start[unit + 1]):
            nxt = edge_target[e]
            if binding[nxt] < 0 or finish > start[nxt]:
                start[nxt] = finish
                binding[nxt] = unit
            indegree[nxt] -= 1
            if indegree[nxt] == 0:
                stack[top] = nxt
                top += 1
    return start, end, binding, ran


@compiled
def dag_order(edge_start: Any, edge_target: Any, indegree: Any) -> Any:
    """Units of a DAG, each after what it waits for; those in a circle are left out."""
    left = indegree.copy()
    order = np.empty(len(left), dtype=np.int64)
    count = 0
    for i in range(len(left)):
        if left[i] == 0:
            order[count] = i
            count += 1
    done = 0
    while done < count:
        unit = order[done]
        done += 1
        for e in range(edge_start[unit], edge_start[unit + 1]):
            nxt = edge_target[e]
            left[nxt] -= 1
            if left[nxt] == 0:
                order[count] = nxt
                count += 1
    return order[:count]


@compiled
def dag_end(duration: Any, edge_start: Any, edge_target: Any, order: Any) -> float:
    """When the last unit of a DAG ends, with its `dag_order`; `run_dag` finds the same."""
    start = np.zeros(len(duration))
    last = 0.0
    for unit in order:
        finish = start[unit] + duration[unit]
        last = max(last, finish)
        for e in range(edge_start[unit], edge_start[unit + 1]):
            nxt = edge_target[e]
            start[nxt] = max(start[nxt], finish)
    return last


@compiled
def _push(times: Any, units: Any, size: int, time: float, unit: int) -> int:
    i = size
    while i > 0:
        parent = (i - 1) // 2
        # Ties are served by index, so that equal schedules give equal timelines.
        if times[parent] < time or (times[parent] == time and units[parent] <= unit):
            break
        times[i], units[i] = times[parent], units[parent]
        i = parent
    times[i], units[i] = time, unit
    return size + 1


@compiled
def _pop(times: Any, units: Any, size: int) -> int:
    size -= 1
    time, unit = times[size], units[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child]
            or (times[right] == times[child] and units[right] < units[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and unit <= units[child]):
            break
        times[i], units[i] = times[child], units[child]
        i = child
    times[i], units[i] = time, unit
    return size


@compiled
def run_events(
    duration: Any,
    edge_start: Any,
    edge_target: Any,
    indegree: Any,
    shared: Any,
    capacity: Any,
    domain: Any,
    pressure: Any,
    weight: Any,
    slowdown: Any,
    domains: int,
) -> Any:
    """Times with shared queues and contention: (start, end, binding predecessor, number that ran).

    ``shared[u]`` is a queue of ``capacity`` places or -1. Running units of one ``domain`` (a host)
    slow each other down: a unit takes ``1 + pressure * (f - 1)`` times as long while ``f`` is
    ``slowdown`` at one plus the pressure of the others, linear between its entries. ``weight`` is
    the pressure of all that a unit stands for, its own included.
    """
    count = len(duration)
    start, end = np.zeros(count), np.zeros(count)
    binding = np.full(count, -1, dtype=np.int64)
    remaining, rate = duration.copy(), np.ones(count)
    due = np.full(count, -1.0)
    # A unit whose rate changes is pushed again and its old entry skipped, so the heap may grow.
    heap_time = np.empty(2 * count + 16)
    heap_unit = np.empty(2 * count + 16, dtype=np.int64)
    size = 0
    waiting_head = np.full(len(capacity), -1, dtype=np.int64)
    waiting_tail = np.full(len(capacity), -1, dtype=np.int64)
    waiting_next = np.full(count, -1, dtype=np.int64)
    free = capacity.copy()
    # Running units of a domain form a doubly linked list.
    head = np.full(domains, -1, dtype=np.int64)
    after = np.full(count, -1, dtype=np.int64)
    before = np.full(count, -1, dtype=np.int64)
    load, settled = np.zeros(domains), np.zeros(domains)
    ready = np.empty(count, dtype=np.int64)
    ready_count = 0
    for i in range(count):
        if indegree[i] == 0:
            ready[ready_count] = i
            ready_count += 1
    now, ran, done = 0.0, 0, -1
    while True:
        changed = -1
        # 1. What has ended: frees its queue and its domain, and makes successors ready.
        if done >= 0:
            end[done] = now
            ran += 1
            d = domain[done]
            if d >= 0 and pressure[done] > 0.0:
                _settle(d, now, head, after, rate, remaining, settled)
                if before[done] >= 0:
                    after[before[done]] = after[done]
                else:
                    head[d] = after[done]
                if after[done] >= 0:
                    before[after[done]] = before[done]
                load[d] = load[d] - weight[done] if head[d] >= 0 else 0.0
                changed = d
            q = shared[done]
            if q >= 0:
                free[q] += 1
                nxt = waiting_head[q]
                if nxt >= 0:
                    waiting_head[q] = waiting_next[nxt]
                    if waiting_head[q] < 0:
                        waiting_tail[q] = -1
                    binding[nxt] = done
                    free[q] -= 1
                    # It holds its place already: mark it as started from the queue.
                    shared_started = nxt
                else:
                    shared_started = -1
            else:
                shared_started = -1
            for e in range(edge_start[done], edge_start[done + 1]):
                nxt = edge_target[e]
                binding[nxt] = done
                indegree[nxt] -= 1
                if indegree[nxt] == 0:
                    ready[ready_count] = nxt
                    ready_count += 1
        else:
            shared_started = -1
        # 2. What can start now.
        i = 0
        while i < ready_count or shared_started >= 0:
            if shared_started >= 0:
                unit = shared_started
                shared_started = -1
            else:
                unit = ready[i]
                i += 1
                q = shared[unit]
                if q >= 0:
                    if free[q] == 0:
                        if waiting_tail[q] >= 0:
                            waiting_next[waiting_tail[q]] = unit
                        else:
                            waiting_head[q] = unit
                        waiting_tail[q] = unit
                        continue
                    free[q] -= 1
            start[unit] = now
            d = domain[unit]
            if d >= 0 and pressure[unit] > 0.0:
                _settle(d, now, head, after, rate, remaining, settled)
                before[unit], after[unit] = -1, head[d]
                if head[d] >= 0:
                    before[head[d]] = unit
                head[d] = unit
                load[d] += weight[unit]
                if changed >= 0 and changed != d:
                    size, heap_time, heap_unit = _rerate(
                        changed, now, head, after, load, pressure, slowdown, rate, remaining, due,
                        heap_time, heap_unit, size,
                    )  # fmt: skip
                changed = d
            else:
                due[unit] = now + duration[unit]
                if size >= len(heap_time):
                    heap_time = np.concatenate((heap_time, np.empty(len(heap_time))))
                    heap_unit = np.concatenate(
                        (heap_unit, np.empty(len(heap_unit), dtype=np.int64))
                    )
                size = _push(heap_time, heap_unit, size, due[unit], unit)
        ready_count = 0
        if changed >= 0:
            size, heap_time, heap_unit = _rerate(
                changed, now, head, after, load, pressure, slowdown, rate, remaining, due,
                heap_time, heap_unit, size,
            )  # fmt: skip
        # 3. The next end; entries whose unit was re-timed since are stale.
        done = -1
        while size > 0:
            time, unit = heap_time[0], heap_unit[0]
            size = _pop(heap_time, heap_unit, size)
            if due[unit] == time:
                due[unit] = -1.0
                now, done = time, unit
                break
        if done < 0:
            return start, end, binding, ran


@compiled
def _settle(
    d: int, now: float, head: Any, after: Any, rate: Any, remaining: Any, settled: Any
) -> None:
    """Take off what the running units of domain ``d`` have done since they were last settled."""
    u = head[d]
    while u >= 0:
        remaining[u] -= (now - settled[d]) * rate[u]
        u = after[u]
    settled[d] = now


@compiled
def _rerate(
    d: int, now: float, head: Any, after: Any, load: Any, pressure: Any, slowdown: Any,
    rate: Any, remaining: Any, due: Any, heap_time: Any, heap_unit: Any, size: int,
) -> Any:  # fmt: skip
    """Give every running unit of domain ``d`` its new speed and end.

    Only the first to end goes onto the heap: its end changes every other's.
    """
    u, first = head[d], -1
    while u >= 0:
        others = max(load[d] - pressure[u], 0.0)
        place = min(int(others), len(slowdown) - 2)
        f = slowdown[place] + (others - place) * (slowdown[place + 1] - slowdown[place])
        f = max(f, 1.0)  # beyond a last step downwards
        rate[u] = 1.0 / (1.0 + pressure[u] * (f - 1.0))
        due[u] = now + max(remaining[u], 0.0) / rate[u]
        if first < 0 or due[u] < due[first] or (due[u] == due[first] and u < first):
            first = u
        u = after[u]
    if first >= 0:
        if size >= len(heap_time):
            heap_time = np.concatenate((heap_time, np.empty(len(heap_time))))
            heap_unit = np.concatenate((heap_unit, np.empty(len(heap_unit), dtype=np.int64)))
        size = _push(heap_time, heap_unit, size, due[first], first)
    return size, heap_time, heap_unit
