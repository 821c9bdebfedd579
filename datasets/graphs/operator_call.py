"""`OperatorCall`: one ATen call of a captured model with everything that decides its kernel.

An operator's dimensions do not say how its operands lie in memory: a convolution of images that
come as channels last, a product with a transposed view, an addition of a broadcast bias run other
kernels than the same sizes laid out plainly. A call keeps shapes, strides and dtypes of its
tensors and all other arguments, so that it can be made again on tensors of its own
(`foreplan.cost_models.passes.call_timer`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

#: Words of an argument's text: a tensor, and torch's own constants. No argument has such a name.
TENSOR, DTYPE, DEVICE = "$tensor", "$dtype", "$device"
MEMORY_FORMAT, LAYOUT = "$memory_format", "$layout"
#: Bytes of an element, by torch's name of its type.
ELEMENT_BYTES = MappingProxyType(
    {
        "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4,
        "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "int8": 1, "uint8": 1,
    }
)  # fmt: skip
_DTYPE_NAMES = MappingProxyType(
    {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call, in the order of the trace; views are calls too.

    Attributes:
        name: of its result in the trace.
        operator: the `OperatorNode` that it is, or ``""`` for a view.
        target: ``aten.conv2d.default``.
        arguments: JSON of positional and named arguments; tensors as ``{"$tensor": [shape, strides,
            dtype]}``.
        reads: names of the results (or parameters, inputs) that its tensors are, in order.
        gradients: whether each of those has a gradient in a training step.
        parameters: whether each of those is a parameter.
        readers: how often calls that a gradient comes back from read its result.
        written_bytes: of its result; 0 for a view.
        result: JSON of its result, a tensor as in ``arguments``.
    """

    name: str
    operator: str
    target: str
    arguments: str
    reads: tuple[str, ...]
    gradients: tuple[bool, ...]
    parameters: tuple[bool, ...]
    readers: int
    written_bytes: int
    result: str

    @property
    def trains(self) -> bool:
        """Whether a training step goes back through it."""
        return any(self.gradients)


def arguments_text(args: Any, kwargs: Any) -> str:
    """Arguments of a node of a trace as JSON."""
    named = {key: value for key, value in kwargs.items() if value is not None}
    return json.dumps([_plain(args), _plain(named)], separators=(",", ":"))


def result_text(node: Any) -> str:
    """The result of a node of a trace as JSON."""
    return json.dumps(_plain(node), separators=(",", ":"))


def dtype_name(torch_name: str) -> str:
    """Our word for a data type of torch (``bf16`` of ``bfloat16``); others keep torch's."""
    return _DTYPE_NAMES.get(torch_name, torch_name)


def row_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a tensor whose elements are neighbours in the order of its dimensions."""
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def described_tensors(arguments: str) -> list[tuple[list[int], list[int], str]]:
    """Shape, strides and dtype of the tensors among a call's arguments, in order."""
    found: list[tuple[list[int], list[int], str]] = []

    def visit(value: object) -> None:
        if isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            if TENSOR in value:
                shape, strides, dtype = value[TENSOR]
                found.append((shape, strides, dtype))
            else:
                visit(list(value.values()))

    visit(json.loads(arguments))
    return found


def _plain(value: Any) -> Any:
    import torch

    if hasattr(value, "meta"):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = [int(extent) for extent in value.shape]
        strides = [int(stride) for stride in value.stride()]
        return {TENSOR: [shape, strides, str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    for word, kind in (
        (DTYPE, torch.dtype), (MEMORY_FORMAT, torch.memory_format), (LAYOUT, torch.layout),
    ):  # fmt: skip
        if isinstance(value, kind):
            return {word: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {DEVICE: value.type}
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        # Of what values of tensors decide (``item``) nothing is known but that it is a number.
        known = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
        return math.nan if known is None else known
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
