"""`recomputed_steps`: what activation checkpoints let a backward pass compute a second time.

A checkpoint keeps the inputs of its layers alone. The backward pass runs their forward pass again
before it goes back through them, all of it with the reentrant form, else until the last tensor is
there that a gradient needs: torch stops early (``torch.utils.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreplan.cost_models.lowering.graph_gradients import Operands, Visit, has_backward
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.graphs.operator_graph import OperatorNode, Recomputation

#: Operators whose gradient needs no tensor, and those that need their result (torch's
#: ``derivatives.yaml``); others need their inputs, which are there before they run.
_NEED_NOTHING = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "clone", "copy", "_to_copy", "to",
    "contiguous", "view_copy",
})  # fmt: skip
_NEED_RESULTS = frozenset({
    "relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal", "softmax", "log_softmax",
    "layer_norm", "group_norm", "batch_norm", "rms_norm", "dropout", "native_dropout",
    "max_pool1d", "max_pool2d", "max_pool3d", "scaled_dot_product_attention", "amax", "amin", "max",
    "min",
})  # fmt: skip


def recomputed_steps(
    passed: Sequence[Visit], forward: Sequence[Step], read: Operands,
    copies: Mapping[str, Sequence[Step]],
) -> dict[int, list[Step]]:  # fmt: skip
    """Steps of a backward pass in front of the gradients of an operator.

    Args:
        passed: operators of the forward pass.
        forward: their steps.
        read: what they read.
        copies: what they copy before they begin, by name.

    Returns:
        By the index in ``passed`` of the last operator of a checkpoint, an outer one first.
    """
    members: dict[tuple[Recomputation, ...], list[int]] = {}
    for index, visit in enumerate(passed):
        for depth in range(len(visit.node.recomputations)):
            members.setdefault(visit.node.recomputations[: depth + 1], []).append(index)
    found: dict[int, list[Step]] = {}
    for path in sorted(members, key=len):
        inside = members[path]
        needed = [index for index in inside if _needs(passed[index].node, read) is not None]
        if not needed:
            continue
        end = inside[-1] + 1
        if path[-1].early:
            last = needed[-1]
            # Of a checkpoint inside only its inputs are needed, which are there before it runs.
            within = passed[last].node.recomputations[: len(path) + 1]
            end = last + bool(_needs(passed[last].node, read))
            if within != path:
                end = members[within][0]
        found.setdefault(inside[-1], []).extend(
            replace(step, part="backward")
            for index in inside if index < end
            for step in (*copies.get(passed[index].node.name, ()), forward[index])
        )  # fmt: skip
    return found


def _needs(node: OperatorNode, read: Operands) -> bool | None:
    """Whether an operator's gradient needs its result; ``None`` where it needs no tensor."""
    name = node.target.rpartition(".")[2].rstrip("_")
    if not has_backward(node, read) or name in _NEED_NOTHING:
        return None
    return name in _NEED_RESULTS
