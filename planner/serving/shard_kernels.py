"""`ShardKernels`: one of several devices that share a stage, in its rank's process; imports torch.

An action of the phase's name is one piece of a pass, up to the next exchange; the pieces of a
micro-batch's pass follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from foreplan.cost_models.schedule import Action
from foreplan.datasets.models.model import Model
from foreplan.planner.serving.kernels import ServingKernels
from foreplan.planner.serving.pricing import DECODE, PREFILL
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload
from foreplan.planner.verify.shard_stage import ShardStage

_PHASE = {PREFILL: 0, DECODE: 1}


class ShardKernels(ServingKernels):
    """See the module and `ServingKernels`.

    Args:
        model, workload, decision, stage, mode, seed: as of `ServingKernels`.
        lane: which of the stage's devices.
    """

    recordable: ClassVar[bool] = False

    def __init__(
        self, model: Model, workload: ServingWorkload, decision: ServingDecision, stage: int,
        mode: str, seed: int, *, lane: int,
    ) -> None:  # fmt: skip
        self._lane, self._degree = lane, decision.stages[stage].degree
        self._walks: dict[tuple[str, int], Iterator[Tensor]] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._exact: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        super().__init__(model, workload, decision, stage, mode, seed)

    def _make_stage(self, model: Model, start: int, end: int, **options: Any) -> ShardStage:
        return ShardStage(model, start, end, degree=self._degree, lane=self._lane, **options)

    def reset(self) -> None:
        """Forget the last run."""
        super().reset()
        self._walks.clear()
        self._left.clear()
        self._exact.clear()

    @torch.no_grad()
    def run(self, action: Action) -> None:
        """Take a micro-batch up to the next exchange, or to the end of the stage."""
        phase, index, step = action.op, action.microbatch, action.step
        key = phase, index
        if key not in self._walks:
            stage = self._stage
            assert isinstance(stage, ShardStage)
            x = self._input(phase, index, step)
            self._walks[key] = stage.passing(_PHASE[phase], index, step, x)
            self._left[key] = stage.exchanges
        if key in self._exact:
            part, total = self._exact.pop(key)
            part.copy_(total)
        made = next(self._walks[key])
        if self._left[key]:
            self._left[key] -= 1
            if self._mode == "reference" and made.dtype == torch.float32:
                # In fp64 the sum does not depend on the order in which a library adds.
                self._exact[key] = made, made.double()
                made = self._exact[key][1]
        else:
            del self._walks[key]
            made = self._keep(phase, index, step, made)
        self._made[key] = made

    def result(self) -> dict[str, Any]:
        """What `ServingKernels` says, on the stage's first device; logits are of its own words."""
        return super().result() if self._lane == 0 else {}
