"""`Kept`: what was made last, by key, as long as all of it together is not too large."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """A bounded store; what nobody has asked for longest goes first.

    Args:
        most: largest sum of sizes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._found: dict[Hashable, tuple[T, int]] = {}  # asked for longest ago first

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """What is kept under a key, or else what is made; an error of that is not kept.

        Args:
            key: what makes things equal.
            make: called where nothing is kept.
            size: of what was made.
        """
        if key in self._found:
            self._found[key] = self._found.pop(key)
            return self._found[key][0]
        made = make()
        much = size(made)
        if much <= self._most:
            self._found[key] = made, much
            self._held += much
            while self._held > self._most:
                self._held -= self._found.pop(next(iter(self._found)))[1]
        return made
