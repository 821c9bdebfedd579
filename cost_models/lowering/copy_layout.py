"""`copy_words`: what the name of a copy's kernel says of how the elements lie that it reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

from foreplan.datasets.graphs.operator_call import described_tensors, row_strides
from foreplan.datasets.program import CHANNELS_LAST, TRANSPOSED

#: Elements are copied as they lie; parts that are put together lie apart themselves.
DENSE: Final = "_dense"
APART: Final = "_apart"

#: Operands of a map lie in different orders.
REORDERED: Final = "_reordered"
#: Every word here, to be taken off the name of a kernel.
COPY_WORDS: Final = (DENSE, APART, REORDERED, TRANSPOSED, CHANNELS_LAST)

_COPIES = frozenset({"contiguous", "clone", "reshape"})
_JOINS = frozenset({"cat", "stack"})


def copy_words(name: str, arguments: str) -> str:
    """Words behind the name of a copy's kernel; none of whole rows in another order.

    A matrix that is transposed lies across, and so does each of many: as if channels became last.

    Args:
        name: of the operator, without its namespace and overload.
        arguments: of the call, as `OperatorCall` has them.
    """
    tensors = described_tensors(arguments)
    if name in _JOINS:
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


def map_words(shape: Sequence[int], arguments: str) -> str:
    """Words behind the name of a map's kernel: how the operands lie that are as large as it.

    Args:
        shape: of the result.
        arguments: of the call, as `OperatorCall` has them.
    """
    orders = set()
    for own, strides, _ in described_tensors(arguments):
        if list(own) != list(shape):
            continue
        long = [(step, size) for step, size in zip(strides, own, strict=True) if size > 1]
        inner_first = sorted(long)
        if any(
            step != math.prod(size for _, size in inner_first[:at])
            for at, (step, _) in enumerate(inner_first)
        ):
            return APART
        orders.add(tuple(step for step, _ in long))
    return REORDERED if len(orders) > 1 else ""


def lies_in_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements are neighbours in the order of its dimensions."""
    if 0 in shape:
        return True
    return all(
        size == 1 or own == step
        for size, own, step in zip(shape, strides, row_strides(shape), strict=True)
    )


def plain_kernel(kernel: str) -> str:
    """The name of a kernel without the words of this module."""
    for word in COPY_WORDS:
        kernel = kernel.removesuffix(word)
    return kernel
