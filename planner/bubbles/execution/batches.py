"""`Batches`: the data of each micro-batch, drawn anew wherever it is needed.

Random tokens, labels and patches, seeded by what they are and their micro-batch, so that ranks and
the single-process model see the same. Times do not depend on the values, and losses mean nothing.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from foreplan.planner.bubbles.execution.step_sizes import StepSizes


class Batches:
    """See the module.

    Args:
        step: what is trained.
        device: where to keep what is drawn.
        dtype: of patches.
    """

    def __init__(self, step: StepSizes, device: torch.device, dtype: torch.dtype) -> None:
        self._step, self._device, self._dtype = step, device, dtype
        self._kept: dict[tuple[str, int], Tensor] = {}

    def tokens(self, microbatch: int) -> Tensor:
        """Text behind the features, ``[samples, text]``."""
        return self._words("tokens", microbatch, self._step.text_tokens)

    def labels(self, microbatch: int) -> Tensor:
        """What each position should predict, ``[samples, sequence]``."""
        return self._words("labels", microbatch, self._step.workload.sequence_length)

    def patches(self, encoder: int, microbatch: int) -> Tensor:
        """Input of an encoder, ``[sequences, tokens, patch features]``."""
        step = self._step
        spec, tower = step.workload.encoders[encoder], step.encoders[encoder]
        width = tower.hidden if tower.entry is None else tower.entry[1]
        key = f"patches {spec.name}", microbatch
        if key not in self._kept:
            shape = step.sequences(encoder), spec.tokens, width
            drawn = torch.randn(shape, generator=self._generator(*key))
            self._kept[key] = drawn.to(self._device, self._dtype)
        return self._kept[key]

    @property
    def bytes(self) -> int:
        """Memory of what has been drawn."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def _words(self, what: str, microbatch: int, count: int) -> Tensor:
        key = what, microbatch
        if key not in self._kept:
            shape = self._step.workload.microbatch, count
            drawn = torch.randint(self._step.backbone.vocab, shape, generator=self._generator(*key))
            self._kept[key] = drawn.to(self._device)
        return self._kept[key]

    def _generator(self, what: str, microbatch: int) -> torch.Generator:
        text = f"{self._step.seed} {what} {microbatch}"
        seed = hashlib.sha256(text.encode()).digest()[:7]
        return torch.Generator().manual_seed(int.from_bytes(seed, "big"))
