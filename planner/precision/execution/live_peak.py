"""`LivePeak`: the most memory that tensors made inside a block took at the same time.

PyTorch counts a GPU's allocations but not a processor's, so storages are followed from the operator
that makes them until they are freed. What a kernel allocates for itself alone (oneDNN's packed
operands) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LivePeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module; a context manager, which slows every operator down a little.

    Args:
        known: tensors that were there before; their storages do not count.

    Attributes:
        peak_bytes: of new storages together.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: set[int] = set()
        self._now = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or storage.data_ptr() in self._known:
            return
        self._alive.add(key)
        self._now += size
        self.peak_bytes = max(self.peak_bytes, self._now)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size
