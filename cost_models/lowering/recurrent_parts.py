"""`recurrent_parts`: the operators that a recurrent layer is made of, on one device.

For each layer and direction one product takes the inputs of all steps; then, step by step, a small
product takes the state, and gates are computed element by element. Weights are the same at every
step, so that what a step reads lies in caches. Three ways to run that:

- torch on a processor makes every call of every step (`RNN.cpp`): products by the state, additions
  of what the input gave, each gate by itself; autograd goes back through all of them, and adds up
  the weights' gradients step by step.
- oneDNN runs a long short-term memory without projections on a processor, and cuDNN all of them on
  a GPU: gates are one map, and weights' gradients are one product over all steps.

Counts are held against what torch runs in ``tests/cost_models/lowering/test_recurrent_parts.py``.

Shape legend: ``T`` steps, ``B`` rows, ``H`` hidden, ``P`` outputs, ``G`` = gates x hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

from foreplan.datasets.device import Device
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program, Variant, program

GRADIENT = "_gradient"

#: Maps of a step by kernel: name, gates it goes over at once (0: one state), tensors, how often.
_FORWARD = MappingProxyType({
    "torch.lstm": (
        ("add_", True, 2, 1), ("sigmoid_", False, 1, 3), ("tanh_", False, 1, 1),
        ("mul", False, 2, 3), ("add_", False, 2, 1), ("tanh", False, 1, 1),
    ),
    "torch.gru": (
        ("add_", False, 2, 3), ("sigmoid_", False, 1, 2), ("mul_", False, 2, 2),
        ("add", False, 2, 1), ("tanh_", False, 1, 1), ("sub", False, 2, 1),
    ),
    "torch.rnn_tanh": (("add_", True, 2, 1), ("tanh", False, 1, 1)),
    "torch.rnn_relu": (("add_", True, 2, 1), ("relu", False, 1, 1)),
})  # fmt: skip
#: The same of autograd: how often in all steps, and how often less, as the first has none before.
_BACKWARD = MappingProxyType({
    "torch.lstm": (
        ("mul", False, 2, 6, 1), ("tanh_backward", False, 2, 2, 0),
        ("sigmoid_backward", False, 2, 3, 0), ("cat", True, 1, 1, 0), ("add", False, 2, 1, 1),
    ),
    "torch.gru": (
        ("mul", False, 2, 4, 0), ("neg", False, 1, 1, 0), ("add", False, 2, 3, 2),
        ("tanh_backward", False, 2, 1, 0), ("sigmoid_backward", False, 2, 2, 0),
        ("cat", True, 1, 2, 0),
    ),
    "torch.rnn_tanh": (("tanh_backward", False, 2, 1, 0), ("add", False, 2, 1, 1)),
    "torch.rnn_relu": (("threshold_backward", False, 2, 1, 0), ("add", False, 2, 1, 1)),
})  # fmt: skip

#: Programs and how often each runs.
Counted = list[tuple[Program, int]]


class RecurrentParts(NamedTuple):
    """What a recurrent layer is made of.

    Attributes:
        once: over all steps.
        steps: one after the other, on operands that stay in caches.
        fused: whether a library runs all of it in one call for each layer and direction.
    """

    once: Counted
    steps: Counted
    fused: bool


class _Layer(NamedTuple):
    """One layer in one direction."""

    T: int
    B: int
    inputs: int
    H: int
    P: int
    G: int
    variant: Variant
    by_input: bool  # whether the gradient by what it reads is computed

    def linear(self, rows: int, n: int, k: int, gradient: str = "") -> Program:
        kernel = Variant(self.variant.storage, self.variant.compute, f"torch.linear{gradient}")
        return program("linear", kernel, rows=rows, n=n, k=k)

    def wide(self, name: str, rows: int, cols: int, inputs: int) -> Program:
        kernel = Variant(self.variant.compute, self.variant.compute, f"torch.{name}")
        return program("elementwise", kernel, rows=rows, cols=cols, inputs=inputs)

    def total(self, rows: int, cols: int) -> Program:
        kernel = Variant(self.variant.compute, self.variant.compute, "torch.backward")
        return program("reduction", kernel, rows=rows, cols=cols)


def is_recurrent(item: Program) -> bool:
    """Whether a program is a recurrent layer, or its gradient."""
    return item.op.removesuffix(GRADIENT) == "recurrent"


def recurrent_parts(item: Program, device: Device) -> RecurrentParts:
    """The parts of a recurrent layer or of its gradient on a device.

    Args:
        item: of the kind that `is_recurrent` knows.
        device: whose kind decides which library runs it.
    """
    d = item.dims
    kernel = item.variant.kernel.removesuffix(INPUT_GRADIENT)
    fused = device.kind != "cpu" or (kernel == "torch.lstm" and d["outputs"] == d["hidden"])
    backward = item.op.endswith(GRADIENT)
    once: dict[Program, int] = {}
    steps: dict[Program, int] = {}
    for layer in _layers(item):
        if backward:
            parts = _fused_back(layer) if fused else _native_back(layer, _BACKWARD[kernel])
        else:
            parts = _fused(layer) if fused else _native(layer, _FORWARD[kernel])
        for found, counted in zip((once, steps), parts, strict=True):
            for part, count in counted:
                if count:
                    found[part] = found.get(part, 0) + count * d["directions"]
        if d["directions"] > 1 and not backward:
            joined = layer.wide("cat", layer.T * layer.B, 2 * layer.P, 1)
            once[joined] = once.get(joined, 0) + 1
        elif d["directions"] > 1 and layer.by_input:  # which both directions read
            both = layer.wide("add", layer.T * layer.B, layer.inputs, 2)
            once[both] = once.get(both, 0) + 1
    if not fused and not backward:
        sizes = [d["outputs"], d["hidden"]] if kernel == "torch.lstm" else [d["outputs"]]
        for size in sizes:  # the last states
            last = layer.wide("stack", d["layers"] * d["directions"] * d["rows"], size, 1)
            once[last] = once.get(last, 0) + 1
    return RecurrentParts(list(once.items()), list(steps.items()), fused)


def _layers(item: Program) -> Iterator[_Layer]:
    d, v = item.dims, item.variant
    wanted = v.kernel.endswith(INPUT_GRADIENT)
    for at in range(d["layers"]):
        source = d["inputs"] if at == 0 else d["directions"] * d["outputs"]
        yield _Layer(
            d["steps"], d["rows"], source, d["hidden"], d["outputs"], d["gates"] * d["hidden"],
            v, wanted or at > 0,
        )  # fmt: skip


def _fused(a: _Layer) -> tuple[Counted, Counted]:
    step = [(a.linear(a.B, a.G, a.P), a.T), (a.wide("gates", a.B, a.H, 2 * a.G // a.H + 1), a.T)]
    if a.P != a.H:
        step.append((a.linear(a.B, a.P, a.H), a.T))
    return [(a.linear(a.T * a.B, a.G, a.inputs), 1)], step


def _native(
    a: _Layer, maps: tuple[tuple[str, bool, int, int], ...]
) -> tuple[Counted, Counted]:  # fmt: skip
    step = [(a.linear(a.B, a.G, a.P), a.T)]
    step += [
        (a.wide(name, a.B, a.G if all_gates else a.H, inputs), count * a.T)
        for name, all_gates, inputs, count in maps
    ]
    if a.P != a.H:
        step.append((a.linear(a.B, a.P, a.H), a.T))
    stacked = a.wide("stack", a.T * a.B, a.P, 1)
    return [(a.linear(a.T * a.B, a.G, a.inputs), 1), (stacked, 1)], step


def _by_weights(a: _Layer, rows: int) -> Counted:
    found = [(a.linear(a.G, a.P, rows, WEIGHT_GRADIENT), 1)]
    if a.P != a.H:
        found.append((a.linear(a.P, a.H, rows, WEIGHT_GRADIENT), 1))
    return found


def _by_source(a: _Layer) -> Counted:
    found = [(a.linear(a.G, a.inputs, a.T * a.B, WEIGHT_GRADIENT), 1)]
    found.append((a.total(a.G, a.T * a.B), 1))
    if a.by_input:
        found.append((a.linear(a.T * a.B, a.inputs, a.G, INPUT_GRADIENT), 1))
    return found


def _fused_back(a: _Layer) -> tuple[Counted, Counted]:
    gates = a.wide("gates_backward", a.B, a.H, 2 * a.G // a.H + 2)
    step = [(a.linear(a.B, a.P, a.G, INPUT_GRADIENT), a.T), (gates, a.T)]
    if a.P != a.H:
        step.append((a.linear(a.B, a.H, a.P, INPUT_GRADIENT), a.T))
    return _by_source(a) + _by_weights(a, a.T * a.B), step


def _native_back(
    a: _Layer, maps: tuple[tuple[str, bool, int, int, int], ...]
) -> tuple[Counted, Counted]:  # fmt: skip
    step = [(a.linear(a.B, a.P, a.G, INPUT_GRADIENT), a.T - 1), (a.total(a.G, a.B), a.T)]
    if a.P != a.H:
        step.append((a.linear(a.B, a.H, a.P, INPUT_GRADIENT), a.T))
        # By the output and by the state, which the next step read.
        step.append((a.wide("add", a.B, a.P, 2), a.T - 1))
    step += [
        (a.wide(name, a.B, a.G if all_gates else a.H, inputs), count * a.T - less)
        for name, all_gates, inputs, count, less in maps
    ]
    weights = _by_weights(a, a.B)
    step += [(part, a.T) for part, _ in weights]
    # Autograd adds up what each step says of the weights and of the bias.
    step += [(a.wide("add", p.dims["rows"], p.dims["n"], 2), a.T - 1) for p, _ in weights]
    step.append((a.wide("add", 1, a.G, 2), a.T - 1))
    return [*_by_source(a), (a.wide("stack", a.T * a.B, a.G, 1), 1)], step
