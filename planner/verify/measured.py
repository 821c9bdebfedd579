"""`measured_timeline`: the records of all ranks as one `Timeline`, on one clock.

What a process sees of a transfer is not what the transfer did, so transfers are put back into the
schedule's terms:

- a send that overlaps compute lasts from its posting to the arrival that the receiver saw; the
  receive that depends on it starts there and takes no time of its own;
- the actions of a collective start together, when the last member has posted its own;
- on a queue of overlapping transfers none ends after a later one, and none starts before the former
  has ended: the connection is the queue.

Over gloo an arrival is seen only by somebody who waits, so where nothing waited, the end of a
message is an upper bound: it is drawn too long, and no action was held up by it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.schedule import COMPUTE, SHARED_PREFIX, FloatArray, IntArray, Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.planner.verify.partners import COLLECTIVES, match_transfers
from foreplan.planner.verify.runtime import Record

_TRANSFERS = ("send", "recv", *COLLECTIVES)


def measured_timeline(
    schedule: Schedule, records: Sequence[Record], offsets_ns: Sequence[int] | None = None,
    *, sent_by_copy: bool = False,
) -> Timeline:  # fmt: skip
    """Join what the ranks recorded.

    Args:
        schedule: what ran.
        records: one a rank, its actions in the schedule's order.
        offsets_ns: what to add to each rank's clock to get the leader's; zeros if left out.
        sent_by_copy: a message has arrived when its send has ended (copy engines), however late
            the receiver looked.

    Returns:
        Start and end of every action in seconds from the first start.
    """
    count = len(schedule)
    start, end = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for rank, record in enumerate(records):
        mine = schedule.of_rank(rank)
        shift = 0 if offsets_ns is None else offsets_ns[rank]
        start[mine] = np.asarray(record.start_ns, dtype=np.int64) + shift
        end[mine] = np.asarray(record.end_ns, dtype=np.int64) + shift
    ops = np.asarray(schedule.ops)[schedule.op] if count else np.zeros(0, dtype=np.str_)
    loose = np.isin(ops, _TRANSFERS) & ~computing(schedule)
    sources, targets = _edges(schedule)
    pairs = match_transfers(tuple(schedule))
    for receive, send in pairs.items():
        if loose[send]:
            end[send] = max(start[send], end[send] if sent_by_copy else end[receive])
    _meetings(schedule, start, end)
    _queues(schedule, start, end, loose)
    _meetings(schedule, start, end)  # a queue of one rank may have held up all members
    for i in np.flatnonzero(loose):  # what it depends on was awaited, but perhaps after the posting
        start[i] = max(start[i], end[_needs(schedule, int(i))].max(initial=start[i]))
        end[i] = max(end[i], start[i])
    for receive, send in pairs.items():
        arrival = end[send] if loose[send] and loose[receive] else end[receive]
        after = end[send] if send in _needs(schedule, receive) else start[send]
        start[receive] = after if loose[receive] else max(start[receive], after)
        end[receive] = max(start[receive], arrival)
    first_ns = int(start.min(initial=np.iinfo(np.int64).max)) if count else 0
    start_s: FloatArray = (start - first_ns) / 1e9
    end_s: FloatArray = (end - first_ns) / 1e9
    binding = _binding(sources, targets, end, start)
    return Timeline(schedule, start_s, end_s, binding, kind="measured")


def computing(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Mask of the actions that occupy their rank's compute."""
    if COMPUTE not in schedule.resources:
        return np.zeros(len(schedule), dtype=np.bool_)
    index = schedule.resources.index(COMPUTE)
    sets = [s for s, members in enumerate(schedule.resource_sets) if index in members]
    return np.isin(schedule.resource_set, sets)


def _needs(schedule: Schedule, index: int) -> IntArray:
    first, last = schedule.dependency_start[index], schedule.dependency_start[index + 1]
    needed: IntArray = schedule.dependency[first:last]
    return needed


def _meetings(schedule: Schedule, start: IntArray, end: IntArray) -> None:
    meetings: dict[int, list[int]] = defaultdict(list)
    for i in np.flatnonzero(schedule.rendezvous >= 0):
        meetings[int(schedule.rendezvous[i])].append(int(i))
    for members in meetings.values():
        met = start[members].max()
        for member in members:  # the root of a broadcast may have been done before all had come
            if end[member] >= met:
                start[member] = met


def _queues(
    schedule: Schedule, start: IntArray, end: IntArray, loose: npt.NDArray[np.bool_]
) -> None:
    for queue in _resource_queues(schedule):
        for earlier, later in zip(queue[-2::-1], queue[:0:-1], strict=True):
            if loose[earlier] and loose[later]:
                end[earlier] = max(start[earlier], min(end[earlier], end[later]))
        for earlier, later in itertools.pairwise(queue):
            if loose[later]:
                start[later] = max(start[later], end[earlier])
                end[later] = max(start[later], end[later])


def _resource_queues(schedule: Schedule) -> list[list[int]]:
    """Actions of each resource of each rank, in list order."""
    queues: dict[tuple[int, int], list[int]] = defaultdict(list)
    own = {r for r, name in enumerate(schedule.resources) if not name.startswith(SHARED_PREFIX)}
    for i in range(len(schedule)):
        for resource in schedule.resource_sets[schedule.resource_set[i]]:
            if resource in own:
                queues[int(schedule.rank[i]), resource].append(i)
    return list(queues.values())


def _edges(schedule: Schedule) -> tuple[IntArray, IntArray]:
    """What could have held up what: dependencies and the former action of each queue."""
    sources = [schedule.dependency]
    targets = [np.repeat(np.arange(len(schedule)), np.diff(schedule.dependency_start))]
    for queue in _resource_queues(schedule):
        sources.append(np.asarray(queue[:-1], dtype=np.int64))
        targets.append(np.asarray(queue[1:], dtype=np.int64))
    return np.concatenate(sources), np.concatenate(targets)


def _binding(sources: IntArray, targets: IntArray, end: IntArray, start: IntArray) -> IntArray:
    """For each action the one before it that ended last."""
    binding = np.full(len(start), -1, dtype=np.int64)
    order = np.argsort(end[sources], kind="stable")
    binding[targets[order]] = sources[order]
    return binding
