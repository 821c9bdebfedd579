"""`processor_host_s`: what a processor takes to issue a pass's calls, beside their own times.

Rates of processors were timed on calls in a loop, one kind at a time. In a pass each ATen call,
views among them, stands behind lines of Python, its dispatch and, in the forward pass of a training
step, the node that autograd makes for it and a result whose memory was last used a step ago. Nodes
are all that the backward pass has of it. An update goes through lists of tensors.

Constants are `fitted`, in calls of the device (1.0 us there), to least mean absolute error of 58
passes of eleven networks that no table of docs/results/end_to_end.md scores, on one core of an EPYC
(Zen 5): ``tests/benchmarks/other_networks.py``, ``datasets/measured/epyc_networks_others.json``.
A share of the operators' time in its place, or beside it, said less.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.lowering.graph_step import Part, Step
from foreplan.cost_models.lowering.recurrent_parts import is_recurrent
from foreplan.cost_models.roofline import launch_s
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Calls' worth of time for each ATen call of an inference, and of the parts of a training step; of
#: an update for each tensor.
_INFERENCE = 5.5
_TRAINING = MappingProxyType[Part, float](
    {"forward": 11.5, "loss": 11.5, "backward": 5.5, "optimizer": 10.75}
)
#: Prices that hold it: of profiles, which add it by program (`tables`), and what users gave.
_WHOLE = frozenset({"given", "measured", "interpolated", "extrapolated"})


def processor_host_s(
    steps: Sequence[Step], prices: Sequence[Estimate], device: Device
) -> list[float]:
    """Seconds before each step (N,).

    Args:
        steps: of a pass, from `graph_programs` (N,).
        prices: of each (N,).
        device: a processor.
    """
    call_s = launch_s(device)
    trains = any(step.part != "forward" for step in steps)
    return [
        0.0 if price.source in _WHOLE
        else call_s * _issued(step) * (_TRAINING[step.part] if trains else _INFERENCE)
        for step, price in zip(steps, prices, strict=True)
    ]  # fmt: skip


def _issued(step: Step) -> int:
    """Calls of a step; what a kernel calls by itself is in its price (`composed`)."""
    work = step.work
    alone = isinstance(work, Program) and (work.op == "bilinear" or is_recurrent(work))
    return 1 if alone else step.calls
