"""Lowers an operator graph to the programs that eager execution runs: forward, backward, optimizer.

Each operator becomes one `Step` of a pass. A training step adds, for each forward step in reverse,
the programs of its gradients (two products for a linear, one where its input has no gradient), one
sum wherever a tensor was read twice, and one fused AdamW update of the trained parameters.
What computes gradients: `graph_backward`.
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
from foreplan.cost_models.graph_backward import (
    broadcast,
    flat,
    gradient_steps,
    view_gradients,
    wide_step,
)
from foreplan.cost_models.graph_gradients import (
    Operands,
    gradient_readers,
    has_backward,
    operands,
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

#: What the name of a kernel says: images lie with their channels last; a convolution adds a bias.
CHANNELS_LAST, BIAS = "_channels_last", "_bias"
#: Maps that broadcast an operand.
_BROADCASTS = frozenset({"add", "sub", "mul", "div", "where", "maximum", "minimum"})

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
    views = view_gradients(graph)
    size = sum(sizes.values())
    return [*forward, *_training(nodes, forward, read, readers, views, size, len(sizes))]


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
    views = view_gradients(graph)
    return [*forward, *_training(repeated, forward, read, readers, views, size, tensors)]


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
    rows, cols = flat(node.outputs[0] if node.outputs else ())
    if node.target.endswith("batch_norm") and node.outputs and len(node.outputs[0]) > 2:
        cols = max(1, math.prod(node.outputs[0][2:]))
        rows = max(1, math.prod(node.outputs[0]) // cols)
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
    if node.target.rpartition(".")[2] in _BROADCASTS and node.outputs:
        lies = max(broadcast(shape, node.outputs[0]) for shape in (*node.inputs, ()))
        variant = replace(variant, kernel=variant.kernel + lies)
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
    if len(node.inputs) > 2:
        variant = replace(variant, kernel=variant.kernel + BIAS)
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


# ----------------------------------------------------------------------------------- training


def _training(
    nodes: Sequence[OperatorNode],
    forward: Sequence[Step],
    read: Operands,
    readers: Mapping[str, int],
    views: Mapping[str, Sequence[tuple[str, Program]]],
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
            steps.append(wide_step(step, node.outputs[0], 2))
        steps += gradient_steps(node, step, read[node.name])
        steps += [Step("elementwise", target, "backward", work)
                  for target, work in views.get(node.name, ())]  # fmt: skip
    dtype = next((_dtype(node.dtype) for node in nodes if node.parameters), "fp32")
    count = int(parameter_bytes / DTYPE_BYTES[dtype])
    if count:
        update = program("adamw", Variant(dtype, dtype, "torch.adamw"), parameters=count)
        # One kernel, but the host goes through the tensors.
        steps.append(Step("optimizer", "adamw", "optimizer", update, tensors))
    return steps
