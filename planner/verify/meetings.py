"""`Meetings`: the GPUs of a collective wait for each other before its kernel is started.

NCCL's kernel waits for the other members on multiprocessors: a rank that is done early takes them
from what it computes meanwhile. With 4 micro-batches on two H200s a reduction of encoder gradients
began on one rank long before the other came, and the backward pass beside it took 6.02 ms for 4.49
(measured). Here the stream of the collective writes a word into the memory of every other member
and waits for theirs, which takes nothing from anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.planner.verify.peer_words import PeerWords

if TYPE_CHECKING:
    import torch

#: Members of a collective.
Members = tuple[int, ...]


class Word(NamedTuple):
    """Where a rank looks whether another has come.

    Attributes:
        members: of the group.
        of: the other rank.
        handle: of the word's allocation, for other processes, in hexadecimal digits.
        offset: of the word in it, bytes.
    """

    members: Members
    of: int
    handle: str
    offset: int


class Meetings:
    """The meetings of one rank, one after the other in each group.

    Args:
        groups: those whose members meet; all ranks name the same ones.
        rank: this one.
        device: its GPU.

    Raises:
        OSError: no driver.
        RuntimeError: the driver refuses.
    """

    def __init__(self, groups: Collection[Members], rank: int, device: torch.device) -> None:
        import torch

        self._memory = PeerWords()
        self._rank = rank
        mine = sorted(members for members in groups if rank in members)
        places = [(members, other) for members in mine for other in members if other != rank]
        self._words = torch.zeros(max(1, len(places)), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._mine = {place: self._words[k].data_ptr() for k, place in enumerate(places)}
        self._theirs: dict[tuple[Members, int], int] = {}
        self._count = dict.fromkeys(mine, 0)

    def __contains__(self, members: Members) -> bool:
        return members in self._count

    def words(self) -> list[Word]:
        """Where the others say that they have come."""
        return [
            Word(members, other, *self._memory.handed_out(word))
            for (members, other), word in self._mine.items()
        ]

    def open(self, words: Sequence[Sequence[Word]]) -> None:
        """Open the words of the other members.

        Args:
            words: of all ranks, in their order.

        Raises:
            RuntimeError: a GPU cannot reach another one's memory.
        """
        for members, other in self._mine:
            (mine,) = (o for o in words[other] if o[:2] == (members, self._rank))
            self._theirs[members, other] = self._memory.opened(mine.handle) + mine.offset

    def meet(self, members: Members, stream: Any) -> None:
        """Let a stream wait until the streams of all members have come as far as this one."""
        self._count[members] += 1
        others = [other for other in members if other != self._rank]
        for other in others:
            self._memory.write(self._theirs[members, other], self._count[members], stream)
        for other in others:
            self._memory.wait(self._mine[members, other], self._count[members], stream)
