"""One stage of one replica, or its part of one, in its rank's process; imports torch."""

from __future__ import annotations

from typing import Any

import torch

from foreplan.cost_models.schedule import Action
from foreplan.planner.base import Problem
from foreplan.planner.serving.kernels import stage_kernels_of
from foreplan.planner.serving.planner import serving_model
from foreplan.planner.serving.replica_spec import ReplicaDecision


class ReplicaKernels:
    """Carries out a rank's actions as in a serving plan; results are named by replica.

    Args:
        problem: of this replica, its own batch.
        replica: the replica.
        number: which replica of the plan it is.
        rank: which of its ranks.
        mode: as in `foreplan.planner.serving.kernels.ServingKernels`.

    Attributes:
        keeps_buffers: as there.
    """

    def __init__(
        self, problem: Problem[Any], replica: ReplicaDecision, number: int, rank: int, mode: str
    ) -> None:
        self._name = f"replica {number}"
        self._own = stage_kernels_of(
            serving_model(problem), problem.workload, replica, rank, mode, problem.seed
        )
        self.keeps_buffers = self._own.keeps_buffers

    def reset(self) -> None:
        """Forget the last run."""
        self._own.reset()

    def run(self, action: Action) -> None:
        """Take a micro-batch through the stage, or up to the next exchange."""
        self._own.run(action)

    def payload(self, action: Action) -> torch.Tensor:
        """What the micro-batch's last pass made."""
        return self._own.payload(action)

    def buffer(self, action: Action) -> torch.Tensor:
        """Where hidden states or token ids arrive."""
        return self._own.buffer(action)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held by the ledger's items."""
        return self._own.memory_bytes()

    def result(self) -> dict[str, Any]:
        """What the stage says, by the replica's name."""
        found = self._own.result()
        return {self._name: found} if found else {}
