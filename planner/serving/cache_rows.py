"""`CacheRows`: which request has which row of a slot's part of the cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class CacheRows:
    """Rows ``[begin, begin + share)`` of the cache; those in use have no gap between them.

    Args:
        begin: first row.
        share: most requests of the slot.
    """

    def __init__(self, begin: int, share: int) -> None:
        self.begin = begin
        self._share = share
        self._rows: list[int] = []

    @property
    def members(self) -> tuple[int, ...]:
        """The requests by row."""
        return tuple(self._rows)

    def drop(self, ended: Collection[int]) -> list[tuple[int, int, int]]:
        """Forget requests.

        Returns:
            (row, row, request) of what has to be copied from the first row into the second, in this
            order.
        """
        kept = [k for k, request in enumerate(self._rows) if request not in ended]
        gaps = [k for k in range(len(kept)) if self._rows[k] in ended]
        late = [k for k in kept if k >= len(kept)]
        moves = []
        for source, target in zip(late, gaps, strict=True):
            self._rows[target] = self._rows[source]
            moves.append((self.begin + source, self.begin + target, self._rows[target]))
        del self._rows[len(kept) :]
        return moves

    def add(self, members: Sequence[int]) -> int:
        """Give requests the next rows; the first of them."""
        first = self.begin + len(self._rows)
        self._rows += members
        assert len(self._rows) <= self._share  # as the policy admits
        return first
