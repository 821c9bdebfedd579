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

from foreplan.cost_models.lowering.backward_steps import (
    BACKWARD,
    BY_GROUP,
    CHANNEL_SUM,
    fill_step,
    flat,
    given_back,
    own_variant,
    summed_steps,
    total_step,
    wide_step,
)
from foreplan.cost_models.lowering.element_gradients import element_gradients
from foreplan.cost_models.lowering.gradient_maps import EXPANDS, PARTS
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

#: An attention's gradient in forward passes, where no table has it: 2.5 times the FLOP at 0.86 of
#: the rate (Dao, FlashAttention-2, 2023: up to 73 % of an A100's peak forward, 63 % backward).
ATTENTION_BACKWARD = 3

_BATCH_NORM = "torch.batch_norm"
#: Views whose gradients are joined, parts that have none as zeros.
_JOINED = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "unbind"})


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
    if work.op in ("norm", "batch_norm"):
        return _norm(node, back, work, read)
    return element_gradients(node, back, read)


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
        return [given_back(step, source, shape)]
    return [step] if name in _JOINED else [fill_step(step, source), step]


def channels(node: OperatorNode) -> int:
    """Channels that a batch norm norms each by itself; 1 of a norm of rows."""
    shape = node.outputs[0] if node.outputs else ()
    return shape[1] if node.target.endswith("batch_norm") and len(shape) > 1 else 1


def _gradient(work: Program, of: str) -> Variant:
    return replace(work.variant, kernel=work.variant.kernel + of)


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
        steps += summed_steps(back, [bias], out)
    if node.target.endswith("matmul") and len(read) > 1:
        for operand in read:
            batch = out[:-2]
            if operand.gradient and len(operand.shape) > 2 < len(out):
                whole = (*batch, *operand.shape[-2:])
                steps += summed_steps(back, [operand], whole)
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
        steps.append(total_step(back, written[0], d["batch"] * written[1], name))
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
            return [total_step(back, of, d["rows"] * d["cols"] // of, CHANNEL_SUM)]
        return [total_step(back, d["cols"], d["rows"], BACKWARD)]
    # Parameters' gradients are sums over the same tensors, which are read once more.
    size = {"rows": d["rows"], "cols": d["cols"], "channels": of, "results": 1 + any(scale)}
    words = work.variant.kernel.removeprefix(_BATCH_NORM) if of > 1 else ""
    if node.target.rpartition(".")[2] in ("group_norm", "instance_norm"):
        words = BY_GROUP
    return [replace(back, work=program("norm_gradient", own_variant(back, words), **size))]
