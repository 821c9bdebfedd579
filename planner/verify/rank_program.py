"""`RankProgram`: one rank's share of a schedule as the list of steps that its process walks.

A process walks one list, so the schedule's partial order is laid into a line beforehand, which also
keeps the timed part free of bookkeeping:

- what computes keeps the order of the rank's list (resources are queues served in that order);
- a transfer or collective that occupies no compute is *posted* as soon as what it depends on has
  been run, however late in the list it stands, so that it overlaps what the simulator lets it
  overlap; one that depends on another transfer keeps its place, because posting it means waiting;
- a receive is posted only after the last earlier action of its stage and micro-batch, because it
  may fill the buffer which that action reads;
- a posted action is waited for where the first action that depends on it runs, or at the end. The
  next run of a stage or micro-batch also waits for the send of the former result: it may
  overwrite what is still on its way. (Actions that name neither have to name dependencies.)

Transfers of one rank over a common resource are left to the connection, which is a queue itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foreplan.cost_models.schedule import COMPUTE, SHARED_PREFIX, Action, Schedule
from foreplan.errors import SpecError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

_NAMELESS = (-1, -1)

Kind = Literal["run", "send", "recv", "collective"]


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
    """

    index: int
    action: Action
    kind: Kind
    waits: tuple[int, ...] = ()
    blocking: bool = True
    group: tuple[int, ...] = ()
    tag: int = 0


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
        ordered: keep the messages of each connection in the order of the sender's list on both
            sides, as NCCL needs, which has no tags.

    Raises:
        SpecError: a transfer without its other end, a collective without a rendezvous, a
            dependency across ranks that no transfer carries, or a deadlock (names who waits for
            whom).
    """
    actions = tuple(schedule)
    links = _Links(actions, match_transfers(actions), _members(actions), ordered)
    programs = tuple(
        _lay_out(rank, schedule.of_rank(rank), links) for rank in range(schedule.ranks)
    )
    _check_progress(programs, links)
    return programs


@dataclass(frozen=True, slots=True)
class _Links:
    """How the actions of different ranks belong together."""

    actions: tuple[Action, ...]
    sent_by: Mapping[int, int]
    members: Mapping[int, tuple[int, ...]]
    ordered: bool

    def group(self, index: int) -> tuple[int, ...]:
        """Ranks of the connection that an action uses."""
        action, kind = self.actions[index], _kind(self.actions[index])
        if kind == "collective":
            meeting = self.members[action.rendezvous]
            return tuple(sorted(self.actions[peer].rank for peer in meeting))
        if kind == "run":
            return ()
        ends = (action.rank, action.peer)
        return ends if kind == "send" else ends[::-1]

    def carried(self, needed: int, index: int) -> bool:
        """Whether a message or a meeting makes ``index`` start after ``needed`` of another rank."""
        if self.sent_by.get(index) == needed:
            return True
        if self.actions[index].op not in COLLECTIVES:
            return False
        peers = self.members[self.actions[index].rendezvous]
        return any(needed in self.actions[peer].dependencies for peer in peers if peer != index)


def match_transfers(actions: Sequence[Action]) -> dict[int, int]:
    """The send of every receive, by index.

    A receive names its send as a dependency; where it does not, sends and receives of the same
    ranks, stage, micro-batch and step are paired in the order of the lists.

    Raises:
        SpecError: a receive without a send or the other way round.
    """
    pairs: dict[int, int] = {}
    waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, action in enumerate(actions):
        if action.op == "recv":
            sends = [d for d in action.dependencies if _is_send(actions[d], action)]
            if sends:
                pairs[index] = sends[0]
    taken = set(pairs.values())
    for index, action in enumerate(actions):
        if action.op == "send" and index not in taken:
            waiting[_key(action.rank, action.peer, action)].append(index)
    for index, action in enumerate(actions):
        if action.op == "recv" and index not in pairs:
            free = waiting[_key(action.peer, action.rank, action)]
            if not free:
                raise _unmatched(action, "send")
            pairs[index] = free.pop(0)
    left = [index for indices in waiting.values() for index in indices]
    if left or len(set(pairs.values())) < len(pairs):
        taken_twice = [s for s in pairs.values() if list(pairs.values()).count(s) > 1]
        raise _unmatched(actions[min(left or taken_twice)], "recv")
    return pairs


def _is_send(other: Action, action: Action) -> bool:
    return other.op == "send" and other.rank == action.peer and other.peer == action.rank


def _key(source: int, target: int, action: Action) -> tuple[int, ...]:
    return source, target, action.stage, action.microbatch, action.step


def _unmatched(action: Action, lacking: str) -> SpecError:
    return SpecError(
        "schedule", got=f"{action.label} of rank {action.rank} with peer {action.peer}",
        expected=f"one {lacking} for it on the other rank",
    )  # fmt: skip


def _members(actions: Sequence[Action]) -> Mapping[int, tuple[int, ...]]:
    """Actions of each rendezvous number."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, action in enumerate(actions):
        if action.rendezvous >= 0 and _kind(action) == "run":
            raise SpecError(
                "schedule", got=f"a rendezvous of {action.label} of rank {action.rank}",
                expected=f"one of {', '.join(COLLECTIVES)}, send or recv where ranks meet",
            )  # fmt: skip
        if action.rendezvous >= 0:
            found[action.rendezvous].append(index)
        elif action.op in COLLECTIVES:
            raise SpecError(
                "schedule", got=f"{action.label} of rank {action.rank} without a rendezvous number",
                expected="one number for all actions of a collective",
            )  # fmt: skip
    return {number: tuple(indices) for number, indices in found.items()}


def _kind(action: Action) -> Kind:
    if action.op == "send":
        return "send"
    if action.op == "recv":
        return "recv"
    return "collective" if action.op in COLLECTIVES else "run"


def _posted(action: Action) -> bool:
    return _kind(action) != "run" and COMPUTE not in action.resources


# --------------------------------------------------------------------------------- order of steps


def _lay_out(rank: int, mine: list[int], links: _Links) -> RankProgram:
    actions = links.actions
    order = _Order(rank, mine, links)
    place = {index: i for i, index in enumerate(mine)}
    after: dict[int, list[int]] = defaultdict(list)
    left: dict[int, int] = {}
    for index in mine:
        left[index] = len(order.before[index])
        for earlier in order.before[index]:
            after[earlier].append(index)

    def urgency(index: int) -> tuple[int, int, int]:
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
                index, action, _kind(action), waits, not _posted(action), links.group(index),
                links.sent_by.get(index, index),
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

    def __init__(self, rank: int, mine: list[int], links: _Links) -> None:
        self.before: dict[int, set[int]] = {index: set() for index in mine}
        self.waits: dict[int, set[int]] = {index: set() for index in mine}
        self._dependencies(rank, mine, links)
        self._resources(mine, links.actions)
        self._buffers(mine, links.actions)
        for queue in _queues(mine, links):
            for earlier, later in itertools.pairwise(queue):
                self.before[later].add(earlier)
        for index, earlier_ones in self.waits.items():
            self.before[index] |= earlier_ones

    def _dependencies(self, rank: int, mine: list[int], links: _Links) -> None:
        for index in mine:
            action = links.actions[index]
            for needed in action.dependencies:
                other = links.actions[needed]
                if other.rank == rank:
                    self.before[index].add(needed)
                elif not links.carried(needed, index):
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
            action, kind = actions[index], _kind(actions[index])
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
                    if earlier and _kind(other) == "run" and made != _NAMELESS:
                        in_use[made].add(index)


def _queues(mine: list[int], links: _Links) -> list[list[int]]:
    """Actions that a library matches by order alone, queue by queue."""
    queues: dict[tuple[Kind, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for index in mine:
        action, kind = links.actions[index], _kind(links.actions[index])
        if kind == "collective":
            first = min(links.members[action.rendezvous])
            queues[kind, links.group(index)].append((first, index))
        elif kind != "run" and links.ordered:
            queues[kind, links.group(index)].append((links.sent_by.get(index, index), index))
    return [[index for _, index in sorted(queue)] for queue in queues.values()]


# -------------------------------------------------------------------------------------- progress


def _check_progress(programs: Sequence[RankProgram], links: _Links) -> None:
    """Walk all programs together, without running anything, and see that each comes to its end."""
    partners: dict[int, tuple[int, ...]] = {}
    for receive, send in links.sent_by.items():
        partners[receive], partners[send] = (send,), (receive,)
    for meeting in links.members.values():
        for index in meeting:
            partners[index] = tuple(other for other in meeting if other != index)
    posted: set[int] = set()
    places = [0] * len(programs)

    def stuck_at(rank: int) -> int | None:
        """Advance a rank; the action of another rank that it waits for, if any."""
        steps = programs[rank].steps
        while places[rank] < len(steps):
            step = steps[places[rank]]
            for k in step.waits:
                for partner in partners[steps[k].index]:
                    if partner not in posted:
                        return partner
            posted.add(step.index)
            if step.blocking and step.kind != "run":
                for partner in partners[step.index]:
                    if partner not in posted:
                        return partner
            places[rank] += 1
        return None

    moved = True
    while moved:
        former = list(places), len(posted)
        waits = [stuck_at(rank) for rank in range(len(programs))]
        moved = (list(places), len(posted)) != former
    shown = [
        f"rank {rank} at {programs[rank].steps[places[rank]].action.label} waits for "
        f"{links.actions[needed].label} of rank {links.actions[needed].rank}"
        for rank, needed in enumerate(waits)
        if needed is not None
    ]
    if shown:
        more = [f"{len(shown) - 4} more ranks"] if len(shown) > 4 else []
        raise SpecError(
            "schedule", got="a deadlock: " + ", ".join(shown[:4] + more),
            expected="an order in which every rank comes to its end",
        )  # fmt: skip
