"""Puts regions of a trace in line: what runs without gradients, and under an autocast that is off.

``torch.export`` wraps calls that a module makes under ``torch.no_grad()`` (traced with gradients
on, as a training step is) or under ``torch.autocast`` into a graph of their own. Eager execution
makes the same calls one after the other; of the former no gradient comes back (`WITHOUT_GRADIENT`).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: Key of a node's ``meta``: a call that autograd does not see.
WITHOUT_GRADIENT = "foreplan_without_gradient"
#: Operands of a region's call before those that its graph reads; its graph is the last of them.
_OWN_OPERANDS = {"wrap_with_set_grad_enabled": 2, "wrap_with_autocast": 5}


def inline_regions(program: torch.export.ExportedProgram, name: str) -> None:
    """Replace regions, in place, by the calls in them.

    Args:
        program: traced; its inputs and results stay.
        name: of the module, for messages.

    Raises:
        SpecError: an autocast that is on: which operands it converts the trace does not say.
    """
    module = program.graph_module
    left = list(module.graph.nodes)
    while left:
        node = left.pop(0)
        if node.op == "call_function" and str(node.target) in _OWN_OPERANDS:
            left[:0] = _inline(module, node, name)


def under_autocast(name: str, got: str) -> SpecError:
    """What is said of a module that computes under an autocast.

    Args:
        name: of the module.
        got: the autocast.
    """
    return SpecError(
        f"module {name}", got=got,
        expected="a module that says itself what is computed in which precision",
        fix="leave autocast out, and convert module and inputs: .to(torch.bfloat16)",
    )  # fmt: skip


def _inline(
    module: torch.fx.GraphModule, node: torch.fx.Node, name: str
) -> list[torch.fx.Node]:  # fmt: skip
    """Put a region's calls before its node, and have its readers read theirs; the calls."""
    import torch

    *how, region = node.args[: _OWN_OPERANDS[str(node.target)]]
    unseen = WITHOUT_GRADIENT in node.meta
    if str(node.target) == "wrap_with_set_grad_enabled":
        unseen = not how[0]
    elif how[2]:
        raise under_autocast(name, f"torch.autocast({how[0]!r}, {how[1]})")
    assert isinstance(region, torch.fx.Node)
    assert isinstance(region.target, str)
    graph = module.get_submodule(region.target).graph
    assert isinstance(graph, torch.fx.Graph)
    given = node.args[len(how) + 1 :]
    made = dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))
    parts = []
    with module.graph.inserting_before(node):
        for part in graph.nodes:
            if part.op in ("call_function", "get_attr"):
                made[part] = copied = module.graph.node_copy(part, made.__getitem__)
                if unseen:
                    copied.meta[WITHOUT_GRADIENT] = True
                parts.append(copied)
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    for user in list(node.users):
        place = user.args[1]
        assert user.target is operator.getitem
        assert isinstance(place, int)
        result = results[place]
        assert isinstance(result, torch.fx.Node)
        user.replace_all_uses_with(made[result])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not region.users:
        module.graph.erase_node(region)
    return parts
