"""`HostPrices`: what it costs a machine's host to issue a pass, by kind of ATen call.

An eager pass that the host decides takes as long as Python, dispatch, autograd and launches take,
and that is neither the same for every call (a convolution costs three times an addition) nor a
matter of calls alone (BERT's modules run half as much Python again as OPT's for fewer calls). So

    host = factor * (sum over calls of the price of their kind) + line_s * lines of Python

a forward pass; backward and update have no Python of the model. Prices are measured on single
calls of small operands, which the device finishes before the host asks again (`host_calls`); lines
are counted, not timed (`python_lines`); factor and ``line_s`` are fitted to small networks that are
none of the checked ones (`calibrate`): a call in a network finds the host's caches colder than
in a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.graph_programs import PARTS, Part, Phase, Step
from foreplan.datasets.operator_graph import OperatorGraph, OperatorNode

Floats = NDArray[np.float64]

#: How a call is issued: without gradients, recording for them, and its gradients.
Mode = str
MODES: tuple[Mode, ...] = ("inference", "forward", "backward")

#: Kind of a call whose own price is not known.
_USUAL = "add"
#: A call that only makes a view of its operand.
VIEW = "view"


class HostCall(NamedTuple):
    """One operator as the host issues it.

    Attributes:
        kind: names a price.
        views: calls before it that only make views of its operands.
        gradients: whether a training step goes back through it.
        sums: gradients that are added up because several operators read its result.
    """

    kind: str
    views: int
    gradients: bool
    sums: int


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
    def of(cls, graph: OperatorGraph, lines: int) -> Issue:
        """The calls of a captured graph."""
        nodes = [node for node in graph.operators() if node.op != "input"]
        first = next((i for i, node in enumerate(nodes) if node.parameters), len(nodes))
        calls = [
            HostCall(
                host_kind(node), node.calls - 1,
                index >= first and node.dtype in ("fp64", "fp32", "bf16", "fp16")
                and node.op not in ("create", "unknown") and "rotary" not in node.module,
                max(0, graph.graph.out_degree(node.name) - 1),
            )
            for index, node in enumerate(nodes)
        ]  # fmt: skip
        return cls(calls, lines, len(graph.parameters))


def host_kind(node: OperatorNode) -> str:
    """The kind of an operator's call: what else than its name changes the host's work is added."""
    name = node.target.rpartition(".")[2]
    if node.op == "convolution":
        source, weight = node.inputs[0], node.inputs[1]
        taps = "1" if max(weight[2:]) == 1 else "n"
        if weight[1] != source[1]:
            return "conv grouped"
        strided = node.outputs[0][2:] != source[2:]
        return f"conv {taps}{' strided' if strided else ''}"
    if name == "linear" and len(node.parameters) > 1:
        return "linear bias"
    if name in ("add", "mul", "sub", "div") and len(node.inputs) < 2:
        return f"{name} scalar"
    if node.op == "attention" and len(node.inputs) > 1 and node.inputs[0] != node.inputs[1]:
        return f"{name} grouped"
    return name


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


def calibrate(prices: HostPrices, seen: Iterable[tuple[Issue, Mapping[Mode, float]]]) -> HostPrices:
    """Fit factors and seconds of a line to networks whose device never makes the host wait.

    Args:
        prices: of single calls.
        seen: what each network asks, and the seconds of its parts by mode.
    """
    networks = list(seen)
    factor, line = dict(prices.factor), dict(prices.line_s)
    for mode in MODES:
        columns = np.array([
            [prices.sum_s(issue, mode), 0.0 if mode == "backward" else float(issue.lines)]
            for issue, _ in networks
        ])  # fmt: skip
        target = np.array([seconds[mode] for _, seconds in networks])
        # Relative errors; neither may be negative.
        scaled = columns / target[:, None]
        factor[mode], line[mode] = _not_negative(scaled)
    return HostPrices(prices.call_s, prices.update_s, factor, line)


def _not_negative(scaled: Floats) -> tuple[float, float]:
    """Least squares of ``scaled @ x = 1`` over x >= 0, two unknowns."""
    best, found = np.inf, (0.0, 0.0)
    for free in ((0, 1), (0,), (1,)):
        part = scaled[:, free]
        if not part.any(axis=0).all():
            continue
        x = np.zeros(2)
        x[list(free)] = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
        error = float(((scaled @ x - 1) ** 2).sum())
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
