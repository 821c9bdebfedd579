"""`OperatorGraph`: what a model computes, operator by operator, with the work each one means.

A networkx graph whose nodes are operators and whose edges are the tensors between them. Views
(reshape, transpose, slice, ...) are no work and are contracted into edges. Blocks that repeat, such
as a decoder's layers, share a key, so that whatever is done per operator is done once a block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import networkx as nx

from foreplan.datasets.graphs.operator_call import OperatorCall

Shape = tuple[int, ...]


class Recomputation(NamedTuple):
    """Operators that a backward pass computes again, see ``torch.utils.checkpoint``.

    Attributes:
        number: of its call in the trace.
        early: what is computed again ends with the last tensor that the backward pass needs.
    """

    number: int
    early: bool


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """One operator.

    Attributes:
        name: unique in its graph.
        op: kind: ``linear`` (one operand is a parameter), ``matmul``, ``experts`` (rows by the
            weights of theirs), ``convolution``, ``attention``, ``norm``, ``softmax``,
            ``activation``, ``elementwise``, ``reduction``, ``pool``, ``embedding``, ``recurrent``,
            ``bilinear``, ``fft``, ``copy``, ``create``, ``input``, or ``unknown`` (only captured
            with ``eager``).
        target: the operator's own name (``aten.linear``), or the module fused into it.
        inputs: shapes of the tensors it reads, parameters included.
        outputs: shapes of the tensors it writes.
        dtype: of its first output.
        flops: FLOP, a multiply-add counted as 2.
        bytes: fewest bytes that move: each input read and each output written once.
        parameters: names of the parameters it reads.
        parameter_bytes: their size.
        module: path of the module it belongs to (``model.layers.3.mlp.up_proj``).
        block: key of the repeated block it belongs to, ``""`` if none.
        instance: module path of that block's instance (``model.layers.3``).
        calls: ATen calls the host makes for it, views of its operands included; of the first of
            several that torch makes in one call that call, too, and of none of them views inside.
        within: that call, where torch makes several operators in one; ``""`` else.
        recomputations: those that it is in in a training step, outermost first.
    """

    name: str
    op: str
    target: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    flops: float
    bytes: float
    parameters: tuple[str, ...] = ()
    parameter_bytes: int = 0
    module: str = ""
    block: str = ""
    instance: str = ""
    calls: int = 1
    within: str = ""
    recomputations: tuple[Recomputation, ...] = ()

    @property
    def signature(self) -> tuple[object, ...]:
        """What two operators must share to cost the same; names are left out."""
        return (
            self.op,
            self.target,
            self.inputs,
            self.outputs,
            self.dtype,
            self.flops,
            self.bytes,
            self.parameter_bytes,
        )


class OperatorGraph:
    """Operators of one model for one set of input shapes.

    Args:
        name: what a reader calls the model.
        nodes: in execution order.
        edges: bytes by (producer, consumer).
        parameter_bytes: size of every parameter by name; a shared one stands here once.
        calls: every call of the trace, views included, with its operands' layout.
        evaluated: paths of parts that a training step has in evaluation mode, because they cannot
            be traced in training mode; the empty one is the module itself.

    Attributes:
        graph: nodes are names with the attribute ``operator`` (an `OperatorNode`), edges carry
            ``bytes``; nodes were added in execution order.
        blocks: instances of each repeated block by its key.
    """

    def __init__(
        self,
        name: str,
        nodes: Sequence[OperatorNode],
        edges: Mapping[tuple[str, str], int],
        parameter_bytes: Mapping[str, int],
        calls: Sequence[OperatorCall] = (),
        evaluated: Sequence[str] = (),
    ) -> None:
        self.name, self.evaluated = name, tuple(evaluated)
        self.calls = tuple(calls)
        self.parameters: Mapping[str, int] = MappingProxyType(dict(parameter_bytes))
        placed, blocks = _find_blocks(nodes, edges)
        self.blocks: Mapping[str, tuple[str, ...]] = MappingProxyType(blocks)
        self.graph: nx.DiGraph[str] = nx.DiGraph(name=name)
        for node in placed:
            self.graph.add_node(node.name, operator=node)
        for (producer, consumer), size in edges.items():
            self.graph.add_edge(producer, consumer, bytes=size)

    def __repr__(self) -> str:
        return f"OperatorGraph({self.name!r}, {len(self)} operators, {len(self.blocks)} blocks)"

    def __len__(self) -> int:
        return int(self.graph.number_of_nodes())

    def operators(self, op: str | None = None) -> Iterator[OperatorNode]:
        """Operators in execution order, of one kind if ``op`` is given."""
        for _, attributes in self.graph.nodes(data=True):
            node: OperatorNode = attributes["operator"]
            if op is None or node.op == op:
                yield node

    def evaluated_around(self, module: str) -> str | None:
        """The first of `evaluated` that a module lies in or is; ``None`` where there is none.

        Args:
            module: path, as of `OperatorNode.module`.
        """
        inside = (p for p in self.evaluated if not p or f"{module}.".startswith(f"{p}."))
        return next(inside, None)

    def distinct(self) -> list[tuple[OperatorNode, int]]:
        """Operators that differ, with how often each runs: those of a repeated block only once.

        Order is that of first execution. Equal operators inside one block are merged too.
        """
        counts: dict[tuple[object, ...], tuple[OperatorNode, int]] = {}
        for node in self.operators():
            if node.op == "input" or (node.block and self.blocks[node.block][0] != node.instance):
                continue
            times = len(self.blocks[node.block]) if node.block else 1
            first, count = counts.get(node.signature, (node, 0))
            counts[node.signature] = (first, count + times)
        return list(counts.values())

    @property
    def flops(self) -> float:
        """FLOP of one pass."""
        return sum(node.flops for node in self.operators())

    @property
    def bytes(self) -> float:
        """Fewest bytes that the operators move, taken one by one."""
        return sum(node.bytes for node in self.operators())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, a shared one once."""
        return sum(self.parameters.values())


def _find_blocks(
    nodes: Sequence[OperatorNode], edges: Mapping[tuple[str, str], int]
) -> tuple[list[OperatorNode], dict[str, tuple[str, ...]]]:
    """Mark the operators of repeated blocks.

    A candidate is an item of a module list (a path that ends in a number). It is a repeated block
    when another candidate has the same operators on the same shapes, wired the same way; the
    outermost repeated candidate wins. Operators run in the order of the code, so that equal code
    gives equal order and comparing in order decides isomorphism exactly.
    """
    members: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        parts = node.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                members.setdefault(".".join(parts[: depth + 1]), []).append(index)
    predecessors: dict[str, list[str]] = {}
    for producer, consumer in edges:
        predecessors.setdefault(consumer, []).append(producer)
    keys = {path: _block_key(nodes, found, predecessors) for path, found in members.items()}
    instances: dict[str, list[str]] = {}
    for path, key in keys.items():
        instances.setdefault(key, []).append(path)
    placed = list(nodes)
    blocks: dict[str, list[str]] = {}
    taken: set[str] = set()
    # Outer paths first: an inner list of a repeated block is part of it.
    for path in sorted(keys, key=lambda path: path.count(".")):
        inside = any(path.startswith(f"{outer}.") for outer in taken)
        if inside or len(instances[keys[path]]) < 2:
            continue
        taken.add(path)
        blocks.setdefault(keys[path], []).append(path)
        for index in members[path]:
            placed[index] = replace(nodes[index], block=keys[path], instance=path)
    return placed, {key: tuple(paths) for key, paths in blocks.items()}


def _block_key(
    nodes: Sequence[OperatorNode],
    members: Sequence[int],
    predecessors: Mapping[str, Sequence[str]],
) -> str:
    local = {nodes[index].name: position for position, index in enumerate(members)}
    outside: dict[str, int] = {}
    rows: list[object] = []
    for index in members:
        wires = []
        for producer in predecessors.get(nodes[index].name, ()):
            if producer in local:
                wires.append(local[producer])
            else:
                # What comes from outside is told apart, but not named.
                wires.append(-1 - outside.setdefault(producer, len(outside)))
        rows.append((nodes[index].signature, wires))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
