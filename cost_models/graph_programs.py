"""Lowers an operator graph to the programs that eager execution runs: forward, backward, optimizer.

Each operator becomes one `Step` of a pass. A training step adds, for each forward step in reverse,
the programs of its gradients (two products for a linear, one where its input has no gradient), one
sum wherever a tensor was read twice, and one fused AdamW update of the trained parameters.
Attention's backward pass counts as three forward passes: 2.5 times the FLOP at 0.86 of the
forward's rate (Dao, FlashAttention-2, 2023: up to 73 % of an A100's peak forward, 63 % backward).

Decoders of a described `Model` are captured with two layers and one repeated, because their
layers are equal; a test compares with the capture of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from foreplan.cost_models.costs import Segment, Work
from foreplan.cost_models.graph_gradients import (
    Operand,
    Operands,
    gradient_readers,
    has_backward,
    operands,
    product_gradients,
    trained_parameters,
)
from foreplan.cost_models.host_call import HostCall, host_kind
from foreplan.datasets.model import Model
from foreplan.datasets.operator_call import TENSOR
from foreplan.datasets.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.program import DTYPE_BYTES, Program, Variant, program
from foreplan.errors import SpecError

Phase = Literal["inference", "training"]
Part = Literal["forward", "loss", "backward", "optimizer"]

PHASES: tuple[Phase, ...] = ("inference", "training")
PARTS: tuple[Part, ...] = ("forward", "loss", "backward", "optimizer")

#: What names of kernels say of a convolution or a pool: how its images lie, which gradient it is.
CHANNELS_LAST, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    "_channels_last", "_input_gradient", "_weight_gradient",
)  # fmt: skip
#: Kernel of what a backward pass does beside products and convolutions.
BACKWARD = "torch.backward"

#: What an attention's backward pass costs in forward passes; see the module.
ATTENTION_BACKWARD = 3

#: Kinds of nodes that are no work of the device: inputs are there, constants are made once.
_NOTHING = frozenset({"input"})


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a pass.

    Attributes:
        kind: as `OperatorNode.op`, or ``optimizer``.
        target: the operator's own name (``aten.linear``).
        part: forward, loss, backward or optimizer.
        work: what it costs.
        calls: ATen calls that the host makes for it.
        host: of a forward step, the call as the host issues it, gradients included.
    """

    kind: str
    target: str
    part: Part
    work: Work
    calls: int = 1
    host: HostCall | None = None


def lower(graph: OperatorGraph, phase: Phase = "inference") -> list[Step]:
    """Programs of one pass over a graph, in order.

    Args:
        graph: captured with ``eager=True``.
        phase: ``inference`` is the forward pass; ``training`` adds a cross-entropy loss if the
            output looks like logits, the backward pass and the update. Frozen parameters get no
            gradient and no update; of a module whose parameters are all frozen all are trained.

    Raises:
        ValueError: a training step of a graph that was captured without its calls.
    """
    if phase == "training" and not graph.calls:
        raise ValueError("a training step of a graph captured without its calls")
    nodes = [node for node in graph.operators() if node.op not in _NOTHING]
    read = operands(graph)
    readers = gradient_readers(graph, read)
    forward = _forward(nodes, read, readers, _channels_last(graph))
    if phase == "inference":
        return forward
    sizes = trained_parameters(graph)
    return [*forward, *_training(nodes, forward, read, readers, sum(sizes.values()), len(sizes))]


def model_steps(model: Model, *, batch: int, tokens: int, phase: Phase = "inference") -> list[Step]:
    """Programs of one pass of a described decoder, captured with at most two layers.

    Raises:
        SpecError: sizes that the model does not take, or a model that cannot be captured.
    """
    from foreplan.datasets.capture import capture

    if batch < 1 or tokens < 1:
        raise SpecError("batch x sequence length", got=f"{batch} x {tokens}", expected="at least 1")
    few = min(model.layers, 2)
    graph = capture(model.model_copy(update={"layers": few}), batch=batch, tokens=tokens,
                    eager=True)  # fmt: skip
    if model.layers == few:
        return lower(graph, phase)
    nodes = [node for node in graph.operators() if node.op not in _NOTHING]
    instances = next(iter(graph.blocks.values()), ())
    if len(instances) != few:
        whole = capture(model, batch=batch, tokens=tokens, eager=True)
        return lower(whole, phase)
    one, two = (
        [index for index, node in enumerate(nodes) if node.instance == name] for name in instances
    )
    # Layers in the middle are read like the first one and make views like the second one: the
    # first makes those that all share.
    middle = [replace(nodes[i], calls=nodes[j].calls) for i, j in zip(one, two, strict=True)]
    repeated = [*nodes[: two[0]], *middle * (model.layers - few), *nodes[two[0] :]]
    read = operands(graph)
    readers = gradient_readers(graph, read)
    forward = _forward(repeated, read, readers)
    if phase == "inference":
        return forward
    size = model.parameters * int(DTYPE_BYTES[model.dtype])
    inside = sum(name.startswith(f"{instances[0]}.") for name in graph.parameters)
    tensors = len(graph.parameters) + inside * (model.layers - few)
    return [*forward, *_training(repeated, forward, read, readers, size, tensors)]


def programs(steps: Iterable[Step]) -> list[Program]:
    """The distinct programs of a pass, in order of first use."""
    found: dict[Program, None] = {}
    for step in steps:
        works = [step.work] if not isinstance(step.work, Segment) else [
            work for work, _ in step.work.parts
        ]  # fmt: skip
        found |= {work: None for work in works if isinstance(work, Program)}
    return list(found)


# ------------------------------------------------------------------------------------ forward


def _channels_last(graph: OperatorGraph) -> frozenset[str]:
    """Convolutions and pools whose images lie with their channels last."""
    found = set[str]()
    for call in graph.calls:
        if call.operator and ("conv" in call.target or "pool" in call.target):
            tensors = json.loads(call.arguments)[0]
            shape, strides, _ = tensors[0][TENSOR]
            if shape[1] > 1 and strides[1] == 1 < math.prod(shape[2:]):
                found.add(call.operator)
    return frozenset(found)


def _forward(
    nodes: Sequence[OperatorNode], read: Operands, readers: Mapping[str, int],
    channels_last: frozenset[str] = frozenset(),
) -> list[Step]:  # fmt: skip
    reached = [has_backward(node, read) for node in nodes]
    return [
        Step(node.op, node.target, "forward", _work(node, node.name in channels_last), node.calls,
             HostCall(host_kind(node), node.calls - 1, wanted,
                      max(0, readers.get(node.name, 1) - 1) if wanted else 0))
        for node, wanted in zip(nodes, reached, strict=True)
    ]  # fmt: skip


def _work(node: OperatorNode, channels_last: bool) -> Work:
    kernel = "torch." + node.target.rpartition(".")[2] + CHANNELS_LAST * channels_last
    variant = Variant(_dtype(node.dtype), _dtype(node.dtype), kernel)
    if node.op in ("linear", "matmul") and node.inputs:
        return _product(node, variant)
    if node.op == "convolution":
        return _convolution(node, variant)
    if node.op == "attention":
        return _attention(node, variant)
    rows, cols = _flat(node.outputs[0] if node.outputs else ())
    if node.op in ("norm", "softmax"):
        return program(node.op, variant, rows=rows, cols=cols)
    if node.op == "embedding":
        return program("embedding", variant, rows=rows, cols=cols)
    if node.op in ("reduction", "pool") and node.inputs:
        elements = max(1, math.prod(node.inputs[0]))
        kept = max(1, min(rows * cols, elements))
        size = {"rows": kept, "cols": max(1, round(elements / kept))}
        if node.op == "reduction":
            return program("reduction", variant, **size)
        return program("pool", variant, **size, taps=max(1, round(node.flops / (rows * cols))))
    written = rows * cols * DTYPE_BYTES[variant.compute]
    # Broadcast operands are smaller than the result: as many inputs as there are bytes.
    inputs = max(1, round(node.bytes / written) - 1)
    return program("elementwise", variant, rows=rows, cols=cols, inputs=inputs)


def _product(node: OperatorNode, variant: Variant) -> Program:
    out = node.outputs[0] or (1,)
    n = out[-1]
    # FLOP = 2 * (elements of the result) * k, whatever the operands' order.
    k = max(1, round(node.flops / 2 / max(1, math.prod(out))))
    if node.op == "linear":
        return program("linear", variant, rows=max(1, math.prod(out) // n), n=n, k=k)
    m = out[-2] if len(out) > 1 else 1
    return program("matmul", variant, batch=max(1, math.prod(out[:-2])), m=m, n=n, k=k)


def _convolution(node: OperatorNode, variant: Variant) -> Program:
    source, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
    transposed = "transpose" in node.target
    groups = max(1, source[1] // weight[0 if transposed else 1]) if not transposed else 1
    return program(
        "conv", variant, batch=source[0], groups=groups, cin=source[1], cout=out[1],
        taps=math.prod(weight[2:]), inputs=math.prod(source[2:]), outputs=math.prod(out[2:]),
    )  # fmt: skip


def _attention(node: OperatorNode, variant: Variant) -> Program:
    query, key = node.inputs[0], node.inputs[1]
    # self-attention of one tensor: `external` inputs stand once.
    key = key if len(node.inputs) > 1 else query
    *lead, heads, queries, head_dim = query
    pairs = node.flops / (4.0 * math.prod(lead) * heads * head_dim)
    causal = pairs < queries * key[-2] and queries > 1
    return program(
        "attention" if causal or queries == 1 else "full_attention", variant,
        batch=max(1, math.prod(lead)), queries=queries, keys=key[-2], heads=heads,
        kv_heads=key[-3], head_dim=head_dim,
    )  # fmt: skip


def _dtype(name: str) -> str:
    """Our dtype with the width of torch's; masks are bytes."""
    return name if name in DTYPE_BYTES else "int8"


def _flat(shape: Sequence[int]) -> tuple[int, int]:
    cols = max(1, shape[-1]) if shape else 1
    return max(1, math.prod(shape) // cols), cols


# ----------------------------------------------------------------------------------- training


def _training(
    nodes: Sequence[OperatorNode],
    forward: Sequence[Step],
    read: Operands,
    readers: Mapping[str, int],
    parameter_bytes: int,
    tensors: int,
) -> list[Step]:
    """Loss, backward pass and update of a forward pass."""
    steps: list[Step] = []
    last = forward[-1].work if forward else None
    if isinstance(last, Program) and last.op == "linear":
        d, dtype = last.dims, last.variant.compute
        logits = Variant(dtype, dtype, "torch.cross_entropy")
        size = {"rows": d["rows"], "cols": d["n"]}
        steps += [
            Step("softmax", "cross_entropy", "loss", program("softmax", logits, **size)),
            Step("softmax", "cross_entropy", "backward",
                 program("elementwise", logits, **size, inputs=1)),
        ]  # fmt: skip
    for node, step in reversed(list(zip(nodes, forward, strict=True))):
        if not has_backward(node, read):
            continue
        # A tensor that several operators read gets the sum of their gradients.
        for _ in range(max(0, readers.get(node.name, 1) - 1)):
            steps.append(_wide(step, node.outputs[0], 2))
        steps += _backward(node, step, read[node.name])
    dtype = next((_dtype(node.dtype) for node in nodes if node.parameters), "fp32")
    count = int(parameter_bytes / DTYPE_BYTES[dtype])
    if count:
        update = program("adamw", Variant(dtype, dtype, "torch.adamw"), parameters=count)
        # One kernel, but the host goes through the tensors.
        steps.append(Step("optimizer", "adamw", "optimizer", update, tensors))
    return steps


def _backward(node: OperatorNode, step: Step, read: Sequence[Operand]) -> list[Step]:
    """What computes the gradients by those operands that have one."""
    work = step.work
    assert isinstance(work, Program)  # every forward step is one program
    d, v = work.dims, work.variant
    back = replace(step, part="backward", calls=1, host=None)
    own = Variant(v.compute, v.compute, BACKWARD)
    if work.op == "linear":
        wanted = product_gradients(node, read)
        steps = []
        if wanted.right:
            grad = program("linear", v, rows=d["n"], n=d["k"], k=d["rows"])
            steps.append(replace(back, work=grad))
        if wanted.left:
            grad = program("linear", v, rows=d["rows"], n=d["k"], k=d["n"])
            steps.append(replace(back, work=grad))
        if wanted.bias:
            steps.append(replace(back, kind="reduction", work=program(
                "reduction", own, rows=d["n"], cols=d["rows"])))  # fmt: skip
        return steps
    if work.op == "matmul":
        wanted, steps = product_gradients(node, read), []
        if wanted.left:
            grad = program("matmul", v, batch=d["batch"], m=d["m"], n=d["k"], k=d["n"])
            steps.append(replace(back, work=grad))
        if wanted.right:
            grad = program("matmul", v, batch=d["batch"], m=d["k"], n=d["n"], k=d["m"])
            steps.append(replace(back, work=grad))
        return steps
    if work.op == "conv":
        return [
            replace(back, work=replace(work, variant=replace(v, kernel=v.kernel + of)))
            for of, operand in zip((INPUT_GRADIENT, WEIGHT_GRADIENT), read, strict=False)
            if operand.gradient
        ]
    if work.op in ("attention", "full_attention"):
        return [replace(back, work=Segment("attention backward", ((work, ATTENTION_BACKWARD),)))]
    if work.op == "embedding":
        # The gradient of the whole table is made and then filled.
        return [_wide(back, node.inputs[0], 1), back]
    shape = node.outputs[0] if node.outputs else ()
    if work.op in ("norm", "softmax") or node.op == "activation":
        source, *scale = (operand.gradient for operand in read)
        steps = [_wide(back, shape, 2)] if source or work.op != "norm" else []
        if work.op == "norm" and any(scale):
            steps.append(replace(back, kind="reduction", work=program(
                "reduction", own, rows=d["cols"], cols=d["rows"])))  # fmt: skip
        return steps
    if node.op in ("reduction", "pool"):
        return [_wide(back, node.inputs[0], 1)]
    name = node.target.rpartition(".")[2]
    if name in ("add", "sub"):
        return []
    if name in ("mul", "div", "pow"):
        # One product for each operand that has a gradient; those of broadcast ones are left out.
        large = math.prod(shape)
        return [_wide(back, shape, 2) for o in read if o.gradient and math.prod(o.shape) == large]
    return [_wide(back, shape, 1)]


def _wide(step: Step, shape: Sequence[int], inputs: int) -> Step:
    """A backward step that reads ``inputs`` tensors of a shape and writes one."""
    rows, cols = _flat(shape)
    assert isinstance(step.work, Program)
    v = step.work.variant
    variant = Variant(v.compute, v.compute, BACKWARD)
    work = program("elementwise", variant, rows=rows, cols=cols, inputs=inputs)
    kind = step.kind if step.kind in ("norm", "softmax", "activation") else "elementwise"
    return replace(step, kind=kind, part="backward", work=work, calls=1, host=None)
