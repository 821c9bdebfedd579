"""`Leaves`: what works are made of, as arrays; a decoder's passes share nearly all of it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np

from foreplan.cost_models.costs import Segment, Work
from foreplan.cost_models.schedule import IntArray


def leaves_of(work: Work, count: int) -> Iterator[tuple[Work, int]]:
    """The works that a work consists of, and how often ``count`` of it run each."""
    if isinstance(work, Segment) and work.parts:
        for part, times in work.parts:
            yield from leaves_of(part, times * count)
    else:
        yield work, count


class Leaves:
    """The leaves of some works.

    Args:
        works: as a schedule lists them.
        whole: works that are not taken apart.

    Attributes:
        works: the distinct leaves, in order of their first use.
    """

    def __init__(self, works: Sequence[Work], whole: Container[Work] = ()) -> None:
        places: dict[Work, int] = {}
        leaf: list[int] = []
        count: list[int] = []
        size: list[int] = []
        for work in works:
            before = len(leaf)
            for part, times in ((work, 1),) if whole and work in whole else leaves_of(work, 1):
                leaf.append(places.setdefault(part, len(places)))
                count.append(times)
            size.append(len(leaf) - before)
        self.works = tuple(places)
        self._leaf, self._count = np.array(leaf, np.int64), np.array(count, np.int64)
        self._size = np.array(size, np.int64)
        self._start = np.cumsum(self._size) - self._size

    def cells(self, works: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """All leaves of works, one after another.

        Args:
            works: indices of works.

        Returns:
            Of each leaf its place in ``works``, its index in `Leaves.works` and its count.
        """
        size = self._size[works]
        owner = np.repeat(np.arange(len(works)), size)
        within = np.arange(len(owner)) - (np.cumsum(size) - size)[owner]
        place = self._start[works][owner] + within
        return owner, self._leaf[place], self._count[place]
