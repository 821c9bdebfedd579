"""`compiled_steps`: what a pass runs once ``torch.compile`` has made kernels of its own.

Calls of libraries (products, convolutions, attention) are those of the eager pass, but that images
lie channels last where the compiler decides so, and a convolution's bias is added by the next
kernel. Everything else is in `fused_kernels`. The loss and the update of a training step are not
compiled, as most scripts leave them out of the compiled module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreplan.cost_models.lowering.forward_program import BIAS
from foreplan.cost_models.lowering.fused_kernels import FusedKernel, fused_kernels
from foreplan.cost_models.lowering.fused_program import FUSED, MAP, fused_program
from foreplan.cost_models.lowering.fusion_walk import is_fused
from foreplan.cost_models.lowering.graph_backward import gradient_steps
from foreplan.cost_models.lowering.graph_gradients import Operands, has_backward
from foreplan.cost_models.lowering.graph_step import Part, Phase, Step
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import dtype_name
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.program import CHANNELS_LAST, Program, Variant, program

_TARGET = "torch.compile"
#: Bytes that features of fast products are whole multiples of (cuBLAS), and FLOP from which on a
#: product is taken to be padded (assumed).
_ALIGNED_BYTES, _WORTH_FLOPS = 16, 1e9
#: Operators to a convolution from which on layouts are left alone, what convolutions of a kind take
#: channels last over channels first, and up to how many channels are few: TorchInductor's own
#: figures (``torch/_inductor/graph.py``, ``decide_layout_opt``).
_FEW_CONVOLUTIONS, _FEW_CHANNELS = 300, 64
_LAST_OVER_FIRST = {"grouped": 1.358, "small": 0.783, "in_out": 0.725, "default": 0.823}


def compiled_steps(
    graph: OperatorGraph, forward: Mapping[str, Step], read: Operands, phase: Phase
) -> tuple[list[Step], list[Step]]:
    """Forward and backward steps of a compiled pass.

    Args:
        graph: of the pass.
        forward: eager steps by operator.
        read: what each operator reads.
        phase: of the pass.
    """
    training = phase == "training"
    last = _lies_last(graph, training=training)
    called: dict[int, list[Step]] = {}
    back: dict[int, list[Step]] = {}
    for place, node in enumerate(graph.operators()):
        if node.name not in forward:
            continue
        step = forward[node.name]
        if training and node.op == "embedding" and has_backward(node, read):
            # Rows are picked where they are read; their gradients are added up in a table of zeros.
            back[place] = gradient_steps(node, step, read[node.name])
        if is_fused(node):
            continue
        if last and _of_images(node):
            step = _laid_last(step)
            called[place] = _weight_copy(node)
        elif (padded := _padded(step)) != step:
            assert isinstance(padded.work, Program)  # it was padded
            d, dtype = padded.work.dims, padded.work.variant.compute
            called[place], step = [_copied(d["n"] * d["k"], dtype)], padded
        called.setdefault(place, []).append(step)
        if training and has_backward(node, read):
            back[place] = gradient_steps(node, step, read[node.name])
    for kernel in fused_kernels(graph):
        work = fused_program(kernel, kernel.read_bytes, kernel.written_bytes)
        called.setdefault(kernel.at, []).insert(0, Step(FUSED, _TARGET, "forward", work))
        if training:
            back.setdefault(kernel.at, []).extend(_gradient_kernels(kernel))
    return _in_order(called, sorted(called)), _in_order(back, sorted(back, reverse=True))


def _in_order(steps: Mapping[int, Sequence[Step]], places: Sequence[int]) -> list[Step]:
    return [step for place in places for step in steps[place]]


def _gradient_kernels(kernel: FusedKernel) -> list[Step]:
    part: Part = "backward"
    works = []
    if kernel.gradient_read_bytes:
        read, written = kernel.gradient_read_bytes, kernel.gradient_written_bytes
        works.append(fused_program(kernel, read, written, forward=False))
    if kernel.summed_bytes:
        works.append(fused_program(kernel, kernel.summed_bytes, 0.0, forward=False))
    return [Step(FUSED, _TARGET, part, work) for work in works]


# ---------------------------------------------------------------------------------- products


def _padded(step: Step) -> Step:
    """A product whose results are padded to what a library's fast kernels take.

    TorchInductor pads where a trial says that it pays (``fx_passes/pad_mm.py``). On an H200 it did
    where a weight alone had to be copied, and did not where rows had to be, too, as the time of one
    network tells (StableLM, 5,461 features between; ``datasets/measured/h200_compiled_more.json``).
    """
    work = step.work
    if not isinstance(work, Program) or work.op != "linear" or work.flops < _WORTH_FLOPS:
        return step
    whole = max(1, _ALIGNED_BYTES // int(DTYPE_BYTES[work.variant.compute]))
    wide = -(-work.dims["n"] // whole) * whole
    return replace(step, work=program("linear", work.variant, **{**work.dims, "n": wide}))


def _copied(elements: int, dtype: str) -> Step:
    """The copy of a weight into another form, which is made in every pass."""
    work = program("elementwise", Variant(dtype, dtype, MAP), rows=1, cols=elements, inputs=1)
    return Step("copy", _TARGET, "forward", work)


# ------------------------------------------------------------------------------------ layouts


def _of_images(node: OperatorNode) -> bool:
    return node.op == "convolution" and len(node.inputs[1]) == 4


def _lies_last(graph: OperatorGraph, *, training: bool) -> bool:
    """Whether the compiler lays images out channels last; a training step has other rules."""
    convolutions = [node for node in graph.operators() if _of_images(node)]
    if not convolutions or len(graph) >= _FEW_CONVOLUTIONS * len(convolutions):
        return False
    kinds = [(_kind(node), node.flops) for node in convolutions]
    if not training:
        weighted = sum(_LAST_OVER_FIRST[kind] * flops for kind, flops in kinds)
        return weighted <= sum(flops for _, flops in kinds)
    found = {kind for kind, _ in kinds}
    return not found & {"grouped", "in_out"} and found != {"small"}


def _kind(node: OperatorNode) -> str:
    """Of a convolution, as the compiler sorts them."""
    source, (out, of, *window) = node.inputs[0], node.inputs[1]
    if source[1] // of > 1 and of > 1:
        return "grouped"
    if out <= _FEW_CHANNELS and of <= _FEW_CHANNELS:
        return "small"
    return "in_out" if 2 * out <= of and window[0] > 1 else "default"


def _laid_last(step: Step) -> Step:
    """A convolution of images that lie channels last, its bias added elsewhere."""
    assert isinstance(step.work, Program)  # every forward step is one program
    kernel = step.work.variant.kernel.replace(BIAS, "")
    if CHANNELS_LAST not in kernel:
        kernel += CHANNELS_LAST
    return replace(step, work=replace(step.work, variant=replace(step.work.variant, kernel=kernel)))


def _weight_copy(node: OperatorNode) -> list[Step]:
    """The copy of a convolution's weight into the layout of its images; none of one pixel."""
    dtype = dtype_name(node.dtype)
    if math.prod(node.inputs[1][2:]) == 1 or dtype not in DTYPE_BYTES:
        return []
    return [_copied(math.prod(node.inputs[1]), dtype)]
