"""`NarrowestSource`: of several prices the one that is known best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.cost_models.costs import BatchSource, CostSource, Estimate, Work
from foreplan.datasets.program import Program


class NarrowestSource:
    """A `CostSource` that answers with the estimate whose interval is narrowest, as a factor.

    A profile of few programs is extrapolated far, and says so by its interval; a fit beside it
    knows more then, and less of what lies between measured programs.

    Args:
        sources: all are asked; of equally narrow ones the first counts.
    """

    def __init__(self, sources: Sequence[CostSource]) -> None:
        self.sources = tuple(sources)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds; ``None`` where no source can.

        Raises:
            MissingDataError: a source refuses the work for all.
        """
        answers = (source.estimate(work, device) for source in self.sources)
        found = [answer for answer in answers if answer is not None]
        return min(found, key=_width, default=None)

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Price what `estimate` will be asked for."""
        for source in self.sources:
            if isinstance(source, BatchSource):
                source.prepare(programs, device)


def _width(estimate: Estimate) -> float:
    if estimate.high_s == estimate.low_s:
        return 1.0
    return estimate.high_s / estimate.low_s if estimate.low_s > 0.0 else math.inf
