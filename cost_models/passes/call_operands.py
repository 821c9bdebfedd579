"""`CallOperands`: tensors for single ATen calls as a network makes them. Imports torch.

A call gets tensors of its own, of the shapes, strides and dtypes that it has in the network. How
cold they are follows from the network as well: an operand that comes back after so many bytes have
been moved (its age) is held in as many copies as make the loop move as many between two uses of a
copy.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreplan.cost_models.passes.call_values import byte_count, described_tensors, operator_of
from foreplan.datasets.graphs.operator_call import DEVICE, DTYPE, LAYOUT, MEMORY_FORMAT, TENSOR
from foreplan.datasets.kernels.cold_operands import held_cache

#: Copies of an operand at most, and bytes of a call's operands up to which it may have more sets of
#: them than their age asks for (both assumed).
MOST_COPIES = 128
_SMALL_BYTES = 64 << 20
#: ATen's products of matrices.
_PRODUCTS = frozenset(
    {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "mv", "addmv", "addbmm"}
)


#: Calls that pick by numbers: one tensor of them for each dimension, and along one dimension.
_INDEXED = frozenset({"index", "index_put", "index_put_"})
_PICKED = frozenset({"index_select", "gather", "index_add", "scatter_add", "scatter"})


class CallKey(NamedTuple):
    """A call as it is timed.

    Attributes:
        target: ``aten.conv2d.default``.
        arguments: as `OperatorCall.arguments`.
        gradients: whether each tensor among them has one.
        parameters: whether each is a parameter: its gradient is kept until the update.
        ages: bytes moved since each was last used.
        backward_bytes: moved between the forward call and its gradients.
        code_age: bytes moved since a call of its kind was last made; 0 where that is not asked.
    """

    target: str
    arguments: str
    gradients: tuple[bool, ...]
    parameters: tuple[bool, ...]
    ages: tuple[int, ...]
    backward_bytes: int
    code_age: int = 0


class CallOperands:
    """Makes operands on one torch device.

    Args:
        device: ``cpu`` or ``cuda:N``.

    Attributes:
        cache_bytes: of the device's last cache, as far as a core keeps them.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.cache_bytes = held_cache(device)
        self._random = torch.Generator(device=device).manual_seed(0)

    def calls(
        self, key: CallKey, *, keep: bool, least: int = 1
    ) -> tuple[Callable[[Any], Any], list[Any], deque[Any], list[Tensor]]:
        """The call, sets of arguments in turn, results to be kept meanwhile, and what is near.

        Sets are at least as many as asked for, if they are small; they may share memory, but no
        leaf of autograd. Near are operands that were used after a call of this kind.
        """
        run = operator_of(key.target)
        positional, named = json.loads(key.arguments)
        one = [self._tensor(t, key) for t in described_tensors((positional, named))]
        used = max(1, sum(t.numel() * t.element_size() for t in one))
        ages = key.ages if len(key.ages) == len(one) else (0,) * len(one)
        # Four caches are cold for certain.
        most = max(2, min(MOST_COPIES, -(-4 * self.cache_bytes // used)))
        copies = [max(1, min(most, -(-age // used) if age > used else 1)) for age in ages]
        operands = [
            [first, *(self._tensor(t, key) for _ in range(count - 1))]
            for first, t, count in zip(
                one, described_tensors((positional, named)), copies, strict=True
            )
        ]
        sets = []
        for turn in range(max(*copies, least if used < _SMALL_BYTES else 1, 1)):
            chosen = [held[turn % len(held)] for held in operands]
            if keep:
                chosen = [
                    tensor.detach().requires_grad_() if wanted else tensor
                    for tensor, wanted in zip(chosen, key.gradients, strict=True)
                ]
            given = iter(chosen)
            sets.append((self._filled(positional, given), self._filled(named, given)))
        results: deque[Any] = deque()
        if keep:
            # A step keeps results for its backward pass: new ones go to memory that is cold.
            first = run(*sets[0][0], **sets[0][1])
            size = max(1, byte_count(first))
            count = max(1, min(MOST_COPIES, -(-2 * self.cache_bytes // size)))
            results.extend([first] * count)
        near = [
            held[0]
            for held, age in zip(operands, ages, strict=True)
            if len(held) == 1 and age < key.code_age
        ]
        return (lambda given: run(*given[0], **given[1])), sets, results, near

    def _tensor(self, described: Sequence[Any], key: CallKey) -> Tensor:
        shape, strides, name = described
        dtype = getattr(torch, name)
        room = (
            1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        if dtype.is_floating_point and _multiplies(key.target):
            # As weights and activations: an H200's large products take 8 % less of values near one.
            flat = torch.randn(room, generator=self._random, device=self.device).to(dtype)
        elif dtype.is_floating_point:
            # Values near one: no zeros, no denormals, roots and logarithms of none.
            flat = torch.rand(room, generator=self._random, device=self.device).add_(0.5).to(dtype)
        elif dtype == torch.bool:
            flat = torch.ones(room, dtype=dtype, device=self.device)
        else:
            rows = max(1, picked_from(key))
            flat = torch.randint(0, rows, (room,), generator=self._random, device=self.device)
            flat = flat.to(dtype)
        return flat.as_strided(shape, strides)

    def _filled(self, value: Any, tensors: Any) -> Any:
        """Arguments with tensors in their places."""
        if isinstance(value, list):
            return [self._filled(item, tensors) for item in value]
        if isinstance(value, dict):
            if TENSOR in value:
                return next(tensors)
            if DEVICE in value:
                return torch.device(self.device)
            for word in (DTYPE, MEMORY_FORMAT, LAYOUT):
                if word in value:
                    return getattr(torch, value[word])
            return {key: self._filled(item, tensors) for key, item in value.items()}
        return value


def picked_from(key: CallKey) -> int:
    """How many rows a call's numbers pick from; 1 of one that picks none.

    Numbers that are all alike would add the gradients of all rows up in one, one after another,
    which takes ten times as long as of a table's (Swin's biases on an H200).
    """
    name = key.target.split(".")[1] if "." in key.target else key.target
    positional = json.loads(key.arguments)[0]
    first = positional[0] if positional else None
    shape = first[TENSOR][0] if isinstance(first, dict) and TENSOR in first else []
    if not shape:
        return 1
    if "embedding" in name:
        return int(shape[0])
    if name in _INDEXED and len(positional) > 1:
        places = zip(shape, positional[1], strict=False)
        return int(min((size for size, numbers in places if numbers is not None), default=1))
    if name in _PICKED and len(positional) > 1:
        return int(shape[positional[1]])
    return 1


def _multiplies(target: str) -> bool:
    """Whether an ATen call is a product, a convolution or attention."""
    name = target.split(".")[1] if "." in target else target
    return name in _PRODUCTS or "conv" in name or "attention" in name
