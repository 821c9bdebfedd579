"""Predicted source: prices of programs on zoo devices that were never profiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreplan.cost_models.costs import Estimate, Work
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.rates.rate_law import COLD, Waits
from foreplan.cost_models.roofline import unpacking
from foreplan.cost_models.sources.expert_parts import expert_parts, on_a_gpu
from foreplan.cost_models.sources.replayed_kernels import (
    attention_floor_s,
    cache_unpacking_s,
    recorded_share,
    replayed,
)
from foreplan.cost_models.sources.special_attention import special_attention_parts
from foreplan.cost_models.unpacking import (
    unpacked_weights,
    unpacking_floor_s,
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
        read_bandwidth: of them bytes a second of memory that is only read, where that is known.
        switch_s: of them seconds from one program to the next, where passes are replayed from
            graphs (``Profile.switch_s``): `replayed_kernels` prices what it knows then.
        waits: of processors what the caches hold of the pass; see `reuse.pass_waits`.
    """

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        devices: Mapping[str, Device] | None = None,
        read_bandwidth: Mapping[str, float] | None = None,
        switch_s: Mapping[str, float] | None = None,
        waits: Mapping[str, Waits] | None = None,
    ) -> None:
        self._read_bandwidth = dict(read_bandwidth or {})
        self._switch_s = dict(switch_s or {})
        self._waits = dict(waits or {})
        self._predictor = predictor
        self._devices = dict(devices or {})
        self._known: dict[tuple[Program, str], Estimate | None] = {}

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds, or ``None``."""
        if not isinstance(work, Program) or not self._knows(device):
            return None
        if (work, device) not in self._known:
            self.prepare([work], device)
        return self._known[work, device]

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Predict many programs at once, a hundred times cheaper than one by one."""
        if not self._knows(device):
            return
        if self._predictor is None:
            self._predictor = Predictor.load()
        wanted = [work for work in dict.fromkeys(programs) if (work, device) not in self._known]
        target = self._devices.get(device, device)
        figures = target if isinstance(target, Device) else device_zoo.device(target)
        shares = {
            work: expert_parts(work, figures)
            or special_attention_parts(work, figures)
            or [(work, 1.0)]
            for work in wanted
        }
        parts = list(dict.fromkeys(part for each in shares.values() for part, _ in each))
        found = self._found(parts, device, target, figures)
        for part, estimate in found.items():
            if estimate is not None and figures.kind == "cpu":
                continue  # a processor's rates have unpacking among their terms
            if estimate is not None and unpacked_weights(part, figures):
                # The tables that it was trained on know kernels that unpack in registers alone.
                extra, least_s = unpacking(part, figures), writing_s(part, figures)
                if least_s is None and device in self._switch_s:
                    least_s = cache_unpacking_s(part, figures)
                if least_s is not None:
                    extra = extra.times(least_s / extra.mean_s)
                whole_s = Estimate.total([estimate, extra])
                found[part] = replace(whole_s, source=estimate.source)
            elif estimate is not None:
                floor_s = unpacking_floor_s(part, figures)
                if device in self._switch_s:
                    floor_s = max(floor_s, attention_floor_s(part, figures))
                if floor_s > estimate.mean_s:
                    found[part] = estimate.times(floor_s / estimate.mean_s)
            if device in self._switch_s:
                reads = part.op in ("linear", "attention")
                reader = self._reader(figures, device) if reads else figures
                known = replayed(part, reader, self._switch_s[device])
                if known is None and (learnt := found[part]) is not None:
                    known = learnt.times(recorded_share(part, figures))
                found[part] = known
        for work, each in shares.items():
            priced = list[Estimate]()
            for part, share in each:
                if (estimate := found[part]) is not None:
                    if figures.kind != "cpu":
                        estimate = on_a_gpu(work, part, estimate)
                    priced.append(estimate.times(share))
            whole = len(priced) == len(each)
            self._known[work, device] = Estimate.total(priced) if whole else None

    def _knows(self, device: str) -> bool:
        return device in self._devices or device_zoo.is_known(device)

    def _reader(self, figures: Device, name: str) -> Device:
        """The device as what only reads sees it."""
        fastest = max(self._read_bandwidth.get(name, 0.0), figures.memory_bandwidth or 0.0)
        return figures.model_copy(update={"memory_bandwidth": fastest or None})

    def _found(
        self, parts: list[Program], name: str, device: str | Device, figures: Device
    ) -> dict[Program, Estimate | None]:
        """What the predictor says; products see how fast the device reads its weights."""
        assert self._predictor is not None
        reader = self._reader(device, name) if isinstance(device, Device) else device
        products = [part for part in parts if part.op == "linear"]
        others = [part for part in parts if part.op != "linear"]
        asked = [_multiplied(part, figures) for part in products]
        attended = [_attended(part, figures) if name in self._switch_s else part for part in others]
        waits = self._waits.get(name, COLD)
        return dict(
            zip(
                [*products, *others],
                [*self._predictor.supported(asked, reader, waits=waits),
                 *self._predictor.supported(attended, device, waits=waits)],
                strict=True,
            )
        )  # fmt: skip


def _multiplied(part: Program, figures: Device) -> Program:
    """What multiplies: a product in bf16, where writing the weight out before has its own price."""
    if writing_s(part, figures) is None:
        return part
    return replace(part, variant=Variant("bf16", "bf16", "torch.linear"))


def _attended(part: Program, figures: Device) -> Program:
    """What attends: keys and values in the compute dtype, where making these has its own price."""
    if cache_unpacking_s(part, figures) is None:
        return part
    compute = part.variant.compute
    return replace(part, variant=Variant(compute, compute, "torch.sdpa"))
