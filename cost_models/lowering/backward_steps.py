"""`wide_step`, `total_step`: steps of a backward pass, and what their kernels are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from foreplan.cost_models.lowering.graph_gradients import Operand
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.program import Program, Variant, program

#: Kernel of what a backward pass does beside products and convolutions; of sums, over columns.
BACKWARD = "torch.backward"
#: Kernels of the gradients of a softmax and of its logarithm, which go through whole rows.
SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD = "torch.softmax_backward", "torch.log_softmax_backward"
#: Kernel of dropout's gradient.
DROPOUT_BACKWARD = "torch.dropout_backward"
#: Kernels of sums over each row, and over all but the channels of images.
ROW_SUM, CHANNEL_SUM = "torch.sum", "torch.backward_by_channel"
#: What names of kernels say of an operand with one value a row, a column, or a block of rows.
BY_ROW, BY_COLUMN, BY_BLOCK = "_by_row", "_by_column", "_by_block"
#: The same where an element of it meets so few of a result that they fill no vectors.
NARROW, FILLED = "_narrow", 16
#: What the gradient of a norm says whose rows are groups of channels.
BY_GROUP = "_by_group"


def broadcast(shape: Sequence[int], whole: Sequence[int]) -> str:
    """How an operand lies in a result that it is smaller than; empty for one as large, or one."""
    size = math.prod(shape)
    if size <= 1 or size >= math.prod(whole):
        return ""
    if shape[-1] == 1:
        return NARROW * (1 < _run(shape, whole) < FILLED) + BY_ROW
    return BY_COLUMN if size == whole[-1] else BY_BLOCK


def _run(shape: Sequence[int], whole: Sequence[int]) -> int:
    """Elements that follow on each other of a result which take one element of an operand."""
    run = 1
    for own, extent in zip(reversed(shape), reversed(whole), strict=False):
        if own > 1:
            break
        run *= extent
    return run


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor, its last extent along the rows."""
    cols = max(1, shape[-1]) if shape else 1
    return max(1, math.prod(shape) // cols), cols


def wide_step(
    step: Step, shape: Sequence[int], inputs: int, lies: str = "", kernel: str = BACKWARD
) -> Step:
    """A backward step that reads ``inputs`` tensors of a shape and writes one.

    Args:
        step: whose gradient it is.
        shape: of what it writes.
        inputs: tensors as large that it reads.
        lies: of a smaller one besides, from `broadcast`.
        kernel: that computes it.
    """
    rows, cols = flat(shape)
    work = program(
        "elementwise", own_variant(step, lies, kernel), rows=rows, cols=cols, inputs=inputs
    )
    kind = step.kind if step.kind in ("norm", "softmax", "activation") else "elementwise"
    return replace(step, kind=kind, part="backward", work=work, calls=1, host=None)


def fill_step(step: Step, shape: Sequence[int]) -> Step:
    """Zeros of a shape."""
    rows, cols = flat(shape)
    work = program("fill", own_variant(step), rows=rows, cols=cols)
    return replace(step, kind="elementwise", work=work)


def sum_step(target: str, shape: Sequence[int], dtype: str) -> Step:
    """The sum of two gradients by a tensor that is read twice.

    Args:
        target: name of the step.
        shape: of the tensor.
        dtype: of its elements.
    """
    rows, cols = flat(shape)
    work = program("elementwise", Variant(dtype, dtype, BACKWARD), rows=rows, cols=cols, inputs=2)
    return Step("elementwise", target, "backward", work)


def picked(source: Sequence[int], shape: Sequence[int]) -> int:
    """Elements that an index leaves together: of the extents behind those that it picks from.

    Args:
        source: shape of what is picked from.
        shape: of what is picked.
    """
    cols = 1
    for own, extent in zip(reversed(source), reversed(shape), strict=False):
        if own != extent:
            break
        cols *= own
    return cols


def own_variant(step: Step, lies: str = "", kernel: str = BACKWARD) -> Variant:
    """A kernel on the types that a step computes with, and how an operand lies in it."""
    assert isinstance(step.work, Program)
    compute = step.work.variant.compute
    return Variant(compute, compute, kernel + lies)


def total_step(back: Step, rows: int, cols: int, kernel: str) -> Step:
    """``rows`` sums of ``cols`` elements each."""
    total = program("reduction", own_variant(back, kernel=kernel), rows=rows, cols=cols)
    return replace(back, kind="reduction", work=total)


def given_back(back: Step, kept: Sequence[int], shape: Sequence[int]) -> Step:
    """The sum of a gradient over what an operand was broadcast along."""
    rows = max(1, math.prod(kept))
    cols = max(1, math.prod(shape) // rows)
    if kept and kept[-1] == 1 < shape[-1]:
        # Of channels (C, 1, 1) there are several rows each.
        return total_step(
            back, rows, cols, ROW_SUM if cols <= math.prod(shape[-2:]) else CHANNEL_SUM
        )
    return total_step(back, rows, cols, BACKWARD)


def summed_steps(back: Step, read: Sequence[Operand], shape: Sequence[int]) -> list[Step]:
    """Sums by operands that have a gradient and were broadcast to a shape."""
    return [given_back(back, o.shape, shape) for o in read if o.gradient and smaller(o, shape)]


def smaller(operand: Operand, shape: Sequence[int]) -> bool:
    """Whether an operand was broadcast to a shape."""
    return math.prod(operand.shape) < math.prod(shape)
