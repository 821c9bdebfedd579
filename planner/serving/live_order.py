"""`LiveOrder`: what the first stage tells the others of a pass, as one tensor. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foreplan.planner.serving.pricing import DECODE, PREFILL

_STOP, _HEAD, _MOVE = -1, 5, 3
_PHASES = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class LiveOrder:
    """One pass, in rows of the cache.

    Attributes:
        phase: prefill or decode.
        first: row of the first request; the others follow it.
        tokens: of each request in this pass, the padded ones too.
        lengths: tokens of each whose keys and values are known behind the pass.
        moves: (source, target, positions) of rows to copy before it.
    """

    phase: str
    first: int
    tokens: int
    lengths: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...] = ()

    @property
    def rows(self) -> int:
        """Tokens of the pass, the padded ones too."""
        return len(self.lengths) * self.tokens

    def write(self, share: int) -> Tensor:
        """As int64 of `size` of ``share``."""
        words = [_PHASES.index(self.phase), self.first, self.tokens]
        words += [len(self.lengths), len(self.moves)]
        words += [*self.lengths, *(number for move in self.moves for number in move)]
        return torch.tensor(words + [0] * (self.size(share) - len(words)))

    @classmethod
    def read(cls, told: Tensor) -> LiveOrder | None:
        """What was written; ``None`` at the end of a run."""
        phase, first, tokens, count, moves, *words = told.tolist()
        if phase == _STOP:
            return None
        at = [count + _MOVE * k for k in range(moves)]
        return cls(
            _PHASES[phase], first, tokens, tuple(words[:count]),
            tuple((words[k], words[k + 1], words[k + 2]) for k in at),
        )  # fmt: skip

    @classmethod
    def stop(cls, share: int) -> Tensor:
        """The end of a run."""
        return torch.full((cls.size(share),), _STOP)

    @staticmethod
    def size(share: int) -> int:
        """Numbers of a message where a slot has at most ``share`` requests."""
        return _HEAD + (1 + _MOVE) * share
