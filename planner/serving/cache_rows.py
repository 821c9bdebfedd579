"""`CacheRows`: which request has which row of a slot's part of the cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from foreplan.planner.serving.batching import BatchLimits


class CacheRows:
    """Rows of a slot; those in use have no gap between them.

    Args:
        begin: first row to be used.
        share: most requests of the slot.
        down: further rows lie below the first one, not above.
    """

    def __init__(self, begin: int, share: int, *, down: bool = False) -> None:
        self._begin, self._share = begin, share
        self._step = -1 if down else 1
        self._held: list[int] = []

    @property
    def first(self) -> int:
        """Lowest row in use."""
        return min(self._begin, self._row(len(self._held) - 1))

    @property
    def members(self) -> tuple[int, ...]:
        """The requests by row, from the lowest on."""
        return tuple(self._held[:: self._step])

    def drop(self, ended: Collection[int]) -> list[tuple[int, int, int]]:
        """Forget requests.

        Returns:
            (row, row, request) of what has to be copied from the first row into the second, in this
            order.
        """
        kept = [k for k, request in enumerate(self._held) if request not in ended]
        gaps = [k for k in range(len(kept)) if self._held[k] in ended]
        late = [k for k in kept if k >= len(kept)]
        moves = []
        for source, target in zip(late, gaps, strict=True):
            self._held[target] = self._held[source]
            moves.append((self._row(source), self._row(target), self._held[target]))
        del self._held[len(kept) :]
        return moves

    def add(self, members: Sequence[int]) -> int:
        """Give requests the next rows, in their order from the lowest on; the lowest."""
        held = len(self._held)
        self._held += members[:: self._step]
        assert len(self._held) <= self._share  # as the policy admits
        return min(self._row(held), self._row(len(self._held) - 1))

    def _row(self, place: int) -> int:
        return self._begin + self._step * place


def cache_rows(limits: BatchLimits) -> tuple[int, list[CacheRows]]:
    """Rows that a replica's cache needs, and those of each slot.

    Two slots share the rows from both ends. Of more, each has as many as it may ever hold.
    """
    share = limits.share
    if limits.slots > 2:
        return limits.slots * share, [CacheRows(k * share, share) for k in range(limits.slots)]
    rows = min(limits.batch, limits.slots * share)
    both = [CacheRows(0, share), CacheRows(rows - 1, share, down=True)]
    return rows, both[: limits.slots]
