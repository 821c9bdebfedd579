"""What a training step keeps from the forward pass for the backward pass, tensor by tensor.

The rules are autograd's: a linear keeps its input and its weight in the variant's saved dtype; a
norm, an attention, a product keep their inputs; softmax and relu their outputs; a sum nothing.
A tensor that several keep is held once; a cast copy belongs to the operator that cast. `held_bytes`
counts exactly; `linear_terms` gives the solver a linear form of it that is never larger: where only
modules keep a tensor, each keeps its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.schedule import FloatArray, IntArray
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.kernels.training_variant import EIGHT_BITS, TrainingVariant, training_variant
from foreplan.planner.precision.graph import TrainingOperator
from foreplan.planner.precision.pricing import STATES, Edge, StepTables, node_bytes

_KEEPS_INPUT = ("norm", "attention", "matmul", "linear", "convolution", "pool")
_KEEPS_OUTPUT = ("softmax", "attention")
_OUTPUT_ACTIVATIONS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True, slots=True, eq=False)
class LinearTerms:
    """Saved bytes as a sum over items and edges.

    Attributes:
        items: ``[m]`` for every operator.
        edges: ``[a, b]`` for every edge of the tables.
    """

    items: tuple[FloatArray, ...]
    edges: tuple[FloatArray, ...]


class SavedBytes:
    """Saved bytes of one device's tables."""

    def __init__(self, tables: StepTables) -> None:
        self.tables = tables
        operators = tables.graph.operators
        always = [o.trained and _keeps_output(o.node) for o in operators]
        takers: list[list[int]] = [[] for _ in operators]  # edges on which a module may keep it
        for e, edge in enumerate(tables.edges):
            consumer = operators[edge.consumer]
            if consumer.adjustable:
                takers[edge.producer].append(e)
            elif consumer.trained and _keeps_input(consumer.node):
                always[edge.producer] = True
        self._always, self._takers = always, takers

    def own_bytes(self, i: int, option: int) -> int:
        """What an operator keeps beside inputs and outputs: a cast weight, or its statistics."""
        o = self.tables.graph.operators[i]
        if o.trained and not o.adjustable:
            return _statistics_bytes(o)
        if not o.adjustable or o.family == "embedding":
            return 0
        variant = training_variant(self.tables.options[i][option].name)
        saved = variant.saved
        if saved == "fp32":
            return 0
        scales = _scale_bytes(variant, o.weight_shape[0])
        return round(math.prod(o.weight_shape) * DTYPE_BYTES[saved]) + scales

    def copy_bytes(self, edge: Edge, a: int, b: int) -> int:
        """What the consumer keeps of a cast of its input; 0 where it keeps the input itself."""
        tables = self.tables
        o, state = tables.graph.operators[edge.consumer], tables.options[edge.producer][a].state
        option = tables.options[edge.consumer][b]
        if o.adjustable:
            variant = training_variant(option.name)
            saved = variant.saved
            if saved == STATES[state]:
                return 0
            scales = _scale_bytes(variant, o.input_elements // o.node.inputs[0][-1])
            return round(o.input_elements * DTYPE_BYTES[saved]) + scales
        keeps = o.trained and _keeps_input(o.node) and tables.rules[edge.consumer].casts
        if not keeps or option.state == state:
            return 0
        return tables.graph.operators[edge.producer].output_elements * (4 - 2 * option.state)

    def held_bytes(self, choice: IntArray) -> IntArray:
        """Bytes kept until each operator's backward pass has run, by operator."""
        tables, held = self.tables, np.zeros(len(self.tables.graph), dtype=np.int64)
        for i, o in enumerate(tables.graph.operators):
            held[i] = self.own_bytes(i, int(choice[i]))
            kept = self._always[i] or any(
                self._keeps_itself(tables.edges[e], choice) for e in self._takers[i]
            )
            if kept:
                held[i] += node_bytes(o.node, tables.options[i][choice[i]].state)
        for edge in tables.edges:
            held[edge.consumer] += self.copy_bytes(
                edge, int(choice[edge.producer]), int(choice[edge.consumer])
            )
        return held

    def _keeps_itself(self, edge: Edge, choice: IntArray) -> bool:
        return self.copy_bytes(edge, int(choice[edge.producer]), int(choice[edge.consumer])) == 0

    def linear_terms(self) -> LinearTerms:
        """The linear form; see the module."""
        tables = self.tables
        items = []
        for i, (o, options) in enumerate(zip(tables.graph.operators, tables.options, strict=True)):
            own = [float(self.own_bytes(i, c)) for c in range(len(options))]
            if self._always[i]:
                own = [b + node_bytes(o.node, p.state) for b, p in zip(own, options, strict=True)]
            items.append(np.array(own))
        edges = []
        for edge in tables.edges:
            source = tables.graph.operators[edge.producer]
            a, b = len(tables.options[edge.producer]), len(tables.options[edge.consumer])
            copies = np.array(
                [[self.copy_bytes(edge, x, y) for y in range(b)] for x in range(a)], dtype=float
            )
            if tables.graph.operators[edge.consumer].adjustable and not self._always[edge.producer]:
                share = 1.0 / len(self._takers[edge.producer])
                whole = np.array(
                    [node_bytes(source.node, p.state) for p in tables.options[edge.producer]]
                )
                copies = copies + np.where(copies == 0, share * whole[:, None], 0.0)
            edges.append(copies)
        return LinearTerms(tuple(items), tuple(edges))

    def workspace_bytes(self) -> int:
        """Most that one operator needs beside what is kept: its operands, casts and gradients."""
        return max(4 * _moved(o) for o in self.tables.graph.operators)


def _statistics_bytes(o: TrainingOperator) -> int:
    """What operators without a choice compute for their own backward pass, always fp32 or int64."""
    shape = o.node.outputs[0]
    if o.node.op == "loss":
        return 4 * o.input_elements  # log-probabilities
    if o.node.op == "norm":
        channels = o.node.target.endswith("batch_norm")
        return 8 * (shape[1] if channels else math.prod(shape[:-1]))  # mean and deviation
    if o.node.op == "attention":
        return 4 * math.prod(shape[:-1])  # sums of exponentials
    if o.node.op == "pool" and "max" in o.node.target:
        return 8 * o.output_elements  # where the maxima were
    return 0


def _moved(o: TrainingOperator) -> int:
    """Elements of an operator's input and output and of their gradients."""
    weight = math.prod(o.weight_shape) if o.adjustable and o.family != "embedding" else 0
    return 2 * (o.input_elements + o.output_elements) + weight


def _keeps_input(node: OperatorNode) -> bool:
    name = node.target.rpartition(".")[2]
    if node.op == "activation":
        return name not in _OUTPUT_ACTIVATIONS
    return node.op in _KEEPS_INPUT or (node.op == "elementwise" and name in ("mul", "div", "pow"))


def _keeps_output(node: OperatorNode) -> bool:
    name = node.target.rpartition(".")[2]
    return node.op in _KEEPS_OUTPUT or (node.op == "activation" and name in _OUTPUT_ACTIVATIONS)


def _scale_bytes(variant: TrainingVariant, rows: int) -> int:
    """Bytes of the scales of a matrix in 8 bits."""
    if variant.saved not in EIGHT_BITS:
        return 0
    return 4 if variant.along == "tensor" else 4 * rows
