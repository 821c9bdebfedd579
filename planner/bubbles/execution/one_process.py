"""`OneProcess`: all ranks of a schedule in this process, one action at a time.

No two actions overlap and nothing is sent, so that each is timed alone; what is computed is what
the ranks of a real run compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from foreplan.cost_models.schedule import Action, Schedule
from foreplan.errors import SpecError
from foreplan.planner.base import Kernels
from foreplan.planner.verify.clock import Clock
from foreplan.planner.verify.partners import COLLECTIVES, match_transfers


class OneProcess:
    """See the module.

    Args:
        schedule: what to do.
        kernels: of each rank, all on one device.

    Raises:
        SpecError: a deadlock, or a transfer without its other end.
    """

    def __init__(self, schedule: Schedule, kernels: Sequence[Kernels]) -> None:
        self._actions = tuple(schedule)
        self._kernels = tuple(kernels)
        self._sent_by = match_transfers(self._actions)
        self._meetings: dict[int, list[int]] = {}
        for index, action in enumerate(self._actions):
            if action.rendezvous >= 0:
                self._meetings.setdefault(action.rendezvous, []).append(index)
        self._order = list(self._walk([schedule.of_rank(r) for r in range(schedule.ranks)]))

    def _walk(self, lists: list[list[int]]) -> Iterator[int]:
        """An order in which every action comes behind what it needs."""
        ended: set[int] = set()
        places = [0] * len(lists)

        def head(rank: int) -> int:
            return lists[rank][places[rank]] if places[rank] < len(lists[rank]) else -1

        def may(index: int) -> bool:
            return index >= 0 and ended.issuperset(self._actions[index].dependencies)

        moved = True
        while moved:
            moved = False
            for rank in range(len(lists)):
                while may(index := head(rank)):
                    meeting = self._meetings.get(self._actions[index].rendezvous, [index])
                    if any(head(self._actions[k].rank) != k or not may(k) for k in meeting):
                        break
                    for k in meeting:
                        places[self._actions[k].rank] += 1
                    ended.update(meeting)
                    yield from meeting
                    moved = True
        stuck = [self._actions[head(r)] for r in range(len(lists)) if head(r) >= 0]
        if stuck:
            raise SpecError(
                "schedule", got=f"rank {stuck[0].rank} stuck at {stuck[0].label}",
                expected="an order in which every rank comes to its end",
            )  # fmt: skip

    def step(self, clock: Clock | None = None) -> None:
        """Do everything once.

        Args:
            clock: stamps action ``k`` of the schedule as place ``k``.
        """
        for kernels in self._kernels:
            kernels.reset()
        if clock is not None:
            clock.begin()
        sent: dict[int, Tensor] = {}
        for index in self._order:
            action = self._actions[index]
            kernels = self._kernels[action.rank]
            if clock is not None:
                clock.start(index)
            if action.op == "send":
                # A copy, because the receiver's buffer may be in use until it is received.
                sent[index] = kernels.payload(action).clone()
            elif action.op == "recv":
                kernels.buffer(action).copy_(sent.pop(self._sent_by[index]))
            elif action.op not in COLLECTIVES:
                kernels.run(action)
            elif index == self._meetings[action.rendezvous][-1]:
                self._collect(action)
            if clock is not None:
                clock.end(index)

    def result(self) -> dict[str, Any]:
        """What all ranks report, together.

        Raises:
            ValueError: two ranks say different things of the same.
        """
        merged: dict[str, Any] = {}
        for kernels in self._kernels:
            for key, value in kernels.result().items():
                if merged.setdefault(key, value) != value:
                    raise ValueError(f"ranks disagree about {key}")
        return merged

    def _collect(self, action: Action) -> None:
        """A collective in place, sums in the order of the ranks."""
        members = [self._actions[k] for k in self._meetings[action.rendezvous]]
        members.sort(key=lambda member: member.rank)
        tensors = [self._kernels[member.rank].payload(member) for member in members]
        rows = [list(tensor.view(-1).chunk(len(tensors))) for tensor in tensors]
        if action.op in ("all_reduce", "reduce_scatter"):
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            for place, tensor in enumerate(tensors):
                if action.op == "all_reduce":
                    tensor.copy_(total)
                else:
                    rows[place][place].copy_(total.view(-1).chunk(len(tensors))[place])
        elif action.op == "all_gather":
            for row in rows:
                for place, part in enumerate(row):
                    part.copy_(rows[place][place])
        else:
            raise SpecError("schedule", got=action.op, expected="a collective of a training step")
