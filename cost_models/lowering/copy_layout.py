"""`copy_words`: what the name of a copy's kernel says of how the elements lie that it reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

from foreplan.cost_models.lowering.argument_words import ARGUMENT_WORDS
from foreplan.datasets.graphs.operator_call import described_tensors, row_strides
from foreplan.datasets.program import CHANNELS_LAST, TRANSPOSED

#: Elements are copied as they lie; parts that are put together lie apart themselves.
DENSE: Final = "_dense"
APART: Final = "_apart"
#: Elements of one part are no neighbours in what is put together: they take turns.
ZIPPED: Final = "_zipped"

#: Operands of a map lie in different orders; neighbours of one are none of another.
REORDERED: Final = "_reordered"
ACROSS: Final = "_across"
#: Operands of a map are of FP32 and of 16 bits: the larger one of 16 bits, or another one.
CONVERTED, MIXED = "_converted", "_mixed"
#: Every word here, to be taken off the name of a kernel, the last one first, and of arguments.
COPY_WORDS: Final = (
    CONVERTED, MIXED, DENSE, APART, ZIPPED, REORDERED, ACROSS, TRANSPOSED, CHANNELS_LAST,
    *ARGUMENT_WORDS,
)  # fmt: skip

_COPIES = frozenset({"contiguous", "clone", "reshape"})
_JOINS = frozenset({"cat", "stack"})
_HALVES = frozenset({"bfloat16", "float16"})


def copy_words(name: str, arguments: str) -> str:
    """Words behind the name of a copy's kernel; none of whole rows in another order.

    A matrix that is transposed lies across, and so does each of many: as if channels became last.

    Args:
        name: of the operator, without its namespace and overload.
        arguments: of the call, as `OperatorCall` has them.
    """
    tensors = described_tensors(arguments)
    if name in _JOINS:
        if _takes_turns(name, [shape for shape, _, _ in tensors], arguments):
            return ZIPPED
        return APART * any(not lies_in_rows(shape, strides) for shape, strides, _ in tensors)
    if name not in _COPIES:
        return ""
    shape, strides, _ = tensors[0]
    extents = [size for size in shape if size > 1]
    if len(extents) > 1 and strides[-1] > 1 < shape[-1]:  # neighbours of the copy are none here
        return CHANNELS_LAST if len(extents) > 2 else TRANSPOSED
    if not lies_in_rows(shape, strides):
        return ""
    return CHANNELS_LAST if "channels_last" in str(json.loads(arguments)[1]) else DENSE


def _takes_turns(name: str, parts: Sequence[Sequence[int]], arguments: str) -> bool:
    """Whether parts are joined along a last dimension in which each has one element."""
    given, named = json.loads(arguments)
    dim = named.get("dim", given[1] if len(given) > 1 else 0)
    if name == "stack":
        return dim in (-1, len(parts[0]))
    return dim in (-1, len(parts[0]) - 1) and all(shape[-1:] == [1] for shape in parts)


def map_words(shape: Sequence[int], arguments: str) -> str:
    """Words behind the name of a map's kernel: how its operands lie, and of which types they are.

    Args:
        shape: of the result.
        arguments: of the call, as `OperatorCall` has them.
    """
    tensors = [tensor for tensor in described_tensors(arguments) if math.prod(tensor[0]) > 1]
    whole = [tensor for tensor in tensors if list(tensor[0]) == list(shape)]
    kinds = {kind for _, _, kind in tensors}
    types = ""
    if "float32" in kinds and kinds & _HALVES:
        types = CONVERTED if whole and all(kind in _HALVES for _, _, kind in whole) else MIXED
    if any(not _dense(own, strides) for own, strides, _ in whole):
        return APART + types
    orders = {tuple(step for step, size in zip(strides, own, strict=True) if size > 1)
              for own, strides, _ in whole}  # fmt: skip
    blocks = [(own, strides) for own, strides, _ in tensors if _is_block(own, shape)]
    neighbours = {_neighbours(own, strides, len(shape)) for own, strides, _ in whole} | {
        _neighbours(own, strides, len(shape)) for own, strides in blocks
    }
    if len(neighbours) > 1:
        return ACROSS + types
    return REORDERED * (len(orders) > 1) + types


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie without a gap, in any order."""
    inner_first = sorted(
        (step, size) for step, size in zip(strides, shape, strict=True) if size > 1
    )
    return all(
        step == math.prod(size for _, size in inner_first[:at])
        for at, (step, _) in enumerate(inner_first)
    )


def _is_block(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether an operand is read again and again and still is more than a vector."""
    extents = [size for size in shape if size > 1]
    return len(extents) > 1 and math.prod(shape) < math.prod(whole)


def _neighbours(shape: Sequence[int], strides: Sequence[int], dimensions: int) -> int:
    """The dimension of a result along which an operand's elements are neighbours."""
    long = [(step, -at) for at, (step, size) in enumerate(zip(strides, shape, strict=True))
            if size > 1]  # fmt: skip
    step, last = min(long)
    return dimensions - len(shape) - last if step == 1 else -1


def copied_sizes(arguments: str) -> tuple[int, int]:
    """Rows and columns of a copy: columns are neighbours of what is written, read in one step each.

    Args:
        arguments: of the call, as `OperatorCall` has them.
    """
    shape, strides, _ = described_tensors(arguments)[0]
    elements = max(1, math.prod(shape))
    if lies_in_rows(shape, strides):  # images whose channels become last
        return elements // max(1, shape[1]), max(1, shape[1])
    cols = shape[-1]
    for at in range(len(shape) - 2, -1, -1):
        if strides[at] != strides[at + 1] * shape[at + 1]:
            break
        cols *= shape[at]
    return elements // max(1, cols), max(1, cols)


def lies_in_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements are neighbours in the order of its dimensions."""
    if 0 in shape:
        return True
    return all(
        size == 1 or own == step
        for size, own, step in zip(shape, strides, row_strides(shape), strict=True)
    )


def plain_kernel(kernel: str) -> str:
    """The name of a kernel without the words of this module and of arguments."""
    for word in COPY_WORDS:
        kernel = kernel.removesuffix(word)
    return kernel
