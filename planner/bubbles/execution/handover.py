"""`Handover`: what the actions of a rank leave for each other and for other ranks.

Everything has the key ``(stage, micro-batch, step)`` of the receive that would carry it (see
`foreplan.planner.bubbles.actions`); where giver and taker lie on one rank, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foreplan.planner.bubbles.actions import ACTIVATION, GRADIENT
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.step_sizes import StepSizes

#: Stage of the receiver, micro-batch, step: as a receive names what it carries.
Key = tuple[int, int, int]


class Handover:
    """See the module.

    Args:
        step: what is trained.
        decision: who computes what.
        rank: whose actions.
        device: where buffers are.
        dtype: of what is received.
    """

    def __init__(
        self, step: StepSizes, decision: BubblesDecision, rank: int, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._step, self._decision, self._rank = step, decision, rank
        self._device, self._dtype = device, dtype
        self._buffers: dict[Key, Tensor] = {}
        self._here: dict[Key, Tensor] = {}
        self._leaving: dict[Key, Tensor] = {}

    def take(self, key: Key) -> Tensor:
        """What an earlier action of this rank left, or what has been received."""
        found = self._here.pop(key, None)
        return self.buffer(key) if found is None else found

    def buffer(self, key: Key) -> Tensor:
        """Where a receive puts what it carries; the same memory in every step."""
        if key not in self._buffers:
            shape = self._shape(*key)
            self._buffers[key] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self._buffers[key]

    def give(self, key: Key, tensor: Tensor | None) -> None:
        """Leave something for its receiver, who may be this rank."""
        if tensor is None:
            raise RuntimeError(f"nothing to hand on as {key}")
        here = self._owner(key[0], key[1]) == self._rank
        (self._here if here else self._leaving)[key] = tensor

    def leaving(self, key: Key) -> Tensor:
        """What a send carries."""
        return self._leaving[key]

    @property
    def on_the_way(self) -> dict[Key, Tensor]:
        """All that sends carry or have carried, unless it was dropped."""
        return dict(self._leaving)

    def leave(self, tensors: Mapping[Key, Tensor]) -> None:
        """Leave something for other ranks, as several `give`."""
        self._leaving.update(tensors)

    def sent(self, key: Key) -> None:
        """Drop what has been sent."""
        self._leaving.pop(key, None)

    def forget(self) -> None:
        """Drop what is on its way."""
        self._here.clear()
        self._leaving.clear()

    def adopt(self, decision: BubblesDecision) -> None:
        """Other micro-batches for the same parts."""
        self._decision = decision
        self._buffers.clear()

    @property
    def bytes(self) -> int:
        """Memory of what arrives and is sent."""
        return sum(tensor.nbytes for tensor in (*self._buffers.values(), *self._leaving.values()))

    def _owner(self, number: int, microbatch: int) -> int:
        decision = self._decision
        if number < len(decision.stages):
            return decision.stages[number].rank
        encoder, stage = decision.encoder_stage(number)
        plan = decision.encoders[encoder]
        return plan.ranks[plan.slots[microbatch]][stage]

    def _shape(self, number: int, microbatch: int, step: int) -> tuple[int, ...]:
        """Shape of what is received under a key."""
        work, encoder = self._step.workload, step // 2
        features = number == 0 and step % 2 == ACTIVATION
        if number < len(self._decision.stages):
            length = work.encoders[encoder].features if features else work.sequence_length
            return work.microbatch, length, self._step.backbone.hidden
        _, stage = self._decision.encoder_stage(number)
        last = stage == len(self._decision.encoders[encoder].stages) - 1
        if last and step % 2 == GRADIENT:
            return work.microbatch, work.encoders[encoder].features, self._step.backbone.hidden
        tower, spec = self._step.encoders[encoder], work.encoders[encoder]
        return self._step.sequences(encoder), spec.tokens, tower.hidden
