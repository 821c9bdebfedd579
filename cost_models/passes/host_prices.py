"""`HostPrices`: what it costs a machine's host to issue a pass, by kind of ATen call.

An eager pass that the host decides takes as long as Python, dispatch, autograd and launches take,
and that is neither the same for every call (a convolution costs three times an addition) nor a
matter of calls alone (BERT's modules run half as much Python again as OPT's for fewer calls). So

    host = factor * (sum over calls of the price of their kind) + line_s * lines of Python

a forward pass; backward and update have no Python of the model. Prices are measured on single
calls of small operands, which the device finishes before the host asks again (`host_calls`); lines
are counted, not timed (`python_lines`); factor and ``line_s`` are fitted to small networks that are
none of the checked ones (`calibrate`): a call in a network finds the host's caches colder than
in a loop. ``foreplan profile`` keeps such prices, without lines, in the profile of a GPU
(`Profile.host`), and ``foreplan predict --profile`` replays with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.lowering.graph_step import PARTS, Part, Phase, Step
from foreplan.cost_models.lowering.host_call import HostCall
from foreplan.datasets.profile import Profile

Floats = NDArray[np.float64]

#: How a call is issued: without gradients, recording for them, and its gradients.
Mode = str
MODES: tuple[Mode, ...] = ("inference", "forward", "backward")

#: Kind of a call whose own price is not known.
_USUAL = "add"
#: A call that only makes a view of its operand.
VIEW = "view"


class Issue(NamedTuple):
    """What a pass asks of the host.

    Attributes:
        calls: in order.
        lines: of Python that a forward pass runs.
        tensors: parameters that an update goes through.
    """

    calls: Sequence[HostCall]
    lines: int
    tensors: int

    @classmethod
    def of(cls, steps: Iterable[Step], *, tensors: int = 0, lines: int = 0) -> Issue:
        """The calls of a pass.

        Args:
            steps: from `graph_programs`; those of a training step know their ``tensors``.
            tensors: parameters, for an inference pass whose training is asked for.
            lines: of Python; 0 where prices are without them (`HostPrices.line_s`).
        """
        steps = list(steps)
        calls = [step.host for step in steps if step.host is not None]
        update = sum(step.calls for step in steps if step.part == "optimizer")
        return cls(calls, lines, tensors or update)


@dataclass(frozen=True)
class HostPrices:
    """See the module.

    Attributes:
        call_s: seconds of a call by kind and `MODES`.
        update_s: seconds of an update: fixed, and for each tensor.
        factor: of calls in a network over calls in a loop, by mode.
        line_s: seconds of a line of Python, by mode.
    """

    call_s: Mapping[str, Mapping[Mode, float]]
    update_s: tuple[float, float]
    factor: Mapping[Mode, float]
    line_s: Mapping[Mode, float]

    def part_seconds(self, issue: Issue, phase: Phase) -> dict[Part, float]:
        """Seconds of each part of a pass; the loss is part of the forward pass."""
        mode = "inference" if phase == "inference" else "forward"
        forward = self.factor[mode] * self.sum_s(issue, mode) + self.line_s[mode] * issue.lines
        if phase == "inference":
            return {"forward": forward}
        return {
            "forward": forward,
            "backward": self.factor["backward"] * self.sum_s(issue, "backward"),
            "optimizer": self.update_s[0] + self.update_s[1] * issue.tensors,
        }

    def sum_s(self, issue: Issue, mode: Mode) -> float:
        """Seconds of the calls of a pass as they take in a loop."""
        backward = mode == "backward"
        return sum(
            self._price(call.kind, mode)
            + call.views * self._price(VIEW, mode)
            + (call.sums * self._price(_USUAL, "inference") if backward else 0.0)
            for call in issue.calls
            if call.gradients or not backward
        )

    def launches(self, steps: Sequence[Step], issue: Issue, phase: Phase) -> list[float]:
        """Seconds before each step of a pass, spread evenly over the calls of its part."""
        seconds = self.part_seconds(issue, phase)
        seconds["loss"] = 0.0  # in the forward pass
        calls = {part: sum(step.calls for step in steps if step.part == part) for part in PARTS}
        rate = {part: seconds.get(part, 0.0) / max(1, calls[part]) for part in PARTS}
        return [step.calls * rate[step.part] for step in steps]

    def _price(self, kind: str, mode: Mode) -> float:
        prices = self.call_s.get(kind, {})
        return prices[mode] if mode in prices else self.call_s[_USUAL][mode]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "call_s": {kind: dict(prices) for kind, prices in self.call_s.items()},
            "update_s": list(self.update_s),
            "factor": dict(self.factor),
            "line_s": dict(self.line_s),
        }

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> HostPrices:
        """From `document`."""
        fixed, each = document["update_s"]
        return cls(document["call_s"], (fixed, each), document["factor"], document["line_s"])


def profiled_launches(
    profile: Profile | None, steps: Sequence[Step], phase: Phase
) -> list[float] | None:
    """Seconds of the host before each step by a profile; ``None`` where it does not say them."""
    if profile is None or profile.host is None:
        return None
    prices = HostPrices.load(profile.host.model_dump())
    return prices.launches(steps, Issue.of(steps), phase)


def calibrate(prices: HostPrices, seen: Iterable[tuple[Issue, Mapping[Mode, float]]]) -> HostPrices:
    """Fit factors and seconds of a line to networks whose device never makes the host wait.

    Args:
        prices: of single calls.
        seen: what each network asks, and the seconds of its parts by mode.
    """
    networks = [
        ({mode: prices.sum_s(issue, mode) for mode in MODES}, issue.lines, seconds, seconds)
        for issue, seconds in seen
    ]
    factor, line = fit_host(networks)
    return HostPrices(prices.call_s, prices.update_s, factor, line)


def fit_host(
    networks: Sequence[
        tuple[Mapping[Mode, float], int, Mapping[Mode, float], Mapping[Mode, float]]
    ],
) -> tuple[dict[Mode, float], dict[Mode, float]]:
    """Factor of calls in a network over calls in a loop, and seconds of a line of Python, by mode.

    Args:
        networks: of each the seconds of its calls in a loop by mode, lines of Python, seconds of
            the host that both have to make, and seconds of the pass, which errors are relative to.
    """
    factor, line = {}, {}
    for mode in MODES:
        scale = np.array([whole[mode] for *_, whole in networks])
        columns = np.array([
            [calls[mode], 0.0 if mode == "backward" else float(lines)]
            for calls, lines, *_ in networks
        ])  # fmt: skip
        target = np.array([host[mode] for _, _, host, _ in networks])
        factor[mode], line[mode] = _not_negative(columns / scale[:, None], target / scale)
    return factor, line


def _not_negative(columns: Floats, target: Floats) -> tuple[float, float]:
    """Least squares of ``columns @ x = target`` over x >= 0, two unknowns."""
    best, found = np.inf, (0.0, 0.0)
    for free in ((0, 1), (0,), (1,)):
        part = columns[:, free]
        if not part.any(axis=0).all():
            continue
        x = np.zeros(2)
        x[list(free)] = np.linalg.lstsq(part, target, rcond=None)[0]
        error = float(((columns @ x - target) ** 2).sum())
        if (x >= 0).all() and error < best:
            best, found = error, (float(x[0]), float(x[1]))
    return found


def python_lines(run: Callable[[], object]) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count
