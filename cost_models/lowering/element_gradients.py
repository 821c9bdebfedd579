"""`element_gradients`: gradients of what works element by element, picks, scans or sums up.

By autograd's formulas (`gradient_maps`), as `graph_backward` has those of products and norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from foreplan.cost_models.lowering.argument_words import (
    EXPONENTS,
    LARGEST,
    PLACES,
    POWERS,
    REFLECTED,
    WHOLE_ROWS,
)
from foreplan.cost_models.lowering.backward_steps import (
    BACKWARD,
    BY_ROW,
    DROPOUT_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    ROW_SUM,
    SOFTMAX_BACKWARD,
    broadcast,
    fill_step,
    flat,
    given_back,
    own_variant,
    picked,
    smaller,
    summed_steps,
    total_step,
    wide_step,
)
from foreplan.cost_models.lowering.copy_layout import ACROSS, plain_kernel
from foreplan.cost_models.lowering.gradient_maps import (
    ARITHMETIC,
    COLUMNS,
    FUNCTIONS,
    INVOLUTIONS,
    LOSSES,
    MAPS,
    NO_WORK,
    OF_EXPONENTS,
    PADS,
    PICKS,
    REPEATS,
    WRITES,
)
from foreplan.cost_models.lowering.graph_gradients import Operand
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.lowering.scatter_gradients import reduced_steps
from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.program import CHANNELS_LAST, Program, program

#: Images interpolated by kernels that go back by others, and what the name of those says.
INTERPOLATES = frozenset({"upsample_bilinear2d", "upsample_bicubic2d"})
OF_INTERPOLATED = "_backward"
#: Operators whose gradients go through as much as they do.
_BACK_ALIKE = ("upsample_", "_upsample_", "_cdist_forward", "_pdist_forward")
#: What gives a mean's gradient to the neighbours that it was of: by no vectors.
MEAN_BACKWARD = "torch.mean_backward"
#: What adds up gradients of what was picked, and what a derivative is a function of.
_ADDED = MappingProxyType({"gather": "torch.gather_backward", "index_select": "torch.index_add"})
_DERIVED = MappingProxyType({"lgamma": "torch.digamma", "digamma": "torch.polygamma"})


def element_gradients(node: OperatorNode, back: Step, read: Sequence[Operand]) -> list[Step]:
    """What computes the gradients by those operands that have one.

    Args:
        node: the operator; neither a product nor a norm or an attention.
        back: its forward pass as a step of the backward one.
        read: its operands.
    """
    work = back.work
    assert isinstance(work, Program)
    name = node.target.rpartition(".")[2]
    shape = node.outputs[0] if node.outputs else ()
    if name in INTERPOLATES:
        lies = CHANNELS_LAST * work.variant.kernel.endswith(CHANNELS_LAST)
        variant = replace(work.variant, kernel=f"torch.{name}{OF_INTERPOLATED}{lies}")
        return [replace(back, work=replace(work, variant=variant))]
    # Rolled or transformed back, interpolated otherwise, or all pairs once more.
    if work.op in ("roll", "fft") or name.startswith(_BACK_ALIKE):
        return [back]
    if work.op == "dropout":
        return [
            replace(back, work=replace(work, variant=own_variant(back, kernel=DROPOUT_BACKWARD)))
        ]
    if name in NO_WORK:
        return []
    if name == "index":
        return [_scattered(back, node.inputs[0], shape, picked(node.inputs[0], shape))]
    if work.op == "embedding":
        cols = work.dims["cols"]  # of each row that was read, also where a bag sums them
        rows = (*node.inputs[1], cols)
        if work.variant.kernel.endswith(LARGEST):  # but one of each bag that it is the largest of
            rows = shape
        return [_scattered(back, node.inputs[0], rows, cols)]
    if name in ("gather", "index_select"):  # zeros, and what was picked added up in a copy of them
        written = wide_step(back, node.inputs[0], 1 + _share(shape, node.inputs[0]),
                            kernel=_ADDED[name] + _index_word(work))  # fmt: skip
        return [fill_step(back, node.inputs[0]), written]
    if name in PICKS and math.prod(shape) > 1:  # zeros, and a copy of them that is filled
        return [fill_step(back, node.inputs[0]), wide_step(back, node.inputs[0], 1)]
    if name == "scatter_reduce" and (steps := reduced_steps(back, read)):
        return steps
    if name in WRITES:
        return _of_written(back, node.inputs[0], read)
    if name == "cumsum":  # turned round, scanned, turned round
        turned = wide_step(back, shape, 1, kernel="torch.flip")
        return [turned, back, turned]
    if name in INVOLUTIONS:
        return [back]
    if name in COLUMNS:
        source = node.inputs[0]
        return [wide_step(back, source, _share(shape, source), kernel=COLUMNS[name])]
    if name in LOSSES:
        return [wide_step(back, node.inputs[0], inputs) for inputs in LOSSES[name]]
    if name in REPEATS:
        return [given_back(back, node.inputs[0], shape)]
    if name in ARITHMETIC:
        return _of_elements(name, back, shape, read)
    if name in MAPS:
        inputs_of = OF_EXPONENTS if work.variant.kernel.endswith(EXPONENTS) else MAPS[name]
        maps = [wide_step(back, shape or (1,), inputs) for inputs in inputs_of]
        if work.variant.kernel.endswith(POWERS):  # of one less
            maps[0] = wide_step(back, shape or (1,), 1, kernel=f"torch.pow{POWERS}")
        return maps + (summed_steps(back, read[1:], shape) if name == "prelu" else [])
    if name in ("norm", "linalg_vector_norm"):  # what is normed by its norm, 0 where that is 0
        marked = wide_step(back, shape or (1,), 1)
        return [wide_step(back, node.inputs[0], 1, BY_ROW)] * 3 + [marked]
    if name == "glu":
        return [wide_step(back, node.inputs[0], 2)]
    if name in ("var", "std"):
        return _of_spread(back, node.inputs[0], shape, root=name == "std")
    if name == "mean":  # given to each, and divided
        through = work.variant.kernel.endswith(ACROSS)
        kernel = BACKWARD if through else MEAN_BACKWARD
        return [wide_step(back, node.inputs[0], 1, BY_ROW, kernel)]
    if name == "logsumexp":  # the softmax of each row, times its gradient
        whole = node.inputs[0]
        given = wide_step(back, whole, 1, BY_ROW)
        return [given, wide_step(back, whole, 1, kernel="torch.exp"), given]
    if name in ("lgamma", "digamma"):
        own = wide_step(back, shape, 1, kernel=_DERIVED[name])
        return [own, wide_step(back, shape, 2)]
    if name in ("amax", "amin"):
        return _of_largest(back, node.inputs[0], shape)
    if name in ("max", "min"):  # of all elements: whether there are any is asked as well
        asked = [wide_step(back, node.inputs[0], 1)] * 3
        return [*asked, wide_step(back, (1,), 1), *_of_largest(back, node.inputs[0], shape)]
    if name in FUNCTIONS:
        return [wide_step(back, shape, 2, kernel=f"{plain_kernel(work.variant.kernel)}_backward")]
    if work.op == "softmax":  # of rows, not of elements
        kernel = LOG_SOFTMAX_BACKWARD if "log_softmax" in name else SOFTMAX_BACKWARD
        across = ACROSS * work.variant.kernel.endswith(ACROSS)
        return [wide_step(back, _shape(work), 2, kernel=kernel + across)]
    if name.startswith("grid_sampler"):
        return [wide_step(back, shape, 1, kernel=f"torch.{name}_backward")]
    if node.op == "activation":
        return [wide_step(back, shape, 2)]
    if name == "masked_fill":
        return [wide_step(back, shape or (1,), 1, kernel="torch.masked_fill")]
    if work.variant.kernel.endswith(REFLECTED):  # element by element
        return [wide_step(back, node.inputs[0], 1, kernel=f"torch.pad{REFLECTED}_backward")]
    if name in PADS and node.inputs[0] != shape:  # the middle of what was padded
        return [_copied(back, node.inputs[0])]
    if work.op == "pool" and "adaptive" not in name:
        variant = replace(work.variant, kernel=f"{work.variant.kernel}_backward")
        return [replace(back, work=replace(work, op="pool_gradient", variant=variant))]
    if work.op == "pool" and math.prod(shape[2:]) > 1:
        last = CHANNELS_LAST * (CHANNELS_LAST in work.variant.kernel)
        return [wide_step(back, node.inputs[0], 1, kernel=f"torch.{name}_backward{last}")]
    if node.op in ("reduction", "pool") or (node.op == "copy" and name not in ("to", "_to_copy")):
        return [wide_step(back, node.inputs[0], 1)]
    if name in ("to", "_to_copy"):
        return [back]  # converted back: as many bytes
    return [wide_step(back, shape, 1)]


def _scattered(back: Step, table: Sequence[int], shape: Sequence[int], cols: int) -> Step:
    """The gradient by a table that rows of ``cols`` were picked from: zeros, and rows added up."""
    assert isinstance(back.work, Program)
    rows, vocab = (max(1, math.prod(whole) // cols) for whole in (shape, table))
    work = program("embedding_backward", back.work.variant, rows=rows, vocab=vocab, cols=cols)
    return replace(back, work=work)


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
            own = not smaller(operand, shape)
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
        steps += summed_steps(back, [operand], shape)
    return steps


def _of_written(back: Step, whole: Sequence[int], read: Sequence[Operand]) -> list[Step]:
    """Gradients by what was written to (a copy, with zeros where it was lost), and by its rows."""
    assert isinstance(back.work, Program)
    rows = back.work.variant.kernel.startswith("torch.index_add")
    picked_by = f"torch.gather{WHOLE_ROWS if rows else _index_word(back.work)}"
    return [
        wide_step(back, operand.shape, 1, kernel="torch.clone" if at == 0 else picked_by)
        for at, operand in enumerate(read)
        if operand.gradient and (at or operand.shape == whole)
    ]


def _index_word(work: Program) -> str:
    """How an index lies, as the forward pass has it."""
    kernel = work.variant.kernel
    return next((word for word in (WHOLE_ROWS, PLACES) if kernel.endswith(word)), "")


def _of_spread(back: Step, whole: Sequence[int], kept: Sequence[int], *, root: bool) -> list[Step]:
    """By a variance: the mean of each row, what differs from it, twice that by the gradient."""
    rows = max(1, math.prod(kept))
    assert isinstance(back.work, Program)
    along = BACKWARD if back.work.variant.kernel.endswith(ACROSS) else ROW_SUM
    mean = total_step(back, rows, max(1, math.prod(whole) // rows), along)
    given = [wide_step(back, kept or (1,), 1)] * (1 + 4 * root)
    return [*given, mean, *[wide_step(back, whole, 1, BY_ROW)] * 2]


def _shape(work: Program) -> tuple[int, int]:
    return work.dims["rows"], work.dims["cols"]


def _share(part: Sequence[int], whole: Sequence[int]) -> int:
    """How many tensors as large as the whole a part makes, one at least."""
    return max(1, round(math.prod(part) / max(1, math.prod(whole))))


def _of_largest(back: Step, whole: Sequence[int], kept: Sequence[int]) -> list[Step]:
    """The largest elements are marked and counted; the gradient is shared among them."""
    rows = max(1, math.prod(kept))
    marked = wide_step(back, whole, 1, BY_ROW)
    counted = total_step(back, rows, max(1, math.prod(whole) // rows), ROW_SUM)
    return [marked, counted, wide_step(back, kept or (1,), 2), wide_step(back, whole, 1, BY_ROW)]


def _copied(back: Step, shape: Sequence[int]) -> Step:
    """A copy of a shape out of what is larger."""
    rows, cols = flat(shape)
    kept = program(
        "elementwise", own_variant(back, kernel="torch.clone"), rows=rows, cols=cols, inputs=1
    )
    return replace(back, work=kept)
