"""What GPUs do with a step: streams as queues, of which each does what is at its head.

Nothing is computed and nothing takes time; `stuck` says which streams never get to their ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from foreplan.planner.verify.rank_program import RankProgram

COMPUTE, SUMS = "compute", "sums of the lanes"

#: ``shared(rank, stream)``: the stream that stands for it, itself if it is one of its own.
Shared = Callable[[int, Hashable], Hashable]


class _Entry(NamedTuple):
    """What stands in a queue.

    Attributes:
        kind: ``record`` and ``wait`` of a rank's event, ``send`` and ``receive`` of a message, or
            ``meet``, which starts when it is at the head of a queue of each rank that takes part.
        name: of the event, message or meeting.
        ranks: that meet.
    """

    kind: str
    name: Hashable
    ranks: int = 0


class _Rank:
    """Fills the queues of one rank as its process would, see `NcclChannels` and `Pieces`."""

    def __init__(self, program: RankProgram, lanes: int, shared: Shared) -> None:
        self.queues: dict[Hashable, deque[_Entry]] = defaultdict(deque)
        self._rank, self._lanes, self._shared = program.rank, lanes, shared
        self._sums = self._events = 0
        summing: dict[tuple[int, int], int] = {}  # event behind the sum of a stage's micro-batch
        for place, step in enumerate(program.steps):
            action = step.action
            key = action.stage, action.microbatch
            for posted in step.waits:
                self._put(COMPUTE, "wait", ("end", posted))
            if step.kind != "run":
                self._post(place, step.kind, step.group, step.tag, action.rendezvous)
                if step.blocking:
                    self._put(COMPUTE, "wait", ("end", place))
                continue
            if key in summing:
                self._put(COMPUTE, "wait", summing.pop(key))
            if lanes > 1 and action.op not in ("tensor", "optimizer", "beside"):
                summing[key] = self._sum()
                if action.step < 0:  # a whole pass, which waits for its sums itself
                    self._put(COMPUTE, "wait", summing.pop(key))

    def _put(self, stream: Hashable, kind: str, name: Hashable, ranks: int = 0) -> None:
        self.queues[self._shared(self._rank, stream)].append(_Entry(kind, name, ranks))

    def _follow(self, behind: Hashable, stream: Hashable) -> int:
        """Let a stream go on where another one has got to; the event."""
        self._events += 1
        self._put(behind, "record", self._events)
        self._put(stream, "wait", self._events)
        return self._events

    def _sum(self) -> int:
        self._follow(COMPUTE, SUMS)
        self._sums += 1
        self._put(SUMS, "meet", (SUMS, self._rank // self._lanes, self._sums), self._lanes)
        self._events += 1
        self._put(SUMS, "record", self._events)
        return self._events

    def _post(
        self, place: int, kind: str, group: tuple[int, ...], tag: int, rendezvous: int
    ) -> None:
        stream = ("collective" if kind == "collective" else "pair", group)
        self._follow(COMPUTE, stream)
        if kind == "collective":
            inner = ("communicator", group)
            self._follow(stream, inner)
            self._put(inner, "meet", rendezvous, len(group))
            self._follow(inner, stream)
        else:
            self._put(stream, "send" if kind == "send" else "receive", tag)
        self._put(stream, "record", ("end", place))


def stuck(
    programs: Sequence[RankProgram], lanes: int, shared: Shared = lambda _, stream: stream
) -> list[tuple[int, Hashable]]:
    """Ranks and streams that never get to their ends.

    Args:
        programs: of all ranks, lanes next to each other.
        lanes: of each rank of the pipeline.
        shared: which streams of a rank are one.
    """
    ranks = [_Rank(program, lanes, shared).queues for program in programs]
    recorded: set[Hashable] = set()
    sent: set[Hashable] = set()
    moved = True
    while moved:
        moved = False
        here: dict[Hashable, int] = defaultdict(int)
        for queues in ranks:
            for queue in queues.values():
                if queue and queue[0].kind == "meet":
                    here[queue[0].name] += 1
        for rank, queues in enumerate(ranks):
            for queue in queues.values():
                while queue:
                    kind, name, count = queue[0]
                    if (
                        (kind == "wait" and (rank, name) not in recorded)
                        or (kind == "receive" and name not in sent)
                        or (kind == "meet" and here[name] < count)
                    ):
                        break
                    if kind == "record":
                        recorded.add((rank, name))
                    elif kind == "send":
                        sent.add(name)
                    queue.popleft()
                    moved = True
    return [(rank, name) for rank, queues in enumerate(ranks) for name, q in queues.items() if q]
