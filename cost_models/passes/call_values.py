"""What an ATen call is given and gives back: nested arguments, as described and as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.graphs.operator_call import TENSOR


def operator_of(target: str) -> Callable[..., Any]:
    """``aten.conv2d.default`` as torch has it."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    made: Callable[..., Any] = found
    return made


def described_tensors(value: Any) -> Iterable[Sequence[Any]]:
    """Descriptions of the tensors among arguments, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from described_tensors(item)
    elif isinstance(value, dict):
        if TENSOR in value:
            yield value[TENSOR]
        else:
            for item in value.values():
                yield from described_tensors(item)


def flat(value: Any) -> Iterable[Any]:
    """What stands in nested lists and dictionaries, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    else:
        yield value


def with_gradients(value: Any) -> list[Tensor]:
    """Tensors that autograd can differentiate, in order."""
    return [t for t in flat(value) if isinstance(t, Tensor) and t.requires_grad]


def byte_count(value: Any) -> int:
    """Bytes of the elements of all tensors."""
    return sum(t.numel() * t.element_size() for t in flat(value) if isinstance(t, Tensor))


def bytes_of(tensor: Tensor) -> Any:
    """All bytes of a CPU tensor's memory, as an array that shares it."""
    plain = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    return plain.numpy()
