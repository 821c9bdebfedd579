"""`operands`: which gradients the backward pass of a captured graph computes.

Autograd computes the gradient by an operand where that depends on a parameter that is trained, and
no other: a network's first convolution has none by its images, and what is made of positions or
masks alone has none at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from foreplan.datasets.operator_call import described_tensors
from foreplan.datasets.operator_graph import OperatorGraph, OperatorNode

#: Products whose first operand is added, not multiplied.
_BIAS_FIRST = frozenset({"addmm", "baddbmm", "addbmm"})
#: What has no backward pass, or none that is known.
_NO_BACKWARD = frozenset({"create", "unknown", "input"})


class Operand(NamedTuple):
    """A tensor that an operator reads.

    Attributes:
        shape: its extents.
        gradient: whether a training step computes the gradient by it.
    """

    shape: tuple[int, ...]
    gradient: bool


class ProductGradients(NamedTuple):
    """Which gradients of ``left @ right + bias`` are computed."""

    left: bool
    right: bool
    bias: bool


#: Operands of each operator by its name.
Operands = Mapping[str, Sequence[Operand]]


def operands(graph: OperatorGraph) -> Operands:
    """What each operator reads, in the order of its call.

    Args:
        graph: captured with ``eager=True``.
    """
    found: dict[str, list[Operand]] = {}
    for call in graph.calls:
        if call.operator:
            shapes = (tuple(shape) for shape, _, _ in described_tensors(call.arguments))
            found.setdefault(call.operator, []).extend(
                Operand(shape, gradient)
                for shape, gradient in zip(shapes, call.gradients, strict=True)
            )
    return found


def trained_parameters(graph: OperatorGraph) -> dict[str, int]:
    """Sizes in bytes of the parameters that get a gradient, by name; no others are updated."""
    found = {
        name
        for call in graph.calls
        for name, gradient, parameter in zip(
            call.reads, call.gradients, call.parameters, strict=True
        )
        if gradient and parameter
    }
    return {name: size for name, size in graph.parameters.items() if name in found}


def has_backward(node: OperatorNode, read: Operands) -> bool:
    """Whether a training step goes back through an operator."""
    return node.op not in _NO_BACKWARD and any(o.gradient for o in read.get(node.name, ()))


def gradient_readers(graph: OperatorGraph, read: Operands) -> dict[str, int]:
    """How many operators a gradient by each operator's result comes back from."""
    back = {node.name: has_backward(node, read) for node in graph.operators()}
    return {name: sum(back[other] for other in graph.graph.successors(name)) for name in back}


def product_gradients(node: OperatorNode, read: Iterable[Operand]) -> ProductGradients:
    """Which of a product's gradients are computed."""
    wanted = [operand.gradient for operand in read]
    if node.target.rpartition(".")[2] in _BIAS_FIRST:
        wanted = [*wanted[1:], wanted[0]]
    left, right, *bias = wanted if len(wanted) > 1 else 2 * wanted
    return ProductGradients(left, right, any(bias))
