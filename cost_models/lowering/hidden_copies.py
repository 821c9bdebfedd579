"""`hidden_copies`: copies that an operator makes of operands that do not lie as it wants them.

A layer norm of a transposed tensor copies it first, forward and backward (torch 2.11,
``layer_norm_kernel.cu``: ``expect_contiguous``): where patches of images become rows, that takes
three times what the norm does. A product of many matrices copies what is no list of them, such as
heads that are views of rows (``Tensor.matmul``: ``reshape``); ``einsum`` makes two such lists of
its operands, whatever its equation (``sumproduct_pair`` of ``Linear.cpp``). A convolution copies
images that lie neither way without gaps, such as tokens behind one of a class (``Convolution.cpp``:
``contiguous``), forward and backward.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

from foreplan.cost_models.lowering.backward_steps import flat
from foreplan.cost_models.lowering.copy_layout import copied_sizes, copy_words, lies_in_rows
from foreplan.cost_models.lowering.einsum_terms import EinsumTerms
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import (
    TENSOR,
    OperatorCall,
    described_tensors,
    dtype_name,
)
from foreplan.datasets.program import CHANNELS_LAST, Variant, program

#: Operators that want their first operand row by row. A softmax does, too; none was timed.
_ROW_BY_ROW = frozenset({"layer_norm", "native_layer_norm"})
#: Products of many matrices, which are laid out as a list of them.
_LISTS = frozenset({"matmul", "einsum"})
#: Operators that want images without gaps.
_OF_IMAGES = frozenset({"conv2d"})


def hidden_copies(calls: Sequence[OperatorCall]) -> dict[str, list[Step]]:
    """Copies before an operator, forward, by the operator's name.

    Args:
        calls: of a captured graph.
    """
    found: dict[str, list[Step]] = {}
    for call in calls:
        name = call.target.split(".")[1] if "." in call.target else call.target
        if not call.operator or name not in _ROW_BY_ROW | _LISTS | _OF_IMAGES:
            continue
        tensors = described_tensors(call.arguments)
        if name in _ROW_BY_ROW:
            copied = [tensor for tensor in tensors[:1] if not lies_in_rows(*tensor[:2])]
        elif name in _OF_IMAGES:
            copied = [tensor for tensor in map(_channels_last, tensors[:1])
                      if not lies_in_rows(*tensor[:2])]  # fmt: skip
        elif name == "einsum":
            copied = _rearranged(json.loads(call.arguments)[0][0], tensors)
        else:
            copied = [tensor for tensor in tensors if not _is_one(*(d[:-2] for d in tensor[:2]))]
        steps = [_copy(call, *tensor) for tensor in copied if _known(tensor[2])]
        if steps:
            found[call.operator] = steps
    return found


def backward_copies(steps: Sequence[Step]) -> list[Step]:
    """Of an operator's copies those that its gradient makes again: it keeps a list of matrices."""
    return [
        replace(step, part="backward")
        for step in steps
        if not step.target.rpartition(".")[0].endswith(tuple(_LISTS))
    ]


def _copy(call: OperatorCall, shape: Sequence[int], strides: Sequence[int], kind: str) -> Step:
    dtype = dtype_name(kind)
    given = json.dumps([[{TENSOR: [list(shape), list(strides), kind]}], {}])
    word = copy_words("contiguous", given)
    rows, cols = copied_sizes(given) if word == CHANNELS_LAST else flat(shape)
    copied = Variant(dtype, dtype, f"torch.contiguous{word}")
    work = program("elementwise", copied, rows=rows, cols=cols, inputs=1)
    return Step("copy", call.target, "forward", work, calls=0)


def _rearranged(
    equation: str, tensors: Sequence[tuple[list[int], list[int], str]]
) -> list[tuple[list[int], list[int], str]]:
    """Operands of two in the order in which they make a list, if that order is no view of them."""
    terms = EinsumTerms.of(equation)
    if terms is None:
        return []
    matrices, summed = terms.matrices, terms.summed
    found = []
    for at, (own, (shape, strides, kind)) in enumerate(zip(terms.operands, tensors, strict=True)):
        free = tuple(label for label in own if label not in (*matrices, *summed))
        groups = [matrices, free, summed] if at == 0 else [matrices, summed, free]
        places = [[own.index(label) for label in group] for group in groups]
        if not all(_is_one([shape[p] for p in group], [strides[p] for p in group])
                   for group in places):  # fmt: skip
            order = [place for group in places for place in group]
            found.append(([shape[p] for p in order], [strides[p] for p in order], kind))
    return found


def _channels_last(
    tensor: tuple[list[int], list[int], str],
) -> tuple[list[int], list[int], str]:
    """An image with its channels last where neighbours in memory are channels."""
    shape, strides, kind = tensor
    if len(shape) != 4 or strides[1] != 1 or shape[1] == 1:
        return tensor
    order = (0, 2, 3, 1)
    return [shape[at] for at in order], [strides[at] for at in order], kind


def _is_one(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether dimensions are one in memory, as those before a matrix's own are of a list."""
    long = [(size, step) for size, step in zip(shape, strides, strict=True) if size > 1]
    return all(
        step == inner_step * inner for (_, step), (inner, inner_step) in itertools.pairwise(long)
    )


def _known(kind: str) -> bool:
    return dtype_name(kind) in DTYPE_BYTES
