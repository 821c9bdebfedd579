"""`whole_program`: operators that one call stands for and that other operators make up.

Recurrent layers, bilinear forms, Fourier transforms and distances of all pairs: their dimensions
stand in the call's arguments, not in the shapes of what it reads and writes. What they are made of
on a device is in `recurrent_parts` and `composed`.
"""

from __future__ import annotations

import json
import math
from typing import Any

from foreplan.cost_models.lowering.argument_words import argument_words
from foreplan.cost_models.lowering.backward_steps import flat
from foreplan.datasets.graphs._aten_rules import fourier
from foreplan.datasets.graphs.operator_call import TENSOR, OperatorCall
from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import SpecError

#: Gates of a recurrent layer by its operator's name.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_WHOLE = frozenset({"recurrent", "bilinear", "fft"})
_DISTANCES = frozenset({"_cdist_forward", "_pdist_forward"})
_SORTS = frozenset({"sort", "argsort", "msort"})
#: Norms whose powers are none, products or choices; Python writes the largest as ``Infinity``.
_PLAIN_POWERS = (0, 1, 2, math.inf)
#: Maps of complex numbers that are no vector's work on a processor, and what their kernels say.
COMPLEX = frozenset({"abs", "angle", "exp", "sin", "cos", "tanh", "sqrt", "log", "pow", "sgn"})
OF_COMPLEX, OF_POWERS = "_of_complex", "_of_powers"


def whole_program(
    node: OperatorNode, call: OperatorCall | None, variant: Variant
) -> Program | None:
    """The program of such an operator; ``None`` of any other.

    Args:
        node: the operator.
        call: the same with its arguments, ``None`` where the graph has none.
        variant: dtypes and kernel of the operator; of a Fourier transform those of its real side.

    Raises:
        SpecError: a recurrent layer of packed sequences, whose lengths are values.
    """
    if call is None:
        return None
    name = node.target.rpartition(".")[2]
    product = name == "pow" and not argument_words(name, call.arguments)
    if name in COMPLEX and "complex" in call.arguments and not product:
        # torch's kernels go through complex numbers one by one.
        rows, cols = flat(node.outputs[0])
        slow = Variant(variant.storage, variant.compute, f"{variant.kernel}{OF_COMPLEX}")
        return program("elementwise", slow, rows=rows, cols=cols, inputs=2)
    if name == "roll":
        return _roll(node, call, variant)
    if name in _SORTS:  # compares each element as often as its row may be halved; rows are last
        rows, cols = flat(node.outputs[0])
        times = max(1, math.ceil(math.log2(cols)))
        return program("elementwise", variant, rows=rows, cols=cols * times, inputs=1)
    if name in ("group_norm", "instance_norm"):  # a row is a group's channels of one image
        images, channels, *_ = node.inputs[0]
        groups = json.loads(call.arguments)[0][1] if name == "group_norm" else channels
        cols = max(1, math.prod(node.inputs[0]) // (images * groups))
        return program("norm", variant, rows=images * groups, cols=cols)
    if not (node.op in _WHOLE or name in _DISTANCES):
        return None
    given, _ = json.loads(call.arguments)
    if node.op == "recurrent":
        return _recurrent(node, call, variant, given)
    if node.op == "bilinear":
        first, weight, second = (_shape(tensor) for tensor in given[:3])
        return program(
            "bilinear", variant, rows=max(1, math.prod(first[:-1])), first=first[-1],
            second=second[-1], outputs=weight[0],
        )  # fmt: skip
    if node.op == "fft":
        cols, rows, values, passes = fourier(name, node.inputs[0], node.outputs[0], given[1])
        return program("fft", variant, rows=rows, cols=cols, values=values, passes=passes)
    # Distances of all pairs: of every pair a sum over its dimensions.
    power = given[2] if name == "_cdist_forward" else [*given, 2.0][1]
    if power not in _PLAIN_POWERS:
        variant = Variant(variant.storage, variant.compute, f"{variant.kernel}{OF_POWERS}")
    return program(
        "reduction", variant, rows=max(1, math.prod(node.outputs[0])),
        cols=max(1, node.inputs[0][-1]),
    )  # fmt: skip


def _roll(node: OperatorNode, call: OperatorCall, variant: Variant) -> Program:
    """A roll: torch goes along one dimension after another, each a copy (TensorTransformations)."""
    positional, named = json.loads(call.arguments)
    given = positional[2] if len(positional) > 2 else named.get("dims", [])
    # None where elements go round as one row.
    dims = given if isinstance(given, list) else [given]
    shape = node.outputs[0]
    last = max((dim % len(shape) for dim in dims), default=0)
    return program(
        "roll", variant, rows=max(1, math.prod(shape[:last])),
        cols=max(1, math.prod(shape[last:])), times=max(1, len(dims)),
    )  # fmt: skip


def host_calls(work: Program, calls: int) -> int:
    """ATen calls that the host makes for an operator that was traced as ``calls``.

    A bilinear form is composed output by output on every device; the others are one call on a GPU.
    """
    return calls + 3 * work.dims["outputs"] if work.op == "bilinear" else calls


def _recurrent(
    node: OperatorNode, call: OperatorCall, variant: Variant, given: list[Any]
) -> Program:
    if call.target.endswith(".data"):
        raise SpecError(
            f"module: {node.module or node.name}", got="packed sequences",
            expected="padded ones: how many go on at a step is a matter of values",
            fix="give the recurrent layer a tensor",
        )  # fmt: skip
    source, _, weights, _, layers, _, _, both, batch_first = given
    steps, rows, inputs = _shape(source)
    matrices = [shape for shape in map(_shape, weights) if len(shape) == 2]
    width, outputs = matrices[1]  # from the state of the step before
    gates = GATES[node.target.rpartition(".")[2]]
    return program(
        "recurrent", variant, steps=rows if batch_first else steps,
        rows=steps if batch_first else rows, inputs=inputs, hidden=width // gates,
        outputs=outputs, gates=gates, layers=layers, directions=2 if both else 1,
    )  # fmt: skip


def _shape(tensor: Any) -> list[int]:
    shape: list[int] = tensor[TENSOR][0]
    return shape
