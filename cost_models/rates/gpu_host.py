"""`gpu_host_s`: what the host of a GPU takes to issue an eager pass, where no profile says it.

A GPU that is asked for little waits for Python, dispatch, autograd and launches: of a forward pass
of few tokens or images the host decides the time. A launch alone (3 us in public tables) is a small
part of that. A part of a pass takes so long for each ATen call, longer for convolutions and batch
norms, for each view of an operand, for each tensor that gets a gradient or an update, and once for
what runs around its calls; of few calls less of that (`_FEW`).

Constants are `fitted` to the best of seven rounds on two machines of passes of 45 networks of four
layers and of six plain modules, BF16 on an H200 (``tests/benchmarks/gpu_host.py``,
``datasets/measured/h200_host.json.gz`` and ``_again``): torch 2.11 and Python 3.12 on a core of a
virtual Xeon (Sapphire Rapids, 2.1 GHz base). Rounds differ by up to 1.7 times there, and other
hosts are faster or slower: so is the interval. ``foreplan profile`` measures the host that there is
(`HostPrices`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.lowering.graph_step import Part, Step
from foreplan.cost_models.lowering.host_call import HostCall

#: Parts of a pass with constants of their own; a loss is part of its forward pass.
PARTS = ("inference", "forward", "backward", "optimizer")


class HostAsked(NamedTuple):
    """What a part of a pass asks of the host.

    Attributes:
        calls: ATen calls, of a backward pass those that it goes through; of an update none.
        long: of them convolutions and batch norms.
        views: of operands; in a backward pass with gradients that are added up.
        tensors: that get a gradient or an update.
    """

    calls: int
    long: int
    views: int
    tensors: int


class HostSeconds(NamedTuple):
    """Seconds of each of `HostAsked`, and once for a part of a pass."""

    call_s: float
    long_s: float
    view_s: float
    tensor_s: float
    once_s: float

    def of(self, asked: HostAsked) -> float:
        """Seconds of a part of a pass."""
        return float(np.dot(columns(asked), self))


#: `fitted`: see the module.
SECONDS: Mapping[str, HostSeconds] = MappingProxyType({
    "inference": HostSeconds(9.6e-6, 18.1e-6, 12.0e-6, 0.0, 211e-6),
    "forward": HostSeconds(11.9e-6, 17.3e-6, 10.3e-6, 0.0, 1043e-6),
    "backward": HostSeconds(18.6e-6, 0.0, 10.9e-6, 13.3e-6, 570e-6),
    "optimizer": HostSeconds(0.0, 0.0, 0.0, 4.5e-6, 255e-6),
})  # fmt: skip
#: Shares of the mean at the ends of the interval: nineteen of twenty parts of networks that
#: constants were not fitted to took 0.8 times or more and 1.4 or less of it in their best round,
#: rounds differ by up to 1.7 times, and hosts with faster cores than this one are assumed.
LOW, HIGH = 0.6, 1.8
#: Calls and tensors of a part that ask for half of what runs around them; assumed as a processor's.
_FEW = 25
_LONG = ("conv", "batch_norm")


def columns(asked: HostAsked) -> NDArray[np.float64]:
    """What each of `HostSeconds` is multiplied by (5,)."""
    among = asked.calls + asked.tensors
    return np.array([*asked, among**2 / (among**2 + _FEW**2) if among else 0.0])


def host_asked(
    steps: Sequence[Step], calls: Sequence[HostCall] | None = None
) -> dict[str, HostAsked]:
    """What each of `PARTS` that a pass has asks of the host.

    Args:
        steps: of a pass, from `graph_programs`.
        calls: of its forward pass, where the steps do not hold them.
    """
    calls = [s.host for s in steps if s.host is not None] if calls is None else calls
    if not calls:  # steps by hand
        calls = [HostCall(s.kind, s.calls - 1, True, 0) for s in steps if s.part == "forward"]
    trains = any(step.part == "backward" for step in steps)
    tensors = sum(step.calls for step in steps if step.part == "optimizer")
    found = {"forward" if trains else "inference": _counted(calls, 0)}
    if trains:
        back = [call for call in calls if call.gradients]
        counted = _counted(back, tensors)
        added = sum(call.sums for call in back)
        found["backward"] = counted._replace(views=counted.views + added)
    if tensors:
        found["optimizer"] = HostAsked(0, 0, 0, tensors)
    return found


def _counted(calls: Iterable[HostCall], tensors: int) -> HostAsked:
    calls = list(calls)
    long = sum(call.kind.startswith(_LONG) for call in calls)
    return HostAsked(len(calls), long, sum(call.views for call in calls), tensors)


def gpu_host_s(
    steps: Sequence[Step], calls: Sequence[HostCall] | None = None
) -> NDArray[np.float64]:
    """Seconds before each step: mean, low and high (N, 3).

    Args:
        steps: as `host_asked` (N,).
        calls: as `host_asked`.
    """
    asked = host_asked(steps, calls)
    parts = [_part(step.part, asked) for step in steps]
    issued = dict.fromkeys(asked, 0)
    for step, part in zip(steps, parts, strict=True):
        issued[part] += step.calls
    each = {part: SECONDS[part].of(asked[part]) / count for part, count in issued.items() if count}
    mean = np.array([step.calls * each[part] for step, part in zip(steps, parts, strict=True)])
    return np.outer(mean, [1.0, LOW, HIGH])


def _part(part: Part, asked: Mapping[str, HostAsked]) -> str:
    """The one of `PARTS` that a step is issued in."""
    if part in ("backward", "optimizer"):
        return part
    return "forward" if "forward" in asked else "inference"
