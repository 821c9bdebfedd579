"""Predicted source: prices of programs on zoo devices that were never profiled."""

from __future__ import annotations

from collections.abc import Iterable

from foreplan.cost_models.costs import Estimate, Work
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets import device_zoo
from foreplan.datasets.program import Program


class PredictedSource:
    """A `CostSource` that asks a `Predictor`.

    Answers for `Program`s on devices whose name the zoo knows; ``None`` for everything else, and
    for what the predictor says is outside of what it saw.

    Args:
        predictor: the loaded model; ``None`` loads ``pretrained:ops`` when first asked.
    """

    def __init__(self, predictor: Predictor | None = None) -> None:
        self._predictor = predictor
        self._known: dict[tuple[Program, str], Estimate | None] = {}

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds, or ``None``."""
        if not isinstance(work, Program) or not device_zoo.is_known(device):
            return None
        if (work, device) not in self._known:
            self.prepare([work], device)
        return self._known[work, device]

    def prepare(self, programs: Iterable[Program], device: str) -> None:
        """Predict many programs at once, a hundred times cheaper than one by one."""
        if self._predictor is None:
            self._predictor = Predictor.load()
        wanted = [work for work in dict.fromkeys(programs) if (work, device) not in self._known]
        for work, found in zip(wanted, self._predictor.supported(wanted, device), strict=True):
            self._known[work, device] = found
