"""`by_experts`: products of rows by the weights of the experts that a router chose for them.

A mixture of experts of transformers runs its experts as grouped products (``torch._grouped_mm``):
rows sorted by expert, as many as a router drew of all rows together. How many weights such a
product reads depends on how the rows fall, of which `foreplan.datasets.experts` says what is
assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.program import Program, Variant, program


def by_experts(nodes: Sequence[OperatorNode], works: Sequence[Program]) -> list[Program]:
    """The programs of a pass, those of experts with what the router before them drew.

    Args:
        nodes: operators in the order of execution.
        works: the program of each.
    """
    found: list[Program] = []
    drawn: tuple[int, ...] = ()  # rows by experts of each
    for node, work in zip(nodes, works, strict=True):
        if node.target.endswith(".topk"):
            drawn = node.outputs[0]
        found.append(_product(node, work.variant, drawn) if node.op == "experts" else work)
    return found


def _product(node: OperatorNode, variant: Variant, drawn: Sequence[int]) -> Program:
    (rows, k), (experts, *_) = node.inputs[:2]
    # Without a router in sight each row is taken to have drawn its expert by itself.
    active = drawn[-1] if drawn and math.prod(drawn) == rows else 1
    plain = Variant(variant.storage, variant.compute, "torch.linear")
    return program(
        "grouped", plain, rows=rows // active, experts=experts, active=min(active, experts),
        n=node.outputs[0][-1], k=k,
    )  # fmt: skip
