"""Lowers an operator graph to the programs that eager execution runs: forward, backward, optimizer.

Each operator becomes one `Step` of a pass. A training step adds, for each forward step in reverse,
the programs of its gradients (two products for a linear, one where its input has no gradient), one
sum wherever a tensor or a parameter was read twice, and one fused AdamW update of the trained
parameters. What computes gradients: `graph_backward`.

Decoders of a described `Model` are captured with two layers and one repeated, because their
layers are equal; a test compares with the capture of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from foreplan.cost_models.costs import Segment
from foreplan.cost_models.lowering.attention_parts import WITHIN
from foreplan.cost_models.lowering.backward_steps import broadcast, flat, picked, sum_step
from foreplan.cost_models.lowering.compiled_steps import compiled_steps
from foreplan.cost_models.lowering.copy_layout import MIXED, copied_sizes
from foreplan.cost_models.lowering.expert_products import by_experts
from foreplan.cost_models.lowering.gradient_maps import PADS, SCANS
from foreplan.cost_models.lowering.graph_backward import channels, gradient_steps, view_steps
from foreplan.cost_models.lowering.graph_gradients import (
    Operands,
    Visit,
    has_backward,
    operands,
    sums,
    tied_parameters,
    trained_parameters,
    visits,
)
from foreplan.cost_models.lowering.graph_loss import loss_steps
from foreplan.cost_models.lowering.graph_step import Phase, Step
from foreplan.cost_models.lowering.graph_whole import host_calls, whole_program
from foreplan.cost_models.lowering.hidden_copies import backward_copies, hidden_copies
from foreplan.cost_models.lowering.host_call import HostCall, host_kind
from foreplan.cost_models.lowering.kernel_words import kernel_words, scanned
from foreplan.cost_models.lowering.recomputed import recomputed_steps
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.network_folder import NetworkFolder, network_module
from foreplan.datasets.graphs.operator_call import OperatorCall, described_tensors, dtype_name
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.models.families import SLIDING_EVERYWHERE
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import CHANNELS_LAST, INPUT_GRADIENT, Program, Variant, program
from foreplan.datasets.sweeps.update_packing import packed_update
from foreplan.errors import SpecError

#: Kernel of a product of two vectors.
DOT = "torch.sum"
#: What the name of a kernel says: a convolution adds a bias.
BIAS = "_bias"
#: Maps that broadcast an operand.
_BROADCASTS = frozenset({"add", "sub", "mul", "div", "where", "maximum", "minimum"})

#: Complex numbers are two real ones.
_PARTS = MappingProxyType({"complex64": "fp32", "complex128": "fp64", "complex32": "fp16"})


def lower(graph: OperatorGraph, phase: Phase = "inference") -> list[Step]:
    """Programs of one pass over a graph, in order.

    Args:
        graph: captured with ``eager=True``, for a training step with ``training=True`` too, unless
            that runs in evaluation mode.
        phase: ``inference`` is the forward pass; ``training`` adds a cross-entropy loss if the
            output looks like logits, the backward pass and the update. Frozen parameters get no
            gradient and no update; of a module whose parameters are all frozen all are trained.

    Raises:
        SpecError: a training step of a module whose results have no gradient.
        ValueError: a training step of a graph that was captured without its calls, or of one that
            inference runs otherwise.
    """
    nodes = [node for node in graph.operators() if node.op != "input"]  # inputs are there
    if phase == "training" and nodes and not graph.calls:
        raise ValueError("a training step of a graph captured without its calls")
    if phase == "training" and any(node.within for node in nodes):
        raise ValueError("a training step of a graph captured as inference fuses its layers")
    read = operands(graph)
    forward = _forward(nodes, read, graph, phase)
    copies = hidden_copies(graph.calls)
    whole = _with_copies(nodes, forward, copies)
    if phase == "inference":
        return whole
    sizes = trained_parameters(graph)
    if graph.parameters and not sizes:
        raise SpecError(
            f"training step of {graph.name}", got="results that no parameter has a gradient by",
            expected="a loss, or what one is computed from, among what forward returns",
        )  # fmt: skip
    passed, behind = visits(graph)
    back = [*loss_steps(forward), *_backward(passed, forward, read, behind, copies), *_tied(graph)]
    return [*whole, *back, *_update(nodes, list(sizes.values()))]


def lower_compiled(graph: OperatorGraph, phase: Phase = "inference") -> list[Step]:
    """Programs of one pass over a graph that ``torch.compile`` compiled, in order.

    Args:
        graph: as of `lower`.
        phase: likewise.

    Raises:
        SpecError: as of `lower`.
        ValueError: likewise.
    """
    eager = lower(graph, phase)
    nodes = [node for node in graph.operators() if node.op != "input"]
    read = operands(graph)
    forward = _forward(nodes, read, graph, phase)
    by_name = {node.name: step for node, step in zip(nodes, forward, strict=True)}
    called, back = compiled_steps(graph, by_name, read, phase)
    if phase == "inference":
        return called
    update = [step for step in eager if step.part == "optimizer"]
    return [*called, *loss_steps(forward), *back, *update]


def model_steps(
    model: Model | NetworkFolder, *, batch: int, tokens: int, phase: Phase = "inference",
    compiled: bool = False,
) -> list[Step]:  # fmt: skip
    """Programs of one pass of a described decoder, captured with at most two layers if it can be.

    Args:
        model: whose pass.
        batch: sequences.
        tokens: of each.
        phase: as of `lower`.
        compiled: as of `lower_compiled`, for which all layers are captured.

    Raises:
        SpecError: sizes that the model does not take, or a model that cannot be captured.
    """
    from foreplan.datasets.graphs.capture import capture

    if batch < 1 or tokens < 1:
        raise SpecError("batch x sequence length", got=f"{batch} x {tokens}", expected="at least 1")
    training = phase == "training"
    if isinstance(model, NetworkFolder):
        module, inputs = network_module(model, batch=batch, tokens=tokens)
        lowered = lower_compiled if compiled else lower
        return lowered(capture(module, inputs, eager=True, training=training), phase)
    if compiled:
        graph = capture(model, batch=batch, tokens=tokens, eager=True, training=training)
        return lower_compiled(graph, phase)
    few = min(model.layers, 2) if _alike(model, tokens) else model.layers
    graph = capture(model.model_copy(update={"layers": few}), batch=batch, tokens=tokens,
                    eager=True, training=training)  # fmt: skip
    if model.layers == few:
        return lower(graph, phase)
    passed, behind = visits(graph)
    nodes = [visit.node for visit in passed]
    instances = next(iter(graph.blocks.values()), ())
    if len(instances) != few:
        graph = capture(model, batch=batch, tokens=tokens, eager=True, training=training)
        return lower(graph, phase)
    one, two = (
        [index for index, node in enumerate(nodes) if node.instance == name] for name in instances
    )
    # Layers in the middle are read like the first one and make views like the second one: the
    # first makes those that all share.
    middle = [
        Visit(replace(nodes[i], calls=nodes[j].calls), passed[i].readers, passed[j].views)
        for i, j in zip(one, two, strict=True)
    ]
    repeated = [*passed[: two[0]], *middle * (model.layers - few), *passed[two[0] :]]
    read = operands(graph)
    nodes = [visit.node for visit in repeated]
    forward = _forward(nodes, read, graph, phase)
    copies = hidden_copies(graph.calls)
    whole = _with_copies(nodes, forward, copies)
    if phase == "inference":
        return whole
    sizes = list(graph.parameters.items())
    first = [item for item in sizes if item[0].startswith(f"{instances[0]}.")]
    place = sizes.index(first[-1]) + 1 if first else 0
    sizes[place:place] = first * (model.layers - few)
    back = [
        *loss_steps(forward),
        *_backward(repeated, forward, read, behind, copies),
        *_tied(graph),
    ]
    return [*whole, *back, *_update(nodes, [size for _, size in sizes])]


def _alike(model: Model, tokens: int) -> bool:
    """Whether all layers run the same programs."""
    slides = tokens >= (model.sliding_window or tokens + 1)
    some = slides and model.family not in SLIDING_EVERYWHERE
    kinds = model.rotations_of(0, model.layers)
    return len(set(model.layer_classes)) == 1 and len(kinds) <= 1 and not some


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


def _forward(
    nodes: Sequence[OperatorNode], read: Operands, graph: OperatorGraph, phase: Phase
) -> list[Step]:
    calls = graph.calls
    reached = [has_backward(node, read) for node in nodes]
    added, layouts = sums(calls), kernel_words(calls, phase)
    called = {call.operator: call for call in calls}
    works = [
        whole_program(node, called.get(node.name), _variant(node))
        or _work(node, layouts.get(node.name, ""), called.get(node.name))
        for node in nodes
    ]
    works = by_experts(nodes, works)
    return [
        Step(node.op, node.target, "forward", work, host_calls(work, node.calls),
             HostCall(host_kind(node), node.calls - 1, wanted,
                      added.get(node.name, 0) if wanted else 0),
             graph.evaluated_around(node.module), _in_place(called.get(node.name)))
        for node, work, wanted in zip(nodes, works, reached, strict=True)
    ]  # fmt: skip


def _in_place(call: OperatorCall | None) -> bool:
    """Whether a call writes into an operand, as its name says (``aten.relu_.default``)."""
    if call is None:
        return False
    name = call.target.split(".")[1]
    return name.endswith("_") and not name.endswith("__")  # as ``__and__``


def _with_copies(
    nodes: Sequence[OperatorNode], forward: Sequence[Step], copies: Mapping[str, Sequence[Step]]
) -> list[Step]:  # fmt: skip
    """A forward pass with what operators copy before they begin."""
    found: list[Step] = []
    for node, step in zip(nodes, forward, strict=True):
        found += copies.get(node.name, [])
        found.append(step)
    return found


def _work(node: OperatorNode, layout: str, call: OperatorCall | None) -> Program:
    variant = _variant(node, layout)
    if node.op in ("linear", "matmul") and node.inputs:
        return _product(node, variant)
    if node.op == "convolution":
        return _convolution(node, variant)
    if node.op == "attention":
        return _attention(node, variant)
    rows, cols = flat(node.outputs[0] if node.outputs else ())
    if channels(node) > 1:
        cols = max(1, math.prod(node.outputs[0][2:]))
        rows = max(1, math.prod(node.outputs[0]) // cols)
    elif node.target.endswith("layer_norm") and len(node.inputs) > 1:  # of several extents
        cols = math.prod(node.inputs[1])
        rows = max(1, math.prod(node.outputs[0]) // cols)
    elif call and (node.op == "softmax" or node.target.rpartition(".")[2] in SCANS):
        cols = scanned(call.arguments) or cols
        rows = max(1, math.prod(node.outputs[0]) // cols)
    if channels(node) > 1:
        return program("batch_norm", variant, rows=rows, cols=cols, channels=channels(node))
    if node.op in ("norm", "softmax"):
        return program(node.op, variant, rows=rows, cols=cols)
    if node.target.endswith(".dropout"):
        return program("dropout", variant, rows=rows, cols=cols)
    if node.op == "embedding":  # as many rows as are read, though a bag writes their sum alone
        return program("embedding", variant, rows=max(1, math.prod(node.inputs[1])), cols=cols)
    if node.target.endswith(".index") and len(node.inputs) > 1:  # rows of a table, as wide as left
        cols = picked(node.inputs[0], node.outputs[0])
        rows = max(1, math.prod(node.outputs[0]) // cols)
        return program("embedding", variant, rows=rows, cols=cols)
    if node.target.rpartition(".")[2] in SCANS:
        return program("reduction", variant, rows=rows, cols=cols)
    if node.op in ("reduction", "pool") and node.inputs:
        elements = max(1, math.prod(node.inputs[0]))
        kept = max(1, min(rows * cols, elements))
        size = {"rows": kept, "cols": max(1, round(elements / kept))}
        if node.op == "reduction":
            return program("reduction", variant, **size)
        return program("pool", variant, **size, taps=max(1, round(node.flops / (rows * cols))))
    if call and layout == CHANNELS_LAST:
        rows, cols = copied_sizes(call.arguments)
    cols *= 2 if node.dtype in _PARTS else 1
    written = rows * cols * DTYPE_BYTES[variant.compute]
    # Broadcast operands are smaller than the result: as many inputs as there are bytes.
    inputs = max(1, round(node.bytes / written) - 1)
    if node.target.rpartition(".")[2] in PADS:  # which moves as much as one more input
        inputs += node.inputs[:1] != node.outputs[:1]  # else nothing is added, and it copies
    if node.target.rpartition(".")[2] in _BROADCASTS and node.outputs:
        if MIXED in layout and math.prod(node.inputs[-1]) == rows * cols == math.prod(
            node.inputs[0]
        ):
            inputs = 2  # one of them half as wide
        lies = max(broadcast(shape, node.outputs[0]) for shape in (*node.inputs, ()))
        variant = replace(variant, kernel=variant.kernel + lies)
    return program("elementwise", variant, rows=rows, cols=cols, inputs=inputs)


def _variant(node: OperatorNode, layout: str = "") -> Variant:
    kernel = "torch." + node.target.rpartition(".")[2] + layout
    return Variant(_dtype(node.dtype), _dtype(node.dtype), kernel)


def _product(node: OperatorNode, variant: Variant) -> Program:
    out = node.outputs[0] or (1,)
    n = out[-1]
    # FLOP = 2 * (elements of the result) * k, whatever the operands' order.
    k = max(1, round(node.flops / 2 / max(1, math.prod(out))))
    if node.dtype in _PARTS:  # a complex product as a real one of [re -im; im re]
        n, k = 2 * n, 2 * k
    if math.prod(out) == 1 and node.dtype not in _PARTS:
        # No kernel for matrices: a sum over both, split as sums are.
        return program("reduction", replace(variant, kernel=DOT), rows=1, cols=2 * k)
    if node.op == "linear":
        return program("linear", variant, rows=max(1, math.prod(out) // out[-1]), n=n, k=k)
    m = out[-2] if len(out) > 1 else 1
    return program("matmul", variant, batch=max(1, math.prod(out[:-2])), m=m, n=n, k=k)


def _convolution(node: OperatorNode, variant: Variant) -> Program:
    source, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
    groups = max(1, source[1] // weight[1])
    if "transpose" in node.target:
        # What the gradient by the input of the convolution from ``out`` to ``source`` computes.
        groups = max(1, out[1] // weight[1])
        source, out = out, source
        kernel = variant.kernel.replace("conv_transpose", "conv") + INPUT_GRADIENT
        variant = replace(variant, kernel=kernel)
    elif len(node.inputs) > 2:
        variant = replace(variant, kernel=variant.kernel + BIAS)
    return program(
        "conv", variant, batch=source[0], groups=groups, cin=source[1], cout=out[1],
        taps=math.prod(weight[2:]), inputs=math.prod(source[2:]), outputs=math.prod(out[2:]),
    )  # fmt: skip


def _attention(node: OperatorNode, variant: Variant) -> Program:
    query = node.inputs[0]
    *lead, heads, queries, head_dim = query
    # Of one tensor that is all three an input stands once, and a mask may be what comes behind it.
    alike = (len(query), head_dim)
    key = next((shape for shape in node.inputs[1:] if (len(shape), shape[-1]) == alike), query)
    pairs = node.flops / (4.0 * math.prod(lead) * heads * head_dim)
    causal = pairs < queries * key[-2] and queries > 1
    if node.within:
        variant = replace(variant, kernel=variant.kernel + WITHIN)
    return program(
        "attention" if causal or queries == 1 else "full_attention", variant,
        batch=max(1, math.prod(lead)), queries=queries, keys=key[-2], heads=heads,
        kv_heads=key[-3], head_dim=head_dim,
    )  # fmt: skip


def _dtype(name: str) -> str:
    """Our dtype with the width of torch's, of complex numbers that of a part; masks are bytes."""
    name = _PARTS.get(name, name)
    return name if name in DTYPE_BYTES else "int8"


# ----------------------------------------------------------------------------------- training


def _backward(
    passed: Sequence[Visit], forward: Sequence[Step], read: Operands,
    behind: Sequence[OperatorCall], copies: Mapping[str, Sequence[Step]],
) -> list[Step]:  # fmt: skip
    """Gradients of a pass, from its end on, views ``behind`` the last operator first."""
    steps = _of_views(behind)
    again = recomputed_steps(passed, forward, read, copies)
    for index, (visit, step) in reversed(list(enumerate(zip(passed, forward, strict=True)))):
        node = visit.node
        steps += again.get(index, [])
        if has_backward(node, read):
            # A tensor that is read several times gets the sum of its gradients.
            summed = sum_step(node.target, node.outputs[0], _dtype(node.dtype))
            steps += [summed] * max(0, visit.readers - 1)
            steps += backward_copies(copies.get(node.name, []))
            steps += gradient_steps(node, step, read[node.name])
        steps += _of_views(visit.views)
    return steps


def _of_views(calls: Sequence[OperatorCall]) -> list[Step]:
    steps: list[Step] = []
    for call in reversed(calls):
        results = described_tensors(call.result)
        if call.trains and results:
            shape, _, kind = results[0]
            again = sum_step(call.target, shape, _dtype(dtype_name(kind)))
            steps += [again] * max(0, call.readers - 1)
            steps += view_steps(call)
    return steps


def _tied(graph: OperatorGraph) -> list[Step]:
    return [sum_step("aten.add", shape, _dtype(dtype)) for shape, dtype in tied_parameters(graph)]


def _update(nodes: Sequence[OperatorNode], sizes: Sequence[float]) -> list[Step]:
    """One fused update of parameters of so many bytes each, in their order."""
    dtype = next((_dtype(node.dtype) for node in nodes if node.parameters), "fp32")
    elements = [int(size / DTYPE_BYTES[dtype]) for size in sizes]
    if not any(elements):
        return []
    packed = packed_update(elements)
    update = program(
        "adamw", Variant(dtype, dtype, "torch.adamw"), parameters=sum(elements),
        kernels=packed.kernels, longest=packed.longest,
    )  # fmt: skip
    # The host goes through the tensors once.
    return [Step("optimizer", "adamw", "optimizer", update, len(sizes))]
