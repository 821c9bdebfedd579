"""Predicted source: prices of programs on zoo devices that were never profiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from foreplan.cost_models.costs import Estimate, Work
from foreplan.cost_models.expert_parts import expert_parts
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.roofline import unpacking
from foreplan.cost_models.unpacking import (
    unpacked_weights,
    unpacking_floor_s,
    writes_out,
    writing_s,
)
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant


class PredictedSource:
    """A `CostSource` that asks a `Predictor`.

    Answers for `Program`s on devices whose name the zoo knows; ``None`` for everything else, and
    for what the predictor says is outside of what it saw. A layer's experts cost the sum of their
    parts; see `expert_parts`.

    Args:
        predictor: the loaded model; ``None`` loads ``pretrained:ops`` when first asked.
        devices: figures of devices that the zoo lacks, by name.
    """

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        devices: Mapping[str, Device] | None = None,
    ) -> None:
        self._predictor = predictor
        self._devices = dict(devices or {})
        self._known: dict[tuple[Program, str], Estimate | None] = {}

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds, or ``None``."""
        known = device in self._devices or device_zoo.is_known(device)
        if not isinstance(work, Program) or not known:
            return None
        if (work, device) not in self._known:
            self.prepare([work], device)
        return self._known[work, device]

    def prepare(self, programs: Iterable[Program], device: str) -> None:
        """Predict many programs at once, a hundred times cheaper than one by one."""
        if self._predictor is None:
            self._predictor = Predictor.load()
        wanted = [work for work in dict.fromkeys(programs) if (work, device) not in self._known]
        target = self._devices.get(device, device)
        shares = {work: expert_parts(work) or [(work, 1.0)] for work in wanted}
        parts = list(dict.fromkeys(part for each in shares.values() for part, _ in each))
        asked = [_multiplied(part) for part in parts]
        found = dict(zip(parts, self._predictor.supported(asked, target), strict=True))
        figures = target if isinstance(target, Device) else device_zoo.device(target)
        for part, estimate in found.items():
            if estimate is not None and unpacked_weights(part):
                # The tables that it was trained on know kernels that unpack in registers alone.
                extra, least_s = unpacking(part, figures), writing_s(part, figures)
                if least_s is not None:
                    extra = extra.times(least_s / extra.mean_s)
                whole_s = Estimate.total([estimate, extra])
                found[part] = replace(whole_s, source=estimate.source)
            elif estimate is not None:
                floor_s = unpacking_floor_s(part, figures)
                if floor_s > estimate.mean_s:
                    found[part] = estimate.times(floor_s / estimate.mean_s)
        for work, each in shares.items():
            priced = [(found[part], share) for part, share in each]
            known = [estimate.times(share) for estimate, share in priced if estimate is not None]
            whole = len(known) == len(priced)
            self._known[work, device] = Estimate.total(known) if whole else None


def _multiplied(part: Program) -> Program:
    """What multiplies: a product in bf16, where a kernel has written the weight out before."""
    if part.op != "linear" or not writes_out(part):
        return part
    return replace(part, variant=Variant("bf16", "bf16", "torch.linear"))
