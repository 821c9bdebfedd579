"""Leftmost placement of chains of units in free pieces of time (numba).

A *row* is one resource of one stage of one pipeline. Its free time is a list of *pieces* ``(start,
end, rate)`` by rising start, the first from ``-inf`` and the last to ``inf``. Pieces that touch
belong to one gap: they differ in rate because the backbone's other resource is busy in one of them.

Leftmost placement of a given order minimises the completion of every job at once (L1 of the
project's notes): units end later when they start later, so nothing is gained by waiting. Every
pointer only moves right, hence a pass takes time linear in pieces plus units.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled


@compiled
def place_unit(
    start: Any, end: Any, rate: Any, at: int, t: float, work: float, tolerance: float
) -> Any:
    """Earliest ``(start, end)`` from ``t`` on of a unit that needs ``work`` seconds at rate 1.

    ``at`` is a piece that ends after ``t`` or lies left of such a one; the third value returned is
    the piece in which the unit ends.
    """
    while end[at] <= t:
        at += 1
    while True:
        begin = max(t, start[at])
        now, left = begin, work
        while True:
            room = (end[at] - now) * rate[at]
            if room >= left - tolerance:
                return begin, min(now + left / rate[at], end[at]), at
            if start[at + 1] != end[at]:
                break
            left -= room
            at += 1
            now = start[at]
        at += 1


@compiled
def place_jobs(
    start: Any,
    end: Any,
    rate: Any,
    first_piece: Any,
    row: Any,
    work: Any,
    lag: Any,
    release: Any,
    hold: Any,
    tolerance: float,
    idle: Any,
    begins: Any,
    ends: Any,
) -> None:
    """Place jobs one after another, each leftmost in FIFO order.

    Args:
        start: ``[P]`` of the pieces.
        end: ``[P]``.
        rate: ``[P]`` work per second.
        first_piece: ``[R]`` index of each row's first piece.
        row: ``[U]`` row of each unit.
        work: ``[U]`` seconds at rate 1.
        lag: ``[U]`` seconds between the end of the unit before it in the job and its start.
        release: ``[n]`` earliest start of each job.
        hold: ``[n]`` time before which a job's last unit may not end.
        tolerance: seconds by which a unit may exceed its gap.
        idle: ``[R]`` when each row is done with earlier jobs; updated.
        begins: ``[n, U]`` output.
        ends: ``[n, U]`` output.
    """
    at = first_piece.copy()
    units = len(row)
    for q in range(len(release)):
        t = release[q]
        for u in range(units):
            r = row[u]
            t = max(t + lag[u], idle[r])
            if u == units - 1:
                t = max(t, hold[q] - work[u])
            begin, t, at[r] = place_unit(start, end, rate, at[r], t, work[u], tolerance)
            begins[q, u] = begin
            ends[q, u] = t
            idle[r] = t


@compiled
def merged(
    start: Any,
    end: Any,
    rate: Any,
    first_piece: Any,
    row: Any,
    work: Any,
    lag: Any,
    arrival: Any,
    head: float,
    deadline: Any,
    most: int,
    tolerance: float,
    pipeline: Any,
) -> int:
    """Give each slot to the next pipeline to complete a job, all starting at ``-head`` (L2).

    Completions of a pipeline do not depend on the others, hence the i-th earliest of all of them
    meets the i-th deadline if any map does.

    Args:
        start: pieces as in ``place_jobs``, of all pipelines.
        end: likewise.
        rate: likewise.
        first_piece: ``[M, R]``.
        row: ``[U]``.
        work: ``[M, U]``.
        lag: ``[M, U]``.
        arrival: ``[M]`` lag after the last unit.
        head: seconds before 0.
        deadline: ``[N]``.
        most: jobs that one pipeline may have; ``M * most`` is at least N.
        tolerance: as in ``place_jobs``.
        pipeline: ``[N]`` output.

    Returns:
        The number of slots that meet their deadline, from the first one on.
    """
    pipelines, rows = first_piece.shape
    units = len(row)
    at = first_piece.copy()
    idle = np.full((pipelines, rows), -head)
    ready = np.zeros(pipelines)
    jobs = np.zeros(pipelines, np.int64)
    last = -1
    for i in range(len(deadline)):
        for j in range(pipelines):
            if i == 0 or j == last:
                t = -head
                for u in range(units):
                    r = row[u]
                    t = max(t + lag[j, u], idle[j, r])
                    _, t, at[j, r] = place_unit(
                        start, end, rate, at[j, r], t, work[j, u], tolerance
                    )
                    idle[j, r] = t
                ready[j] = t + arrival[j] if jobs[j] < most else np.inf
        last = int(np.argmin(ready))
        if units and ready[last] > deadline[i] + tolerance:
            return i
        pipeline[i] = last if units else i % pipelines
        jobs[last] += 1
    return len(deadline)


@compiled
def without(
    start: Any,
    end: Any,
    rate: Any,
    first_piece: Any,
    row_units: Any,
    row_first: Any,
    begins: Any,
    ends: Any,
) -> Any:
    """Free pieces of one pipeline once units are placed in them, packed anew.

    Args:
        start: pieces as in ``place_jobs``.
        end: likewise.
        rate: likewise.
        first_piece: ``[R]`` of one pipeline.
        row_units: ``[U]`` units by row.
        row_first: ``[R + 1]`` where each row begins in ``row_units``.
        begins: ``[n, U]`` from ``place_jobs``.
        ends: ``[n, U]``.

    Returns:
        ``(start, end, rate, first_piece)``.
    """
    rows = len(first_piece)
    size = begins.size
    for r in range(rows):
        i = first_piece[r]
        size += 1
        while end[i] != np.inf:
            i += 1
            size += 1
    new_start, new_end, new_rate = np.empty(size), np.empty(size), np.empty(size)
    new_first = np.empty(rows, np.int64)
    n = 0
    for r in range(rows):
        new_first[r] = n
        i = first_piece[r]
        now = start[i]
        for q in range(len(begins)):
            for x in range(row_first[r], row_first[r + 1]):
                a, b = begins[q, row_units[x]], ends[q, row_units[x]]
                while end[i] <= a:
                    if end[i] > now:
                        new_start[n], new_end[n], new_rate[n] = now, end[i], rate[i]
                        n += 1
                    i += 1
                    now = start[i]
                if a > now:
                    new_start[n], new_end[n], new_rate[n] = now, a, rate[i]
                    n += 1
                while end[i] < b:
                    i += 1
                now = b
                if end[i] == b:
                    i += 1
                    now = start[i]
        while True:
            if end[i] > now:
                new_start[n], new_end[n], new_rate[n] = now, end[i], rate[i]
                n += 1
            if end[i] == np.inf:
                break
            i += 1
            now = start[i]
    return new_start[:n], new_end[:n], new_rate[:n], new_first


@compiled
def mirrored(start: Any, end: Any, rate: Any, first_piece: Any, length: float) -> Any:
    """The pieces of one pipeline seen backwards in time, ``t`` becoming ``length - t``.

    Pieces have to be packed as by ``without``: row after row, nothing between.
    """
    n, rows = len(start), len(first_piece)
    new_start, new_end, new_rate = np.empty(n), np.empty(n), np.empty(n)
    for r in range(rows):
        a = first_piece[r]
        b = first_piece[r + 1] if r + 1 < rows else n
        for x in range(b - a):
            new_start[a + x] = length - end[b - 1 - x]
            new_end[a + x] = length - start[b - 1 - x]
            new_rate[a + x] = rate[b - 1 - x]
    return new_start, new_end, new_rate


@compiled
def matched(low: Any, high: Any, slots: int, pipeline: Any, job_pipeline: Any) -> int:
    """Give each slot the released job that must go soonest.

    Exact for windows of slots (a convex bipartite graph); as windows of later jobs of a pipeline
    are never earlier, it keeps FIFO order.

    Args:
        low: ``[n]`` first slot each job can take; jobs of a pipeline in order.
        high: ``[n]`` last slot.
        slots: ``N``.
        pipeline: ``[N]`` output, -1 where no job was left.
        job_pipeline: ``[n]`` pipeline of each job.

    Returns:
        The number of slots with a job.
    """
    used = np.zeros(len(low), np.bool_)
    found = 0
    for i in range(slots):
        best = -1
        for q in range(len(low)):
            if not used[q] and low[q] <= i and high[q] >= i and (best < 0 or high[q] < high[best]):
                best = q
        pipeline[i] = -1
        if best >= 0:
            used[best] = True
            pipeline[i] = job_pipeline[best]
            found += 1
    return found
