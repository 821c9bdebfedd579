"""`FusionWalk`: goes through a captured graph as a compiler does, and collects what it fuses.

What works element by element, sums, norms and softmaxes become kernels of the compiler's own;
products, convolutions, attention and pools stay calls of libraries. The rules are TorchInductor's
(PyTorch 2, ``torch/_inductor/{lowering,scheduler}.py``), reduced to what decides bytes:

- A result that only such operators read is not stored but computed again where it is read, unless
  several of them read it that cannot be in one kernel.
- A sum is stored; what is computed of it and of what it adds up joins its kernel.
- Kernels join where one reads what the other writes, or both read the same tensor, over as many
  elements. No join may wait for a library's kernel that waits for it: operators have a
  *level*, one more than that of the library's kernels before them, and joins stay within one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foreplan.cost_models.lowering.kernel_words import batch_norm_words
from foreplan.datasets.graphs.operator_call import ELEMENT_BYTES, OperatorCall, described_tensors
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.operators import OF_BATCH

#: Kinds of operators that fused kernels hold; see `OperatorNode.op`.
_MAPS = frozenset({"elementwise", "activation", "copy", "create", "embedding"})
_SUMS = frozenset({"norm", "softmax", "reduction"})
#: What stays a call of its own though its kind is among them.
_APART = frozenset(
    {
        "sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode", "nonzero",
        "unique",
        "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "index_put", "index_add",
        "scatter", "scatter_add", "histc", "bincount", "searchsorted", "bucketize", "roll",
        "multinomial", "_embedding_bag", "embedding_bag", "masked_select",
    }
)  # fmt: skip
#: Operators whose gradients need no operand: their backward kernel reads none of theirs.
_LINEAR = frozenset(
    {"add", "sub", "neg", "to", "clone", "contiguous", "copy", "cat", "stack", "_to_copy", "add_",
     "sub_", "expand", "mean", "sum", "pad"}
)  # fmt: skip
#: Below so many bytes two kernels do not join for a tensor that both read
#: (``torch/_inductor/config.py``, ``score_fusion_memory_threshold``).
_WORTH_BYTES = 10
#: Sums below which each is split over blocks and ends in a kernel of its own (assumed).
_FEW_ROWS = 32


@dataclass
class Value:
    """A tensor as the walk knows it.

    Attributes:
        name: of the call that makes it, or of a parameter or an input.
        elements: that it has.
        size: in bytes.
        leaves: bytes read of stored tensors to have it, by name; a stored one is its own.
        gradient: whether a training step computes its gradient.
        parameter: whether it is one.
        stored: a kernel writes it.
        dtype: torch's name of its type.
        linear: what it is computed by needs no operand for its gradient.
        operators: names of operators that are computed where it is read, or stored.
    """

    name: str
    elements: int
    size: float
    leaves: dict[str, float]
    gradient: bool
    dtype: str
    parameter: bool = False
    stored: bool = False
    linear: bool = True
    operators: frozenset[str] = frozenset()


@dataclass
class Kernel:
    """Stored results that one kernel makes.

    Attributes:
        at: place of its last operator among those of the graph.
        elements: that it goes through.
        level: library kernels that it waits for, one behind the other.
        leaves: bytes read of stored tensors by name, also of those that it writes.
        writes: names of its results.
        linear: as of `Value`.
        operators: names of what it computes.
        rows: sums that it takes; 0 where it takes none.
        channels: sums that end in kernels of their own, as blocks share them out.
    """

    at: int
    elements: int
    level: int
    leaves: dict[str, float]
    writes: list[str]
    linear: bool
    operators: frozenset[str]
    rows: int = 0
    channels: int = 0


def is_fused(node: OperatorNode) -> bool:
    """Whether a compiler makes an operator part of a kernel of its own."""
    name = node.target.rpartition(".")[2].removesuffix("_")
    return node.op in _MAPS | _SUMS and name not in _APART and not node.within


@dataclass
class FusionWalk:
    """Kernels of a graph, and the tensors between them.

    Args:
        graph: captured with ``eager=True``.

    Attributes:
        values: tensors by name.
        kernels: in the order of their first operators.
    """

    graph: OperatorGraph
    values: dict[str, Value] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        calls = self.graph.calls
        self._nodes = {node.name: node for node in self.graph.operators()}
        self._places = {name: at for at, name in enumerate(self._nodes)}
        self._bases = _bases(calls)
        self._split = {
            call.operator for call in calls
            if call.operator and _is_split(self._nodes[call.operator], call)
        }  # fmt: skip
        self._levels = self._level_of_each(calls)
        self._read_by = self._readers_of_each(calls)
        for call in calls:
            if call.operator:
                self._visit(call, self._nodes[call.operator])

    def readers(self) -> Mapping[str, int]:
        """How many kernels and calls of libraries read each stored result but its own kernel.

        A result that nothing reads counts as read once: the graph returns it.
        """
        found = {name: 0 for kernel in self.kernels for name in kernel.writes}
        for kernel in self.kernels:
            for leaf in kernel.leaves:
                if leaf in found and leaf not in kernel.writes:
                    found[leaf] += 1
        for name in found:
            asking = self._read_by.get(name, ())
            found[name] += sum(not is_fused(self._nodes[call.operator]) for call in asking)
            if not asking and name in self._places:
                found[name] = 1
        return found

    # ------------------------------------------------------------------------------- graph

    def _level_of_each(self, calls: Iterable[OperatorCall]) -> dict[str, int]:
        found: dict[str, int] = {}
        for call in calls:
            level = max((found.get(name, 0) for name in call.reads), default=0)
            node = self._nodes.get(call.operator)
            waits = node is not None and (not is_fused(node) or node.name in self._split)
            found[call.name] = level + waits
        return found

    def _readers_of_each(self, calls: Iterable[OperatorCall]) -> dict[str, list[OperatorCall]]:
        """Operators that read each tensor that is no view, or views of it."""
        found: dict[str, list[OperatorCall]] = {}
        for call in calls:
            if call.operator:
                for name in dict.fromkeys(self._bases.get(name, name) for name in call.reads):
                    found.setdefault(name, []).append(call)
        return found

    # ------------------------------------------------------------------------------- calls

    def _visit(self, call: OperatorCall, node: OperatorNode) -> None:
        result = described_tensors(call.result)
        if not result:
            return
        read = self._operands(call)
        elements = max(1, math.prod(result[0][0]))
        size = float(sum(map(_bytes, result)))
        value = Value(call.name, elements, size, {call.name: size}, call.trains, result[0][2])
        self.values[call.name] = value
        if not is_fused(node):
            value.stored = True
            return
        self._compute(value, node, read)
        ends = node.name in self._split
        level = self._levels[call.name] - ends
        whole = max([elements, *(given.elements for given, _ in read)])
        if node.op == "reduction":
            self._store(value, node, whole, level, rows=elements)
            self.kernels[self._kernel_of(value)].channels += elements * ends
        elif node.op in _SUMS and (ends or not node.target.endswith("batch_norm")):
            # By known statistics a batch norm is a map.
            self._norm(value, node, whole, level, ends)
        if not value.stored and self._is_stored(call):
            self._store(value, node, elements, self._levels[call.name])

    def _operands(self, call: OperatorCall) -> list[tuple[Value, float]]:
        """What a call reads, and which share of each."""
        found = []
        for name, gradient, parameter, tensor in zip(
            call.reads, call.gradients, call.parameters, described_tensors(call.arguments),
            strict=False,
        ):  # fmt: skip
            base, size = self._bases.get(name, name), _bytes(tensor)
            if base not in self.values:  # a parameter, or an input
                self.values[base] = Value(
                    base, max(1, math.prod(tensor[0])), size, {base: size}, gradient, tensor[2],
                    parameter, stored=True,
                )  # fmt: skip
            value = self.values[base]
            found.append((value, min(1.0, size / _width(tensor[2]) / value.elements)))
        return found

    def _compute(
        self, value: Value, node: OperatorNode, read: Sequence[tuple[Value, float]]
    ) -> None:
        """Say what a result is computed of."""
        name = node.target.rpartition(".")[2]
        value.leaves = {}
        value.linear = name in _LINEAR and all(v.stored or v.linear for v, _ in read)
        value.operators = frozenset({name}).union(*(v.operators for v, _ in read))
        for given, share in read:
            for leaf, amount in given.leaves.items():
                asked = value.leaves.get(leaf, 0.0) + amount * share
                value.leaves[leaf] = min(self.values[leaf].size, asked)
        if node.op == "embedding" and read:  # rows of a table, not all of it
            table = next(iter(read[0][0].leaves))
            value.leaves[table] = min(value.leaves[table], value.size)

    def _norm(self, value: Value, node: OperatorNode, whole: int, level: int, ends: bool) -> None:
        """A kernel of the sums; what is normed by them is computed where it is read."""
        rows = max(1, round(value.elements / _row(node)))
        own = f"{value.name}.sums"
        # Sums of rows stay in their kernel's registers.
        sums = Value(own, rows, 8.0 * rows * ends, dict(value.leaves), False, value.dtype,
                     linear=value.linear, operators=value.operators)  # fmt: skip
        self.values[own] = sums
        self._store(sums, node, whole, level, rows=rows)
        self.kernels[self._kernel_of(sums)].channels += rows * ends
        value.leaves = {**value.leaves, own: sums.size}
        value.operators = frozenset()

    def _is_stored(self, call: OperatorCall) -> bool:
        asking = self._read_by.get(call.name, [])
        if not asking or not all(is_fused(self._nodes[reader.operator]) for reader in asking):
            return True
        levels = {self._levels[reader.name] - (reader.operator in self._split) for reader in asking}
        return len(asking) > 1 and levels != {self._levels[call.name]}

    # ----------------------------------------------------------------------------- kernels

    def _store(
        self, value: Value, node: OperatorNode, elements: int, level: int, rows: int = 0
    ) -> None:
        """Let a kernel write a value: one before, where it joins, or one of its own."""
        made = Kernel(
            self._places[node.name], elements, level, dict(value.leaves), [value.name],
            value.linear, value.operators, rows,
        )  # fmt: skip
        value.stored, value.leaves = True, {value.name: value.size}
        value.operators = frozenset()
        for kernel in reversed(self.kernels):
            if (kernel.level, kernel.elements) == (level, elements) and _joins(kernel, made):
                kernel.at = max(kernel.at, made.at)
                kernel.writes += made.writes
                kernel.linear = kernel.linear and made.linear
                kernel.operators |= made.operators
                kernel.rows = max(kernel.rows, rows)
                for leaf, amount in made.leaves.items():
                    kernel.leaves[leaf] = max(kernel.leaves.get(leaf, 0.0), amount)
                return
        self.kernels.append(made)

    def _kernel_of(self, value: Value) -> int:
        last = len(self.kernels) - 1
        return next(at for at in range(last, -1, -1) if value.name in self.kernels[at].writes)


def _joins(kernel: Kernel, made: Kernel) -> bool:
    if any(leaf in kernel.writes for leaf in made.leaves):
        return True
    shared = (amount for leaf, amount in made.leaves.items() if leaf in kernel.leaves)
    return any(amount >= _WORTH_BYTES for amount in shared)


def _bases(calls: Iterable[OperatorCall]) -> dict[str, str]:
    """The tensor that each view is one of."""
    found: dict[str, str] = {}
    for call in calls:
        if not call.operator and call.reads:
            found[call.name] = found.get(call.reads[0], call.reads[0])
    return found


def _is_split(node: OperatorNode, call: OperatorCall) -> bool:
    """Whether sums are shared out over blocks, so that what is computed of them waits for all."""
    if node.op == "norm" and node.target.endswith("batch_norm"):
        return OF_BATCH in batch_norm_words(call.arguments)
    few = node.op == "reduction" and bool(node.outputs) and is_fused(node)
    return few and math.prod(node.outputs[0]) < _FEW_ROWS


def _row(node: OperatorNode) -> int:
    """Elements that a norm or a softmax goes through together."""
    shape = node.outputs[0] if node.outputs else ()
    name = node.target.rpartition(".")[2]
    if name == "batch_norm" and len(shape) > 1:
        return max(1, math.prod(shape) // shape[1])
    if name == "layer_norm" and len(node.inputs) > 1:
        return max(1, math.prod(node.inputs[1]))
    return shape[-1] if shape else 1


def _width(dtype: str) -> int:
    return ELEMENT_BYTES.get(dtype, 4)


def _bytes(tensor: tuple[Sequence[int], Sequence[int], str]) -> float:
    """Bytes of a tensor's distinct elements."""
    shape, strides, dtype = tensor
    own = (extent for extent, stride in zip(shape, strides, strict=True) if stride)
    return float(math.prod(own) * _width(dtype))
