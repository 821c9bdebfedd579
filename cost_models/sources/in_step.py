"""`InStepSource`: prices of a training step's programs as a step meets them.

A profile times a program alone and on operands that no cache holds. Where ``foreplan profile`` has
also timed the programs of a pass behind one another (`foreplan.datasets.ranks.together`), prices
that come from the profile are corrected by what one rank took for that pass, over its price. What
ranks at work together take from each other on top is the simulator's
(`foreplan.planner.contention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreplan.cost_models.costs import CostSource, Estimate, Work, first_answers
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.program import Program


class InStepSource:
    """Asks sources in order, and corrects what they say of a training step's programs.

    Args:
        sources: whose prices rest on a profile.
        factors: time in a pass over the profile's, by rank label; others' prices stay.
    """

    def __init__(self, sources: Sequence[CostSource], factors: Mapping[str, float]) -> None:
        self._sources, self._factors = tuple(sources), dict(factors)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on the rank labelled ``device``.

        Raises:
            FailedProgramError: it failed there.
        """
        for source in self._sources:
            found = source.estimate(work, device)
            if found is not None:
                training = isinstance(work, Program) and is_training(work)
                return found.times(self._factors.get(device, 1.0)) if training else found
        return None

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Let the sources price programs at once."""
        first_answers(self._sources, programs, device)
