"""`Partners`: which actions of different ranks belong together: sends and receives, collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foreplan.cost_models.schedule import Action
from foreplan.errors import SpecError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

Kind = Literal["run", "send", "recv", "collective"]


@dataclass(frozen=True, slots=True)
class Partners:
    """How the actions of different ranks belong together.

    Attributes:
        actions: of the schedule.
        sent_by: the send of every receive, by index.
        members: actions of every collective, by its rendezvous number.
        ordered: as of `foreplan.planner.verify.rank_program.rank_programs`.
    """

    actions: tuple[Action, ...]
    sent_by: Mapping[int, int]
    members: Mapping[int, tuple[int, ...]]
    ordered: bool = False

    @classmethod
    def of(cls, actions: Sequence[Action], *, ordered: bool = False) -> Partners:
        """Find them.

        Raises:
            SpecError: a transfer without its other end, a collective without a rendezvous.
        """
        return cls(tuple(actions), match_transfers(actions), _members(actions), ordered)

    def group(self, index: int) -> tuple[int, ...]:
        """Ranks of the connection that an action uses."""
        action, kind = self.actions[index], kind_of(self.actions[index])
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
        if action.rendezvous >= 0 and kind_of(action) == "run":
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


def kind_of(action: Action) -> Kind:
    """Who carries an action out: the kernels (``run``) or the runtime."""
    if action.op == "send":
        return "send"
    if action.op == "recv":
        return "recv"
    return "collective" if action.op in COLLECTIVES else "run"
