"""`differentiated`: which calls of a trace autograd goes back through.

A call is one where a trained parameter leads to it (else nothing is recorded) and it leads to a
result of the module (else no gradient arrives), both by calls that have a gradient: not by what a
module detaches, computes under ``torch.no_grad()``, or makes whole numbers of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.datasets.graphs._regions import WITHOUT_GRADIENT

if TYPE_CHECKING:
    import torch


class Differentiated(NamedTuple):
    """Nodes of a trace by what autograd makes of them.

    Attributes:
        requires: whether the node's value requires a gradient.
        reached: whether a gradient by it is computed, too.
    """

    requires: Mapping[torch.fx.Node, bool]
    reached: Mapping[torch.fx.Node, bool]


def differentiated(
    nodes: Sequence[torch.fx.Node],
    trained: Collection[str],
    numbers: Callable[[torch.fx.Node], bool],
    cuts: Callable[[torch.fx.Node], bool],
) -> Differentiated:
    """Follow gradients through a trace.

    Args:
        nodes: of the whole graph, in order.
        trained: names of the placeholders of trained parameters.
        numbers: whether a node's value is made of real or complex numbers.
        cuts: whether no gradient goes through a node.
    """
    requires: dict[Any, bool] = {}
    for node in nodes:
        seen = numbers(node) and not cuts(node) and WITHOUT_GRADIENT not in node.meta
        requires[node] = seen and (
            node.name in trained or any(map(requires.get, node.all_input_nodes))
        )
    reached: dict[Any, bool] = dict.fromkeys(nodes, False)
    for node in reversed(nodes):
        if node.op == "output" or _writes_alone(node):
            reached[node] = True
        if reached[node] and (requires[node] or node.op == "output"):
            for source in node.all_input_nodes:
                reached[source] = reached[source] or requires[source]
    return Differentiated(requires, reached)


def _writes_alone(node: torch.fx.Node) -> bool:
    """Whether a call writes into an operand and nobody reads its own result, as ``y[:, 0] = x``.

    What it wrote is read by other names; those are not looked for.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.users:
        return False
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
