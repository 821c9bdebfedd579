"""`RankProgram`: one rank's share of a schedule as the list of steps that its process walks.

A process walks one list, so the schedule's partial order is laid into a line beforehand, which also
keeps the timed part free of bookkeeping:

- what computes keeps the order of the rank's list (resources are queues served in that order);
- a transfer or collective that occupies no compute is *posted* as soon as what it depends on has
  been run, however late in the list it stands, so that it overlaps what the simulator lets it
  overlap; one that depends on another transfer keeps its place, because posting it means waiting;
- a receive is posted only after the last earlier action of its stage and micro-batch, because it
  may fill the buffer which that action reads;
- for a device that queues what its host posts (NCCL), receives and collectives that depend on
  nothing of their rank are posted one by one, each where the one before it in its connection is
  needed first. Posting eight gathers takes the host 1.4 ms and six receives 0.3 (measured, one of
  two H200s): the device was idle until then;
- a posted action is waited for where the first action that depends on it runs, or at the end. The
  next run of a stage or micro-batch also waits for the send of the former result: it may
  overwrite what is still on its way. (Actions that name neither have to name dependencies.)

Transfers of one rank over a common resource are left to the connection, which is a queue itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from foreplan.cost_models.schedule import COMPUTE, SHARED_PREFIX, Action, Schedule
from foreplan.errors import SpecError
from foreplan.planner.verify.partners import Kind, Partners, kind_of
from foreplan.planner.verify.progress import check_progress

_NAMELESS = (-1, -1)


@dataclass(frozen=True, slots=True)
class Step:
    """One action made ready to be carried out.

    Attributes:
        index: the action's index in the schedule.
        action: the action.
        kind: who carries it out: the kernels (``run``) or the runtime.
        waits: places (in this program) of posted steps to wait for first.
        blocking: a transfer that occupies the rank's compute: waited for on the spot.
        group: ranks of the connection: source and target, or the members of a collective.
        tag: tells the messages of a connection apart; the index of the send.
        independent: a collective that depends on nothing of its rank, so that it need not stand
            behind what the device computes.
    """

    index: int
    action: Action
    kind: Kind
    waits: tuple[int, ...] = ()
    blocking: bool = True
    group: tuple[int, ...] = ()
    tag: int = 0
    independent: bool = False


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does.

    Attributes:
        rank: the rank.
        steps: in the order in which the process walks them.
        pending: places of the steps that are waited for at the end.
    """

    rank: int
    steps: tuple[Step, ...]
    pending: tuple[int, ...]

    def waits_for(self, place: int) -> bool:
        """Whether the rank computes nothing between posting a step and waiting for it."""
        after = (s for s in self.steps[place + 1 :] if s.kind in ("run", "collective"))
        following = next(after, None)
        return self.steps[place].blocking or following is None or place in following.waits


def rank_programs(schedule: Schedule, *, ordered: bool = False) -> tuple[RankProgram, ...]:
    """The program of every rank.

    Args:
        schedule: what to run.
        ordered: for devices that queue what their host posts (NCCL): the messages of each
            connection keep the order of the sender's list on both sides, as there are no tags, and
            what depends on nothing is posted one by one.

    Raises:
        SpecError: a transfer without its other end, a collective without a rendezvous, a
            dependency across ranks that no transfer carries, or a deadlock (names who waits for
            whom).
    """
    actions = tuple(schedule)
    partners = Partners.of(actions, ordered=ordered)
    programs = tuple(
        _lay_out(rank, schedule.of_rank(rank), partners) for rank in range(schedule.ranks)
    )
    check_progress(programs, partners)
    return programs


def _posted(action: Action) -> bool:
    return kind_of(action) != "run" and COMPUTE not in action.resources


def _lay_out(rank: int, mine: list[int], partners: Partners) -> RankProgram:
    actions = partners.actions
    order = _Order(rank, mine, partners)
    place = {index: i for i, index in enumerate(mine)}
    after: dict[int, list[int]] = defaultdict(list)
    left: dict[int, int] = {}
    for index in mine:
        left[index] = len(order.before[index])
        for earlier in order.before[index]:
            after[earlier].append(index)

    later = _one_by_one(rank, mine, partners, order.waits) if partners.ordered else {}

    def urgency(index: int) -> tuple[int, float, int]:
        if index in later:
            return 1, place[later[index]] - 0.5, index
        action = actions[index]
        local = [actions[d] for d in action.dependencies if actions[d].rank == rank]
        early = _posted(action) and not any(_posted(other) for other in local)
        return (0 if early else 1), place[index], index

    ready = [urgency(index) for index in mine if not left[index]]
    heapq.heapify(ready)
    steps: list[Step] = []
    at: dict[int, int] = {}
    unfinished: set[int] = set()
    while ready:
        index = heapq.heappop(ready)[-1]
        action = actions[index]
        needed = [at[d] for d in (*action.dependencies, *order.waits[index]) if d in at]
        waits = tuple(sorted(unfinished.intersection(needed)))
        unfinished.difference_update(waits)
        at[index] = len(steps)
        if _posted(action):
            unfinished.add(at[index])
        steps.append(
            Step(
                index, action, kind_of(action), waits, not _posted(action), partners.group(index),
                partners.sent_by.get(index, index), _independent(action, order.waits[index]),
            )
        )  # fmt: skip
        for following in after[index]:
            left[following] -= 1
            if not left[following]:
                heapq.heappush(ready, urgency(following))
    if len(steps) < len(mine):
        stuck = next(actions[index] for index in mine if index not in at)
        raise SpecError(
            "schedule", got=f"a deadlock: rank {rank} at {stuck.label} waits for itself",
            expected="an order in which every action can start",
        )  # fmt: skip
    return RankProgram(rank, tuple(steps), tuple(sorted(unfinished)))


class _Order:
    """What has to come before what in the program of one rank.

    Attributes:
        before: for each action, others of the rank that are walked earlier.
        waits: for each action, others that have ended when it starts, beside its dependencies.
    """

    def __init__(self, rank: int, mine: list[int], partners: Partners) -> None:
        self.before: dict[int, set[int]] = {index: set() for index in mine}
        self.waits: dict[int, set[int]] = {index: set() for index in mine}
        self._dependencies(rank, mine, partners)
        self._resources(mine, partners.actions)
        self._buffers(mine, partners.actions)
        for queue in _queues(mine, partners):
            for earlier, later in itertools.pairwise(queue):
                self.before[later].add(earlier)
        for index, earlier_ones in self.waits.items():
            self.before[index] |= earlier_ones

    def _dependencies(self, rank: int, mine: list[int], partners: Partners) -> None:
        for index in mine:
            action = partners.actions[index]
            for needed in action.dependencies:
                other = partners.actions[needed]
                if other.rank == rank:
                    self.before[index].add(needed)
                elif not partners.carried(needed, index):
                    raise SpecError(
                        "schedule",
                        got=f"{action.label} of rank {rank} after {other.label} of rank "
                        f"{other.rank}",
                        expected="a send and a receive between them",
                    )

    def _resources(self, mine: list[int], actions: Sequence[Action]) -> None:
        last: dict[str, int] = {}
        posted: dict[str, set[int]] = defaultdict(set)
        for index in mine:
            for resource in actions[index].resources:
                if resource.startswith(SHARED_PREFIX):
                    continue
                if resource in last:
                    self.before[index].add(last[resource])
                last[resource] = index
                if _posted(actions[index]):
                    posted[resource].add(index)
                else:
                    self.waits[index] |= posted.pop(resource, set())

    def _buffers(self, mine: list[int], actions: Sequence[Action]) -> None:
        """Keep a receive from filling, and a run from changing, what is still in use."""
        last_run: dict[tuple[int, int], int] = {}
        in_use: dict[tuple[int, int], set[int]] = defaultdict(set)
        for index in mine:
            action, kind = actions[index], kind_of(actions[index])
            key = action.stage, action.microbatch
            if kind == "run":
                last_run[key] = index
                self.waits[index] |= in_use.pop(key, set()) - set(action.dependencies)
            elif kind == "recv":
                if key in last_run and index not in actions[last_run[key]].dependencies:
                    self.before[index].add(last_run[key])
            else:
                for needed in action.dependencies:
                    other = actions[needed]
                    made = other.stage, other.microbatch
                    earlier = needed < index and other.rank == action.rank
                    if earlier and kind_of(other) == "run" and made != _NAMELESS:
                        in_use[made].add(index)


def _independent(action: Action, waits: Collection[int]) -> bool:
    collective = kind_of(action) == "collective" and _posted(action)
    return collective and not (action.dependencies or waits)


def _one_by_one(
    rank: int, mine: list[int], partners: Partners, waits: Mapping[int, Collection[int]]
) -> dict[int, int]:
    """What depends on nothing of its rank, and the action before which it is posted."""
    actions = partners.actions
    queues: dict[tuple[Kind, tuple[int, ...]], list[int]] = defaultdict(list)
    users: dict[int, int] = {}
    for index in mine:
        action, kind = actions[index], kind_of(actions[index])
        needs = (*action.dependencies, *waits[index])
        free = all(actions[needed].rank != rank for needed in needs)
        if free and kind in ("recv", "collective") and _posted(action):
            queues[kind, partners.group(index)].append(index)
        for needed in action.dependencies:
            users.setdefault(needed, index)
    return {
        later: users[earlier]
        for queue in queues.values()
        for earlier, later in itertools.pairwise(queue)
        if earlier in users
    }


def _queues(mine: list[int], partners: Partners) -> list[list[int]]:
    """Actions that a library matches by order alone, queue by queue."""
    queues: dict[tuple[Kind, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for index in mine:
        action, kind = partners.actions[index], kind_of(partners.actions[index])
        if kind == "collective":
            first = min(partners.members[action.rendezvous])
            queues[kind, partners.group(index)].append((first, index))
        elif kind != "run" and partners.ordered:
            queues[kind, partners.group(index)].append((partners.sent_by.get(index, index), index))
    return [[index for _, index in sorted(queue)] for queue in queues.values()]
