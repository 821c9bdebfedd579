"""`LossScale`: one dynamic loss scale for all ranks of a run.

A rank whose gradients overflow fp16 makes the mean of all ranks non-finite, so every rank sees the
overflow in the reduced gradients and takes the same decision without a message of its own. Only
plans with fp16 products need one; for others the scale is 1 and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from foreplan.datasets.kernels.training_recipe import recipe

#: As ``torch.amp.GradScaler`` starts, grows and shrinks.
_START, _GROWTH_INTERVAL = 2.0**16, 2000


class LossScale:
    """See the module.

    Args:
        dynamic: scale at all.

    Attributes:
        value: what the loss is multiplied by.
    """

    def __init__(self, *, dynamic: bool) -> None:
        self._dynamic = dynamic
        self._good = 0
        self.value = _START if dynamic else 1.0

    @classmethod
    def of(cls, variants: Collection[str]) -> LossScale:
        """What the variants of all ranks need together."""
        return cls(dynamic=any("fp16" in _dtypes(text) for text in set(variants)))

    def restart(self) -> None:
        """Forget what was seen."""
        self._good, self.value = 0, _START if self._dynamic else 1.0

    def step(self, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
        """Step on unscaled gradients, or skip the step and halve the scale on overflow."""
        if not self._dynamic:
            optimizer.step()
            return
        finite = all(bool(torch.isfinite(flat.sum())) for flat in gradients)
        if not finite:
            self.value, self._good = self.value / 2, 0
            return
        for flat in gradients:
            flat.div_(self.value)
        optimizer.step()
        for flat in gradients:
            flat.mul_(self.value)  # reported as they were sent
        self._good += 1
        if self._good == _GROWTH_INTERVAL:
            self.value, self._good = self.value * 2, 0


def _dtypes(text: str) -> tuple[str, str]:
    found = recipe(text)
    return found.forward, found.backward
