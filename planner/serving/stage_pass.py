"""`StagePass`: a pass whose temporary tensors are counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagePass:
    """A pass of one micro-batch.

    Attributes:
        phase: prefill or decode.
        batch: requests.
        tokens: new tokens of each.
        keys: positions that the last of them sees.
    """

    phase: str
    batch: int
    tokens: int
    keys: int

    @property
    def rows(self) -> int:
        """New tokens of all requests."""
        return self.batch * self.tokens
