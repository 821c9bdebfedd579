"""Lowers an operator graph to the programs that eager execution runs: forward, backward, optimizer.

Each operator becomes one `Step` of a pass. A training step adds, for each forward step in reverse,
the programs of its gradients (two products for a linear, one where its input has no gradient), one
sum wherever a tensor or a parameter was read twice, and one fused AdamW update of the trained
parameters. What computes gradients: `graph_backward`.

Decoders of a described `Model` are captured with two layers and one repeated, because their
layers are equal; a test compares with the capture of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from foreplan.cost_models.costs import Segment
from foreplan.cost_models.lowering.backward_steps import sum_step
from foreplan.cost_models.lowering.compiled_steps import compiled_steps
from foreplan.cost_models.lowering.expert_products import by_experts
from foreplan.cost_models.lowering.forward_program import (
    forward_program,
    node_variant,
    own_dtype,
)
from foreplan.cost_models.lowering.graph_backward import gradient_steps, view_steps
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
from foreplan.cost_models.lowering.kernel_words import kernel_words
from foreplan.cost_models.lowering.recomputed import recomputed_steps
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import OperatorCall, described_tensors, dtype_name
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.graphs.transformers_network import TransformersNetwork, network_module
from foreplan.datasets.models.families import SLIDING_EVERYWHERE
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.sweeps.update_packing import packed_update
from foreplan.errors import SpecError


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
    nodes = _nodes(graph, phase)
    read = operands(graph)
    forward = _forward(nodes, read, graph, phase)
    copies = hidden_copies(graph.calls)
    whole = _with_copies(nodes, forward, copies)
    if phase == "inference":
        return whole
    update = _update(nodes, _trained_sizes(graph))
    passed, behind = visits(graph)
    back = [*loss_steps(forward), *_backward(passed, forward, read, behind, copies), *_tied(graph)]
    return [*whole, *back, *update]


def lower_compiled(graph: OperatorGraph, phase: Phase = "inference") -> list[Step]:
    """Programs of one pass over a graph that ``torch.compile`` compiled, in order.

    Args:
        graph: as of `lower`.
        phase: likewise.

    Raises:
        SpecError: as of `lower`.
        ValueError: likewise.
    """
    nodes = _nodes(graph, phase)
    read = operands(graph)
    forward = _forward(nodes, read, graph, phase)
    by_name = {node.name: step for node, step in zip(nodes, forward, strict=True)}
    called, back = compiled_steps(graph, by_name, read, phase)
    if phase == "inference":
        return called
    update = _update(nodes, _trained_sizes(graph))
    return [*called, *loss_steps(forward), *back, *update]


def model_steps(
    model: Model | TransformersNetwork, *, batch: int, tokens: int, phase: Phase = "inference",
    compiled: bool = False,
) -> list[Step]:  # fmt: skip
    """Programs of one pass of a described model, captured with at most two layers if it can be.

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

    def captured(layers: int | None) -> OperatorGraph:
        if isinstance(model, TransformersNetwork):
            module, inputs = network_module(model, batch=batch, tokens=tokens, layers=layers)
            return capture(module, inputs, name=model.name, eager=True, training=training)
        changed = model if layers is None else model.model_copy(update={"layers": layers})
        return capture(changed, batch=batch, tokens=tokens, eager=True, training=training)

    layers = model.layers
    if compiled:
        return lower_compiled(captured(None), phase)
    if layers is None or layers <= 2 or not _alike(model, tokens):
        return lower(captured(None), phase)
    graph = captured(2)
    if len(next(iter(graph.blocks.values()), ())) != 2:
        return lower(captured(None), phase)
    return _with_repeated_layers(graph, layers - 2, phase)


def _with_repeated_layers(graph: OperatorGraph, more: int, phase: Phase) -> list[Step]:
    """As `lower`, of a graph of two equal layers, with so many more between them."""
    passed, behind = visits(graph)
    nodes = [visit.node for visit in passed]
    instances = next(iter(graph.blocks.values()))
    one, two = (
        [index for index, node in enumerate(nodes) if node.instance == name] for name in instances
    )
    # Layers in the middle are read like the first one and make views like the second one: the
    # first makes those that all share.
    middle = [
        Visit(replace(nodes[i], calls=nodes[j].calls), passed[i].readers, passed[j].views)
        for i, j in zip(one, two, strict=True)
    ]
    repeated = [*passed[: two[0]], *middle * more, *passed[two[0] :]]
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
    sizes[place:place] = first * more
    back = [
        *loss_steps(forward),
        *_backward(repeated, forward, read, behind, copies),
        *_tied(graph),
    ]
    return [*whole, *back, *_update(nodes, [size for _, size in sizes])]


def _alike(model: Model | TransformersNetwork, tokens: int) -> bool:
    """Whether all layers run the same programs."""
    if isinstance(model, TransformersNetwork):
        return True  # those whose layers are counted
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


def _nodes(graph: OperatorGraph, phase: Phase) -> list[OperatorNode]:
    """Operators that run, of a graph that was captured for the phase."""
    nodes = [node for node in graph.operators() if node.op != "input"]  # inputs are there
    if phase == "training" and nodes and not graph.calls:
        raise ValueError("a training step of a graph captured without its calls")
    if phase == "training" and any(node.within for node in nodes):
        raise ValueError("a training step of a graph captured as inference fuses its layers")
    return nodes


def _trained_sizes(graph: OperatorGraph) -> list[int]:
    """Bytes of the parameters that an update goes over."""
    sizes = trained_parameters(graph)
    if graph.parameters and not sizes:
        raise SpecError(
            f"training step of {graph.name}", got="results that no parameter has a gradient by",
            expected="a loss, or what one is computed from, among what forward returns",
        )  # fmt: skip
    return list(sizes.values())


# ------------------------------------------------------------------------------------ forward


def _forward(
    nodes: Sequence[OperatorNode], read: Operands, graph: OperatorGraph, phase: Phase
) -> list[Step]:
    calls = graph.calls
    reached = [has_backward(node, read) for node in nodes]
    added, layouts = sums(calls), kernel_words(calls, phase)
    called = {call.operator: call for call in calls}
    works = [
        whole_program(node, called.get(node.name), node_variant(node))
        or forward_program(node, layouts.get(node.name, ""), called.get(node.name))
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
            summed = sum_step(node.target, node.outputs[0], own_dtype(node.dtype))
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
            again = sum_step(call.target, shape, own_dtype(dtype_name(kind)))
            steps += [again] * max(0, call.readers - 1)
            steps += view_steps(call)
    return steps


def _tied(graph: OperatorGraph) -> list[Step]:
    return [
        sum_step("aten.add", shape, own_dtype(dtype)) for shape, dtype in tied_parameters(graph)
    ]


def _update(nodes: Sequence[OperatorNode], sizes: Sequence[float]) -> list[Step]:
    """One fused update of parameters of so many bytes each, in their order."""
    dtype = next((own_dtype(node.dtype) for node in nodes if node.parameters), "fp32")
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
