"""`gradient_steps`: what computes an operator's gradients, by autograd's formulas for the dear.

A product has a product for each operand, a norm one fused call, a product of elements a map for
each operand and a sum where that was broadcast, and a power three maps; all else is a map. Views
that leave data out (slices) or give it out twice (expanded heads) are no work forward, and are made
up for backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreplan.cost_models.costs import Segment
from foreplan.cost_models.graph_gradients import Operand, product_gradients
from foreplan.datasets.operator_call import described_tensors, dtype_name
from foreplan.datasets.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.program import (
    DTYPE_BYTES,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Program,
    Variant,
    program,
)

if TYPE_CHECKING:
    from foreplan.cost_models.graph_programs import Step

#: Kernel of what a backward pass does beside products and convolutions.
BACKWARD = "torch.backward"
#: Kernels of sums over each row, where other sums of a backward pass are over columns.
ROW_SUM = "torch.sum"
#: What names of kernels say of an operand with one value a row, a column, or a block of rows.
BY_ROW, BY_COLUMN, BY_BLOCK = "_by_row", "_by_column", "_by_block"

#: What an attention's backward pass costs in forward passes; see `graph_programs`.
ATTENTION_BACKWARD = 3

#: Views whose gradient is written whole, and those whose gradients are added up.
_PARTS = frozenset(
    {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "diagonal"}
)
_REPEATS = frozenset({"expand", "unfold"})
#: Tensors that the maps of a gradient read, one map an entry: ``grad * (n * x ** (n - 1))``, and
#: ``-0.5 * grad * result ** 3``.
_MAPS = {"pow": (1, 1, 2), "rsqrt": (1, 1, 2)}


def broadcast(shape: Sequence[int], whole: Sequence[int]) -> str:
    """How an operand lies in a result that it is smaller than; empty for one as large, or one."""
    size = math.prod(shape)
    if size <= 1 or size >= math.prod(whole):
        return ""
    if shape[-1] == 1:
        return BY_ROW
    return BY_COLUMN if size == whole[-1] else BY_BLOCK


def gradient_steps(node: OperatorNode, step: Step, read: Sequence[Operand]) -> list[Step]:
    """What computes the gradients by those operands that have one.

    Args:
        node: the operator.
        step: its forward pass.
        read: its operands.
    """
    work = step.work
    assert isinstance(work, Program)  # every forward step is one program
    back = replace(step, part="backward", calls=1, host=None)
    if work.op in ("linear", "matmul"):
        return _product(node, back, work, read)
    if work.op == "conv":
        v = work.variant
        return [
            replace(back, work=replace(work, variant=replace(v, kernel=v.kernel + of)))
            for of, operand in zip((INPUT_GRADIENT, WEIGHT_GRADIENT), read, strict=False)
            if operand.gradient
        ]
    if work.op in ("attention", "full_attention"):
        return [replace(back, work=Segment("attention backward", ((work, ATTENTION_BACKWARD),)))]
    if work.op == "embedding":
        # The gradient of the whole table is made and then filled.
        return [wide_step(back, node.inputs[0], 1), back]
    shape = node.outputs[0] if node.outputs else ()
    if work.op == "norm":
        return _norm(back, work, shape, read)
    if work.op == "softmax" or node.op == "activation":
        return [wide_step(back, shape, 2)]
    if node.op in ("reduction", "pool"):
        return [wide_step(back, node.inputs[0], 1)]
    name = node.target.rpartition(".")[2]
    if name in ("add", "sub"):
        return [_sum(back, o.shape, shape) for o in read if o.gradient and _smaller(o, shape)]
    if name in _MAPS:
        return [wide_step(back, shape, inputs) for inputs in _MAPS[name]]
    if name in ("mul", "div"):
        return _of_elements(back, shape, read)
    if name in ("to", "_to_copy"):
        return [back]  # converted back: as many bytes
    return [wide_step(back, shape, 1)]


def view_gradients(graph: OperatorGraph) -> Mapping[str, Sequence[tuple[str, Program]]]:
    """Work that only the gradients of views are: of those in front of each operator, by its name.

    Args:
        graph: captured with ``eager=True``.
    """
    found: dict[str, list[tuple[str, Program]]] = {}
    waiting: list[tuple[str, Program]] = []
    for call in graph.calls:
        if call.operator:
            if waiting:
                found.setdefault(call.operator, []).extend(waiting)
                waiting = []
            continue
        tensors = described_tensors(call.arguments)
        name = call.target.split(".")[1] if "." in call.target else call.target
        if not call.trains or not tensors or name not in _PARTS | _REPEATS:
            continue
        shape, _, kind = tensors[0]
        dtype = dtype_name(kind)
        results = described_tensors(call.result)
        written = math.prod(results[0][0]) if results else 0
        if dtype not in DTYPE_BYTES or written == math.prod(shape):
            continue
        variant = Variant(dtype, dtype, BACKWARD)
        if name in _PARTS:
            rows, cols = flat(shape)
            waiting.append(
                (call.target, program("elementwise", variant, rows=rows, cols=cols, inputs=1))
            )
        else:
            kept = max(1, math.prod(shape))
            of = max(1, written // kept)
            waiting.append((call.target, program("reduction", variant, rows=kept, cols=of)))
    return found


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor, its last extent along the rows."""
    cols = max(1, shape[-1]) if shape else 1
    return max(1, math.prod(shape) // cols), cols


def wide_step(step: Step, shape: Sequence[int], inputs: int, lies: str = "") -> Step:
    """A backward step that reads ``inputs`` tensors of a shape and writes one.

    Args:
        step: whose gradient it is.
        shape: of what it writes.
        inputs: tensors as large that it reads.
        lies: of a smaller one besides, from `broadcast`.
    """
    rows, cols = flat(shape)
    work = program("elementwise", _own(step, lies), rows=rows, cols=cols, inputs=inputs)
    kind = step.kind if step.kind in ("norm", "softmax", "activation") else "elementwise"
    return replace(step, kind=kind, part="backward", work=work, calls=1, host=None)


def _own(step: Step, lies: str = "", kernel: str = BACKWARD) -> Variant:
    assert isinstance(step.work, Program)
    compute = step.work.variant.compute
    return Variant(compute, compute, kernel + lies)


def _product(
    node: OperatorNode, back: Step, work: Program, read: Sequence[Operand]
) -> list[Step]:  # fmt: skip
    d, wanted = work.dims, product_gradients(node, read)
    steps = []
    if work.op == "matmul":
        if wanted.left:
            grad = program("matmul", work.variant, batch=d["batch"], m=d["m"], n=d["k"], k=d["n"])
            steps.append(replace(back, work=grad))
        if wanted.right:
            grad = program("matmul", work.variant, batch=d["batch"], m=d["k"], n=d["n"], k=d["m"])
            steps.append(replace(back, work=grad))
        return steps

    def turned(of: str) -> Variant:
        return replace(work.variant, kernel=work.variant.kernel + of)

    if wanted.right:
        grad = program("linear", turned(WEIGHT_GRADIENT), rows=d["n"], n=d["k"], k=d["rows"])
        steps.append(replace(back, work=grad))
    if wanted.left:
        grad = program("linear", turned(INPUT_GRADIENT), rows=d["rows"], n=d["k"], k=d["n"])
        steps.append(replace(back, work=grad))
    if wanted.bias:
        total = program("reduction", _own(back), rows=d["n"], cols=d["rows"])
        steps.append(replace(back, kind="reduction", work=total))
    return steps


def _norm(
    back: Step, work: Program, shape: Sequence[int], read: Sequence[Operand]
) -> list[Step]:  # fmt: skip
    source, *scale = (operand.gradient for operand in read)
    rows, cols, channels = *flat(shape), 1
    if work.variant.kernel.endswith("batch_norm") and len(shape) > 1:
        channels = shape[1]
        rows, cols = shape[0] * channels, max(1, math.prod(shape[2:]))
    if not source:
        total = program("reduction", _own(back), rows=work.dims["cols"], cols=work.dims["rows"])
        return [replace(back, kind="reduction", work=total)] if any(scale) else []
    # Parameters' gradients are sums over the same tensors, which are read once more.
    size = {"rows": rows, "cols": cols, "channels": channels, "results": 1 + any(scale)}
    return [replace(back, work=program("norm_gradient", _own(back), **size))]


def _of_elements(back: Step, shape: Sequence[int], read: Sequence[Operand]) -> list[Step]:
    """Gradients of a product of elements: the gradient times the other operand, summed up."""
    steps = []
    for at, operand in enumerate(read):
        if not operand.gradient:
            continue
        others = [other.shape for place, other in enumerate(read) if place != at]
        lies = broadcast(others[0], shape) if others else ""
        whole = bool(others) and math.prod(others[0]) == math.prod(shape)
        steps.append(wide_step(back, shape, 1 + whole, lies))
        if _smaller(operand, shape):
            steps.append(_sum(back, operand.shape, shape))
    return steps


def _smaller(operand: Operand, shape: Sequence[int]) -> bool:
    return math.prod(operand.shape) < math.prod(shape)


def _sum(back: Step, kept: Sequence[int], shape: Sequence[int]) -> Step:
    """The sum of a gradient over what an operand was broadcast along."""
    rows = max(1, math.prod(kept))
    kernel = ROW_SUM if kept and kept[-1] == 1 else BACKWARD
    cols = max(1, math.prod(shape) // rows)
    total = program("reduction", _own(back, kernel=kernel), rows=rows, cols=cols)
    return replace(back, kind="reduction", work=total)
