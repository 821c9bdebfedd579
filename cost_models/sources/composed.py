"""`ComposedSource`: prices of operators that other operators make up.

Recurrent layers, bilinear forms, Fourier transforms and compilers' kernels were timed by no sweep,
nor on processors dropout, attention with it and the statistics of a batch, nor what torch's fused
layers run by a kernel of their own; their parts have prices. On a GPU these add up, one part after
the other. On a processor what is repeated step by step, and what no vector
unit does, goes by the device's figures (`near_costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreplan.cost_models.costs import CostSource, Estimate, Work, first_answers
from foreplan.cost_models.lowering.activated_product import activated_parts, activates
from foreplan.cost_models.lowering.attention_parts import (
    attention_parts,
    dropout_parts,
    drops_scores,
    within_layer,
    within_parts,
)
from foreplan.cost_models.lowering.backward_steps import DROPOUT_BACKWARD
from foreplan.cost_models.lowering.fused_program import FUSED, fused_parts
from foreplan.cost_models.lowering.recurrent_parts import (
    GRADIENT,
    Counted,
    is_recurrent,
    recurrent_parts,
)
from foreplan.cost_models.roofline import launch_s
from foreplan.cost_models.sources.near_costs import (
    BY_ELEMENT,
    known,
    near_s,
    ready_s,
    transform_s,
)
from foreplan.cost_models.sources.recurrent_steps import steps_s
from foreplan.datasets.device import Device
from foreplan.datasets.operators import OF_BATCH
from foreplan.datasets.program import CHANNELS_LAST, Program, Variant, program

#: Low and high end of what goes by figures alone over its mean (assumed: the factor aimed at).
_WITHIN = 1.5
#: A call of autograd and its node over a call (assumed).
_NODE = 2
#: Calls of a bilinear form for each output beside its parts (`Linear.cpp`): three operands are
#: views, of which two are laid out.
_BESIDE = 5
_OPS = frozenset({"fft", "bilinear", FUSED})


class ComposedSource:
    """A `CostSource` of what other operators make up; ``None`` for everything else.

    Args:
        sources: price the parts, asked in order.
        device: whose figures price what is repeated on a processor.
        origin: where such a price comes from, one of `costs.SOURCES`.
    """

    def __init__(
        self, sources: Sequence[CostSource], device: Device, origin: str = "predicted"
    ) -> None:
        self._sources, self._device, self._origin = tuple(sources), device, origin
        self._known: dict[Program, Estimate] = {}

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Price all parts at once."""
        asked = [item for item in programs if self._composes(item, device)]
        parts = (part for item in asked for part, _ in self._parts(item)[0])
        new = [part for part in dict.fromkeys(parts) if part not in self._known]
        if new:
            self._known |= first_answers(self._sources, new, device)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds; ``None`` also where a part has no price."""
        if not isinstance(work, Program) or not self._composes(work, device):
            return None
        self.prepare([work], device)
        parts, rest_s = self._parts(work)
        if any(part not in self._known for part, _ in parts):
            return None
        found = [self._known[part].times(count) for part, count in parts]
        if rest_s:
            found.append(Estimate(rest_s, rest_s / _WITHIN, rest_s * _WITHIN, self._origin))
        return Estimate.total(found)

    def _composes(self, item: Program, device: str) -> bool:
        if device != self._device.name or not known(self._device):
            return False
        if item.op in _OPS or is_recurrent(item) or activates(item) or within_layer(item):
            return True
        on_cpu = (
            item.op == "dropout" or drops_scores(item) or _collects(item)
            or item.variant.kernel in BY_ELEMENT
        )  # fmt: skip
        return on_cpu and self._device.kind == "cpu"

    def _parts(self, item: Program) -> tuple[Counted, float]:
        """What sources price, and seconds of the rest."""
        device, call_s = self._device, launch_s(self._device)
        if is_recurrent(item):
            return self._recurrent(item)
        if activates(item):
            return activated_parts(item, apart=device.kind == "cpu"), 0.0
        if within_layer(item):
            return within_parts(item, apart=device.kind == "cpu"), 0.0
        if item.op == FUSED:
            return fused_parts(item), 0.0
        if item.op == "fft":
            if device.kind == "cpu":
                return [], transform_s(item, device)
            return _passes(item), 0.0
        if item.op == "bilinear":
            steps = _bilinear(item)
            if device.kind != "cpu":
                return steps, 0.0
            beside_s = _BESIDE * call_s * item.dims["outputs"]
            return [], beside_s + near_s(steps, device, call_s=call_s)
        if item.op == "dropout" or drops_scores(item):
            parts = _dropped(item) if item.op == "dropout" else attention_parts(item)
            slow = [each for each in parts if each[0].variant.kernel in BY_ELEMENT]
            return [each for each in parts if each not in slow], near_s(slow, device, call_s=call_s)
        if _collects(item):
            plain, statistics = _collected(item)
            return [(plain, 1)], near_s([(statistics, 1)], device, call_s=0.0)
        return [], near_s([(item, 1)], device, call_s=call_s)

    def _recurrent(self, item: Program) -> tuple[Counted, float]:
        device, d = self._device, item.dims
        once, steps, fused = recurrent_parts(item, device)
        if device.kind != "cpu":
            taken = steps_s(item, device)
            if taken is not None:
                return once, taken
            # Both directions of a step run side by side.
            return [*once, *((part, -(-count // d["directions"])) for part, count in steps)], 0.0
        if not fused:
            nodes = _NODE if item.op.endswith(GRADIENT) else 1
            return once, near_s(steps, device, call_s=nodes * launch_s(device))
        weights = item.flops / (2.0 * d["steps"] * d["rows"])  # in two layouts for a gradient
        laid_out_s = ready_s(weights, d["layers"] * d["directions"], device)
        return [], laid_out_s + near_s([*once, *steps], device, call_s=0.0, own=True)


def _dropped(item: Program) -> Counted:
    """Dropout as torch runs it on a processor; its gradient is a product with the noise."""
    d, v = item.dims, item.variant
    if v.kernel != DROPOUT_BACKWARD:
        return dropout_parts(d["rows"], d["cols"], v.compute)
    plain = Variant(v.compute, v.compute, "torch.mul")
    return [(program("elementwise", plain, rows=d["rows"], cols=d["cols"], inputs=2), 1)]


def _collects(item: Program) -> bool:
    """Whether a batch norm takes the batch's own statistics, channel by channel.

    torch adds them up one by one in fp64 (``batch_norm_cpu_collect_stats_contiguous_impl``); where
    channels are last, in vectors.
    """
    kernel = item.variant.kernel
    return item.op == "batch_norm" and OF_BATCH in kernel and CHANNELS_LAST not in kernel


def _collected(item: Program) -> tuple[Program, Program]:
    """The norm by statistics that are known, and what collects them."""
    d, v = item.dims, item.variant
    known_ones = replace(v, kernel=v.kernel.replace(OF_BATCH, ""))
    collecting = replace(v, kernel="torch.batch_norm_statistics")
    return (
        program("batch_norm", known_ones, **d),
        program("elementwise", collecting, rows=d["rows"], cols=d["cols"], inputs=1),
    )


def _passes(item: Program) -> Counted:
    """A Fourier transform as maps, as many as there are passes over memory."""
    d, compute = item.dims, item.variant.compute
    plain = Variant(compute, compute, "torch.fft")
    whole = program("elementwise", plain, rows=d["rows"], cols=d["cols"] * d["values"], inputs=1)
    return [(whole, d["passes"])]


def _bilinear(item: Program) -> Counted:
    """For each output a product with its matrix, one with the second operand, and a sum."""
    d, v = item.dims, item.variant
    product = Variant(v.storage, v.compute, "torch.matmul")
    total = Variant(v.compute, v.compute, "torch.add_")
    rows, second, outputs = d["rows"], d["second"], d["outputs"]
    return [
        (program("matmul", product, batch=1, m=rows, n=second, k=d["first"]), outputs),
        (program("matmul", product, batch=rows, m=1, n=1, k=second), outputs),
        (program("elementwise", total, rows=rows, cols=1, inputs=2), outputs),
    ]
