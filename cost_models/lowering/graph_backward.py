"""`gradient_steps`: what computes an operator's gradients, by autograd's formulas.

A product has a product for each operand and a sum for its bias, a convolution the same, a norm and
an attention one fused call; what works element by element has the maps of `gradient_maps`, and a
sum where an operand was broadcast. Views that leave data out (slices) or give it out twice
(expanded heads) are no work forward, and are made up for backward (`view_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.cost_models.lowering.gradient_maps import (
    ARITHMETIC,
    EXPANDS,
    FUNCTIONS,
    MAPS,
    NO_WORK,
    PADS,
    PARTS,
    PICKS,
    REPEATS,
)
from foreplan.cost_models.lowering.graph_gradients import Operand, bias_first, product_gradients
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import OperatorCall, described_tensors, dtype_name
from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.program import (
    CHANNELS_LAST,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Program,
    Variant,
    program,
)

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
#: What the gradient of a norm says whose rows are groups of channels.
BY_GROUP = "_by_group"

#: An attention's gradient in forward passes, where no table has it: 2.5 times the FLOP at 0.86 of
#: the rate (Dao, FlashAttention-2, 2023: up to 73 % of an A100's peak forward, 63 % backward).
ATTENTION_BACKWARD = 3

_BATCH_NORM = "torch.batch_norm"
#: Images interpolated by kernels that go back by others, and what the name of those says.
INTERPOLATES = frozenset({"upsample_bilinear2d", "upsample_bicubic2d"})
OF_INTERPOLATED = "_backward"
#: Operators whose gradients go through as much as they do.
_BACK_ALIKE = ("upsample_", "_upsample_", "_cdist_forward", "_pdist_forward", "logcumsumexp")

#: Views whose gradients are joined, parts that have none as zeros.
_JOINED = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "unbind"})


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
    name = node.target.rpartition(".")[2]
    shape = node.outputs[0] if node.outputs else ()
    if work.op in ("linear", "matmul"):
        return _product(node, back, work, read)
    if node.op in ("linear", "matmul"):  # of two vectors: each by the other's
        return [wide_step(back, operand.shape or (1,), 1) for operand in read if operand.gradient]
    if work.op == "conv":
        return _convolution(back, work, read)
    if work.op in ("attention", "full_attention"):
        return [replace(back, work=replace(work, op=f"{work.op}_gradient"))]
    if work.op == "grouped":
        return _of_experts(back, work, read)
    if work.op == "recurrent":
        of = INPUT_GRADIENT if read[0].gradient else ""
        variant = _gradient(work, of)
        return [replace(back, work=replace(work, op="recurrent_gradient", variant=variant))]
    if work.op == "bilinear":  # by each operand the same sums of products again
        return [back] * sum(operand.gradient for operand in read)
    if name in INTERPOLATES:
        variant = replace(work.variant, kernel=f"{work.variant.kernel}{OF_INTERPOLATED}")
        return [replace(back, work=replace(work, variant=variant))]
    # Rolled or transformed back, interpolated otherwise, or all pairs once more.
    if work.op in ("roll", "fft") or name.startswith(_BACK_ALIKE):
        return [back]
    if work.op in ("norm", "batch_norm"):
        return _norm(node, back, work, read)
    if work.op == "dropout":
        return [replace(back, work=replace(work, variant=_own(back, kernel=DROPOUT_BACKWARD)))]
    if name in NO_WORK:
        return []
    if name == "index":
        return [_scattered(back, node.inputs[0], shape, picked(node.inputs[0], shape))]
    if work.op == "embedding":
        cols = work.dims["cols"]  # of each row that was read, also where a bag sums them
        return [_scattered(back, node.inputs[0], (*node.inputs[1], cols), cols)]
    if name in PICKS:  # zeros, and a copy of them that is filled
        return [fill_step(back, node.inputs[0]), wide_step(back, node.inputs[0], 1)]
    if name in REPEATS:
        return [_sum(back, node.inputs[0], shape)]
    if name in ARITHMETIC:
        return _of_elements(name, back, shape, read)
    if name in MAPS:
        return [wide_step(back, shape or (1,), inputs) for inputs in MAPS[name]]
    if name in ("norm", "linalg_vector_norm"):  # what is normed by its norm, 0 where that is 0
        marked = wide_step(back, shape or (1,), 1)
        return [wide_step(back, node.inputs[0], 1, BY_ROW)] * 3 + [marked]
    if name == "glu":
        return [wide_step(back, node.inputs[0], 1)]
    if name in ("amax", "amin"):
        return _of_largest(back, node.inputs[0], shape)
    if name in FUNCTIONS:
        return [wide_step(back, shape, 2, kernel=f"{plain_kernel(work.variant.kernel)}_backward")]
    if work.op == "softmax":  # of rows, not of elements
        kernel = LOG_SOFTMAX_BACKWARD if "log_softmax" in name else SOFTMAX_BACKWARD
        return [wide_step(back, shape, 2, kernel=kernel)]
    if node.op == "activation":
        return [wide_step(back, shape, 2)]
    if name in PADS and node.inputs[0] != shape:  # the middle of what was padded
        return [_copied(back, node.inputs[0])]
    if work.op == "pool" and "adaptive" not in name:
        variant = replace(work.variant, kernel=f"{work.variant.kernel}_backward")
        return [replace(back, work=replace(work, op="pool_gradient", variant=variant))]
    if node.op in ("reduction", "pool") or (node.op == "copy" and name not in ("to", "_to_copy")):
        return [wide_step(back, node.inputs[0], 1)]
    if name in ("to", "_to_copy"):
        return [back]  # converted back: as many bytes
    return [wide_step(back, shape, 1)]


def view_steps(call: OperatorCall) -> list[Step]:
    """What computes the gradient of a view.

    Args:
        call: one that is no operator.
    """
    tensors, results = described_tensors(call.arguments), described_tensors(call.result)
    name = call.target.split(".")[1] if "." in call.target else call.target
    if not call.trains or not tensors or not results or not (name in PARTS or name in EXPANDS):
        return []
    source, dtype = tensors[0][0], dtype_name(tensors[0][2])
    shape = results[0][0]
    if dtype not in DTYPE_BYTES or math.prod(shape) == math.prod(source) or 0 in source:
        return []
    joined = Variant(dtype, dtype, PARTS.get(name, BACKWARD))
    rows, cols = flat(source if name in _JOINED else shape)
    work = program("elementwise", joined, rows=rows, cols=cols, inputs=1)
    step = Step("elementwise", call.target, "backward", work)
    if name in EXPANDS:
        return [_sum(step, source, shape)]
    return [step] if name in _JOINED else [fill_step(step, source), step]


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
    work = program("elementwise", _own(step, lies, kernel), rows=rows, cols=cols, inputs=inputs)
    kind = step.kind if step.kind in ("norm", "softmax", "activation") else "elementwise"
    return replace(step, kind=kind, part="backward", work=work, calls=1, host=None)


def fill_step(step: Step, shape: Sequence[int]) -> Step:
    """Zeros of a shape."""
    rows, cols = flat(shape)
    work = program("fill", _own(step), rows=rows, cols=cols)
    return replace(step, kind="elementwise", work=work)


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


def channels(node: OperatorNode) -> int:
    """Channels that a batch norm norms each by itself; 1 of a norm of rows."""
    shape = node.outputs[0] if node.outputs else ()
    return shape[1] if node.target.endswith("batch_norm") and len(shape) > 1 else 1


def _own(step: Step, lies: str = "", kernel: str = BACKWARD) -> Variant:
    assert isinstance(step.work, Program)
    compute = step.work.variant.compute
    return Variant(compute, compute, kernel + lies)


def _gradient(work: Program, of: str) -> Variant:
    return replace(work.variant, kernel=work.variant.kernel + of)


def _scattered(back: Step, table: Sequence[int], shape: Sequence[int], cols: int) -> Step:
    """The gradient by a table that rows of ``cols`` were picked from: zeros, and rows added up."""
    assert isinstance(back.work, Program)
    rows, vocab = (max(1, math.prod(whole) // cols) for whole in (shape, table))
    work = program("embedding_backward", back.work.variant, rows=rows, vocab=vocab, cols=cols)
    return replace(back, work=work)


def _product(
    node: OperatorNode, back: Step, work: Program, read: Sequence[Operand]
) -> list[Step]:  # fmt: skip
    d, wanted = work.dims, product_gradients(node, read)
    left, right = _gradient(work, INPUT_GRADIENT), _gradient(work, WEIGHT_GRADIENT)
    if work.op == "matmul":
        b, m, n, k = (d[name] for name in ("batch", "m", "n", "k"))
        by_left = program("matmul", left, batch=b, m=m, n=k, k=n)
        by_right = program("matmul", right, batch=b, m=k, n=n, k=m)
    else:
        by_left = program("linear", left, rows=d["rows"], n=d["k"], k=d["n"])
        by_right = program("linear", right, rows=d["n"], n=d["k"], k=d["rows"])
    steps = [replace(back, work=by_right)] if wanted.right else []
    steps += [replace(back, work=by_left)] if wanted.left else []
    out = node.outputs[0]
    if len(read) > 2 and wanted.bias:
        bias = read[0 if bias_first(node) else 2]
        steps += _sums(back, [bias], out)
    if node.target.endswith("matmul") and len(read) > 1:
        for operand in read:
            batch = out[:-2]
            if operand.gradient and len(operand.shape) > 2 < len(out):
                whole = (*batch, *operand.shape[-2:])
                steps += _sums(back, [operand], whole)
    return steps


def _of_experts(back: Step, work: Program, read: Sequence[Operand]) -> list[Step]:
    """Gradients of a product by experts: by its rows another such product, and by the weights."""
    d = work.dims
    turned = {**d, "n": d["k"], "k": d["n"]}
    found = [
        replace(back, work=replace(work, op="grouped_gradient")),
        replace(back, work=program("grouped", work.variant, **turned)),
    ]
    wanted = (read[1].gradient, read[0].gradient)
    return [step for step, gradient in zip(found, wanted, strict=True) if gradient]


def _convolution(back: Step, work: Program, read: Sequence[Operand]) -> list[Step]:
    d, kernel = work.dims, work.variant.kernel.removesuffix(INPUT_GRADIENT)
    # A transposed one is the input's gradient of another, and its input's gradient that one.
    transposed = kernel != work.variant.kernel
    work = replace(work, variant=replace(work.variant, kernel=kernel))
    steps = [
        replace(back, work=replace(work, variant=_gradient(work, of)))
        for of, operand in zip(("" if transposed else INPUT_GRADIENT, WEIGHT_GRADIENT), read,
                               strict=False)
        if operand.gradient
    ]  # fmt: skip
    if any(operand.gradient for operand in read[2:]):  # the bias
        name = BACKWARD if CHANNELS_LAST in kernel else CHANNEL_SUM
        written = (d["cin"], d["inputs"]) if transposed else (d["cout"], d["outputs"])
        steps.append(_total(back, written[0], d["batch"] * written[1], name))
    return steps


def _norm(
    node: OperatorNode, back: Step, work: Program, read: Sequence[Operand]
) -> list[Step]:  # fmt: skip
    source, *scale = (operand.gradient for operand in read)
    d, of = work.dims, channels(node)
    if not source:
        if not any(scale):
            return []
        if of > 1:
            return [_total(back, of, d["rows"] * d["cols"] // of, CHANNEL_SUM)]
        return [_total(back, d["cols"], d["rows"], BACKWARD)]
    # Parameters' gradients are sums over the same tensors, which are read once more.
    size = {"rows": d["rows"], "cols": d["cols"], "channels": of, "results": 1 + any(scale)}
    words = work.variant.kernel.removeprefix(_BATCH_NORM) if of > 1 else ""
    if node.target.rpartition(".")[2] in ("group_norm", "instance_norm"):
        words = BY_GROUP
    return [replace(back, work=program("norm_gradient", _own(back, words), **size))]


def _of_elements(
    name: str, back: Step, shape: Sequence[int], read: Sequence[Operand]
) -> list[Step]:
    """Gradients of arithmetic on elements, by each operand, summed up over what it was given to."""
    steps = []
    for at, operand in enumerate(read):
        if not operand.gradient:
            continue
        others = [other.shape for place, other in enumerate(read) if place != at]
        lies = broadcast(others[0], shape) if others else ""
        whole = bool(others) and math.prod(others[0]) == math.prod(shape)
        if (name, at) == ("div", 1):  # ``-grad * ((x / y) / y)``
            own = not _smaller(operand, shape)
            mine = broadcast(operand.shape, shape)
            steps += [
                wide_step(back, shape, max(1, whole + own), mine or lies),
                wide_step(back, shape, 1 + own, mine),
                wide_step(back, shape, 1),
                wide_step(back, shape, 2),
            ]
        elif name in MAPS:
            steps += [wide_step(back, shape, inputs) for inputs in MAPS[name]]
        elif name in ("mul", "div"):  # the gradient times, or by, the other operand
            steps.append(wide_step(back, shape, 1 + whole, lies))
        elif name in ("where", "rsub") or (name, at) == ("sub", 1):
            steps.append(wide_step(back, shape, 1))
        steps += _sums(back, [operand], shape)
    return steps


def _of_largest(back: Step, whole: Sequence[int], kept: Sequence[int]) -> list[Step]:
    """The largest elements are marked and counted; the gradient is shared among them."""
    rows = max(1, math.prod(kept))
    marked = wide_step(back, whole, 1, BY_ROW)
    counted = _total(back, rows, max(1, math.prod(whole) // rows), ROW_SUM)
    return [marked, counted, wide_step(back, kept or (1,), 2), wide_step(back, whole, 1, BY_ROW)]


def _smaller(operand: Operand, shape: Sequence[int]) -> bool:
    return math.prod(operand.shape) < math.prod(shape)


def _sums(back: Step, read: Sequence[Operand], shape: Sequence[int]) -> list[Step]:
    return [_sum(back, o.shape, shape) for o in read if o.gradient and _smaller(o, shape)]


def _sum(back: Step, kept: Sequence[int], shape: Sequence[int]) -> Step:
    """The sum of a gradient over what an operand was broadcast along."""
    rows = max(1, math.prod(kept))
    cols = max(1, math.prod(shape) // rows)
    if kept and kept[-1] == 1 < shape[-1]:
        # Of channels (C, 1, 1) there are several rows each.
        return _total(back, rows, cols, ROW_SUM if cols <= math.prod(shape[-2:]) else CHANNEL_SUM)
    return _total(back, rows, cols, BACKWARD)


def _copied(back: Step, shape: Sequence[int]) -> Step:
    """A copy of a shape out of what is larger."""
    rows, cols = flat(shape)
    kept = program("elementwise", _own(back, kernel="torch.clone"), rows=rows, cols=cols, inputs=1)
    return replace(back, work=kept)


def _total(back: Step, rows: int, cols: int, kernel: str) -> Step:
    """``rows`` sums of ``cols`` elements each."""
    total = program("reduction", _own(back, kernel=kernel), rows=rows, cols=cols)
    return replace(back, kind="reduction", work=total)
