"""`HostCall`: an operator of a pass as the host issues it."""

from __future__ import annotations

from typing import Final, NamedTuple

from foreplan.datasets.graphs.operator_graph import OperatorNode

#: Behind the kind of a map whose other operand is a number.
SCALAR: Final = " scalar"


class HostCall(NamedTuple):
    """One operator as the host issues it.

    Attributes:
        kind: names a price; see `host_kind`.
        views: calls before it that only make views of its operands.
        gradients: whether a training step goes back through it.
        sums: gradients that are added up because several operators read its result.
    """

    kind: str
    views: int
    gradients: bool
    sums: int


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
        return f"{name}{SCALAR}"
    if node.op == "attention" and len(node.inputs) > 1 and node.inputs[0] != node.inputs[1]:
        return f"{name} grouped"
    return name
