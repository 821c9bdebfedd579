"""`processor_host_s`: what a processor takes to issue a pass's calls, beside their own times.

Rates of processors were timed on calls in a loop, one kind at a time. In a pass each ATen call,
views among them, stands behind lines of Python, its dispatch and, in the forward pass of a training
step, the node that autograd makes for it and a result whose memory was last used a step ago. Nodes
are all that the backward pass has of it. An update goes through lists of tensors. Most of it comes
once for a part of a pass, however many calls it has: the code of the model and of torch is brought
back into the caches, the more of it the more the pass uses (`reuse`). Of few calls it stays there,
of few kinds of call it is little, and where near caches hold the pass none is brought: then a
call has its Python and its dispatch alone, and what autograd and an update make is near, too.

Constants are `fitted`, in calls of the device (0.9 us there), to least mean absolute error of 98
passes of networks that no table of docs/results/end_to_end.md scores, on one core of a quiet EPYC
(Zen 5): eleven networks, five of them with one to eight layers, and seven of the same hour as the
scored ones; ``tests/benchmarks/other_networks.py``,
``datasets/measured/epyc_networks_quiet_others.json`` and ``_quiet_depths``. Hours in which other
work ran asked for a fifth more (``epyc_networks_others.json``). A share of the operators' time in
its place, or beside it, said less. Those of near passes are fitted to the parts of passes of tiny
networks, back to back on a core of the same chip (``tests/benchmarks/small_networks.py``,
``datasets/measured/epyc_networks_tiny.json``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from types import MappingProxyType

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.lowering.graph_step import Part, Step
from foreplan.cost_models.lowering.host_call import SCALAR
from foreplan.cost_models.lowering.recurrent_parts import is_recurrent
from foreplan.cost_models.rates.reuse import near_loops, spilled_share, waiting_share, working_set
from foreplan.cost_models.roofline import launch_s
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Calls' worth of time of each ATen call and of the whole part, of an inference and of the parts of
#: a training step; of an update for each tensor.
_INFERENCE = (1.5, 1200.0)
_TRAINING = MappingProxyType[Part, tuple[float, float]](
    {"forward": (7.0, 1300.0), "loss": (7.0, 1300.0), "backward": (4.0, 550.0),
     "optimizer": (12.0, 0.0)}
)  # fmt: skip
#: Of each call of a pass that near caches hold, if not the same.
_NEAR = MappingProxyType[Part, float]({"forward": 3.0, "loss": 3.0, "optimizer": 6.0})
#: Of each call of a loop (`looped_steps`), which brings nothing: a line of Python, and autograd's
#: node of it. Read off five loops of two sizes (``tests/benchmarks/looped_calls.py``,
#: ``datasets/measured/epyc_loops.json``).
_LOOPED = MappingProxyType[Part, float]({"forward": 0.95, "loss": 0.95, "backward": 0.95})
_LOOPED_INFERENCE = 0.3
#: Of each forward one whose other operand is a number of Python's, besides: torch makes a tensor of
#: it.
_NUMBER = 0.8
#: Kinds of call from which on a part brings as much as a network does; assumed, the fewest of a
#: fitted part.
_KINDS = 6
#: Calls of a part whose code stays near; assumed, as fewest calls of a fitted part are 32.
_FEW = 25
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
    issued = [
        0 if price.source in _WHOLE else _issued(step)
        for step, price in zip(steps, prices, strict=True)
    ]
    far, brought = spilled_share(device, working_set(steps)), brought_share(steps, device)
    calls, kinds = Counter[Part](), defaultdict[Part, set[str]](set)
    loops = near_loops(steps, device)
    for step, count, looped in zip(steps, issued, loops, strict=True):
        calls[_together(step.part)] += 0 if looped else count
        if count and not looped:
            kinds[_together(step.part)].add(step.target)
    found = []
    for step, count, looped in zip(steps, issued, loops, strict=True):
        if looped:
            each = _LOOPED[step.part] if trains else _LOOPED_INFERENCE
            number = step.host is not None and step.host.kind.endswith(SCALAR)
            found.append(call_s * count * (each + _NUMBER * number))
            continue
        each, whole = _TRAINING[step.part] if trains else _INFERENCE
        near = _NEAR.get(step.part, each) if trains else each
        part = _together(step.part)
        among, known = calls[part], min(1.0, len(kinds[part]) / _KINDS)
        once = brought * whole * known * among / (among**2 + _FEW**2)
        found.append(call_s * count * (near + far * (each - near) + once))
    return found


def brought_share(steps: Sequence[Step], device: Device) -> float:
    """Share of what a pass takes for its code that its working set leaves, from 0 to 1."""
    used = working_set(steps)
    return spilled_share(device, used) * waiting_share(device, used, "wide")


def _together(part: Part) -> Part:
    """The part that a part is run with."""
    return "forward" if part == "loss" else part


def _issued(step: Step) -> int:
    """Calls of a step; what a kernel calls by itself is in its price (`composed`)."""
    work = step.work
    alone = isinstance(work, Program) and (work.op == "bilinear" or is_recurrent(work))
    return 1 if alone else step.calls
