"""One stage of one replica in its rank's process; imports torch."""

from __future__ import annotations

from typing import Any

from foreplan.planner.base import Problem
from foreplan.planner.serving.kernels import ServingKernels
from foreplan.planner.serving.planner import serving_model
from foreplan.planner.serving.replica_spec import ReplicaDecision


class ReplicaKernels(ServingKernels):
    """Carries out a replica's stage; the same as in a serving plan, results named by replica.

    Args:
        problem: of this replica, its own batch.
        replica: the replica.
        number: which replica of the plan it is.
        stage: which of its stages.
        mode: as in `ServingKernels`.
    """

    def __init__(
        self, problem: Problem[Any], replica: ReplicaDecision, number: int, stage: int, mode: str
    ) -> None:
        super().__init__(
            serving_model(problem), problem.workload, replica, stage, mode, problem.seed
        )
        self._name = f"replica {number}"

    def result(self) -> dict[str, Any]:
        """What `ServingKernels` says, by the replica's name."""
        found = super().result()
        return {self._name: found} if found else {}
