"""`operands`: which gradients the backward pass of a captured graph computes.

Autograd computes the gradient by an operand where that depends on a parameter that is trained, and
no other: a network's first convolution has none by its images, and what is made of positions or
masks alone has none at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from foreplan.datasets.graphs.operator_call import OperatorCall, described_tensors, dtype_name
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode

#: Products whose first operand is added, not multiplied.
BIAS_FIRST = frozenset({"addmm", "baddbmm", "addbmm"})
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


class Visit(NamedTuple):
    """An operator of a pass, as a backward pass comes by.

    Attributes:
        node: the operator.
        readers: how often operators and views that a gradient comes back from read its result.
        views: calls that make views, between the operator before and this one.
    """

    node: OperatorNode
    readers: int
    views: tuple[OperatorCall, ...]


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


def visits(graph: OperatorGraph) -> tuple[list[Visit], list[OperatorCall]]:
    """Operators in the order of execution, and the views behind the last one.

    Args:
        graph: captured with ``eager=True``.
    """
    nodes = {node.name: node for node in graph.operators()}
    found: list[Visit] = []
    views: list[OperatorCall] = []
    for call in graph.calls:
        if call.operator:
            found.append(Visit(nodes[call.operator], call.readers, tuple(views)))
            views = []
        else:
            views.append(call)
    return found, views


def sums(calls: Iterable[OperatorCall]) -> dict[str, int]:
    """How many gradients are added up by each operator's result, and by views of it."""
    found: dict[str, int] = {}
    made: dict[str, str] = {}
    for call in calls:
        made[call.name] = call.operator or (made.get(call.reads[0], "") if call.reads else "")
        found[made[call.name]] = found.get(made[call.name], 0) + max(0, call.readers - 1)
    return found


def tied_parameters(graph: OperatorGraph) -> list[tuple[tuple[int, ...], str]]:
    """Shape and data type of each sum of a parameter's gradients, of those that are read again."""
    seen = set[str]()
    found = []
    for call in graph.calls:
        tensors = described_tensors(call.arguments)
        for name, gradient, parameter, (shape, _, kind) in zip(
            call.reads, call.gradients, call.parameters, tensors, strict=True
        ):
            if gradient and parameter:
                if name in seen:
                    found.append((tuple(shape), dtype_name(kind)))
                seen.add(name)
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


def bias_first(node: OperatorNode) -> bool:
    """Whether a product's first operand is added, not multiplied."""
    return node.target.rpartition(".")[2] in BIAS_FIRST


def product_gradients(node: OperatorNode, read: Iterable[Operand]) -> ProductGradients:
    """Which of a product's gradients are computed."""
    wanted = [operand.gradient for operand in read]
    if bias_first(node):
        wanted = [*wanted[1:], wanted[0]]
    left, right, *bias = wanted if len(wanted) > 1 else 2 * wanted
    return ProductGradients(left, right, any(bias))
