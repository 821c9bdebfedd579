"""What autograd keeps for the backward pass, counted exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class SavedTensors:
    """Counts storages that autograd saves, each once; parameters and buffers do not count.

    A hook a saved tensor slows the forward pass, so that counting belongs outside of timed steps.

    Attributes:
        bytes: of the storages seen so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.bytes = 0
        self._held = {t.untyped_storage().data_ptr() for t in _tensors(module)}
        self._alive: list[torch.UntypedStorage] = []

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the operators of this block save."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._alive.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._held:
            self._held.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            # While a storage lives, no other one can have its address.
            self._alive.append(storage)
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
