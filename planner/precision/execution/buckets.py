"""`GradientBuckets`: fp32 gradients of a module laid into one flat tensor a DDP bucket.

A gradient is written into its bucket when autograd has it, divided by the number of ranks on the
way, as DDP does; from then on ``parameter.grad`` is a view of what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreplan.errors import SpecError


class GradientBuckets:
    """See the module.

    Args:
        module: its parameters must be on their device already; it gets gradients and hooks.
        buckets: names of the parameters of each bucket.
        ranks: number that gradients are divided by.
        ready: called when all gradients of buckets ``0..q`` are there, with ``q``, once a backward
            pass for every ``q`` that turns out ready at the same time, largest only.

    Attributes:
        flat: the buckets, fp32.

    Raises:
        SpecError: the buckets do not hold every trained parameter once.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Sequence[str]],
        ranks: int,
        ready: Callable[[int], None],
    ) -> None:
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        names = [name for bucket in buckets for name in bucket]
        if sorted(names) != sorted(parameters):
            wrong = sorted(set(names) ^ set(parameters)) or names
            raise SpecError("plan: buckets", got=wrong[0], expected="every parameter in one bucket")
        self._ready, self._ranks = ready, ranks
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._left = [len(bucket) for bucket in buckets]
        self._full = list(self._left)
        self._first_open = 0
        self.flat: list[Tensor] = []
        for index, bucket in enumerate(buckets):
            sizes = [parameters[name].numel() for name in bucket]
            first = parameters[bucket[0]]
            flat = torch.zeros(sum(sizes), dtype=torch.float32, device=first.device)
            for name, part in zip(bucket, flat.split_with_sizes(sizes), strict=True):
                parameter: Any = parameters[name]  # torch's annotations leave the hook's out
                view = part.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self._hook(index, view))
                self._slots.append((parameter, view))
            self.flat.append(flat)

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def nbytes(self) -> int:
        """Memory of all buckets."""
        return sum(flat.numel() * flat.element_size() for flat in self.flat)

    def clear(self) -> None:
        """Forget gradients; before every backward pass."""
        for parameter, _ in self._slots:
            parameter.grad = None
        self._left, self._first_open = list(self._full), 0

    def close(self) -> None:
        """After a backward pass: parameters that took no part in it have a gradient of zero."""
        for parameter, view in self._slots:
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def _hook(self, index: int, view: Tensor) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            found: Any = parameter.grad
            torch.div(found, self._ranks, out=view)
            parameter.grad = view
            self._left[index] -= 1
            before = self._first_open
            while self._first_open < len(self._left) and not self._left[self._first_open]:
                self._first_open += 1
            if self._first_open > before:
                self._ready(self._first_open - 1)

        return arrived
