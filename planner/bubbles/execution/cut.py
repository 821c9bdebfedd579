"""`Cut`: a part of the model with its own piece of the autograd graph for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foreplan.planner.bubbles.execution.layers import WeightGradients

Compute = Callable[[Sequence[Tensor], int], Tensor]


class _Kept(NamedTuple):
    leaves: tuple[Tensor, ...]
    output: Tensor | None


class Cut:
    """Runs a part forwards and backwards, micro-batch by micro-batch, in any order.

    Inputs become leaves of a graph that ends with the output, and their gradients are handed back;
    so a backward pass stops at the part's border, wherever the part before it lies and whenever it
    runs. What a micro-batch keeps is freed by its backward pass.

    Args:
        compute: the part, ``compute(inputs, microbatch)``.
        differentiable: whether each input passes its gradient on.
        frozen: the part has no backward pass and keeps nothing.
        recompute: keep inputs alone, and compute the inside again in the backward pass.
        later: where the part's weight gradients are put off to, if they are.
    """

    def __init__(
        self,
        compute: Compute,
        differentiable: Sequence[bool],
        *,
        frozen: bool = False,
        recompute: bool = False,
        later: WeightGradients | None = None,
    ) -> None:
        self._compute = compute
        self._differentiable = tuple(differentiable)
        self._frozen, self._recompute, self._later = frozen, recompute, later
        self._kept: dict[int, _Kept] = {}

    @property
    def live(self) -> int:
        """Micro-batches between their two passes."""
        return len(self._kept)

    def forward(self, microbatch: int, inputs: Sequence[Tensor]) -> Tensor:
        """The part's output, detached and contiguous."""
        if self._frozen:
            with torch.no_grad():
                return self._compute(inputs, microbatch).contiguous()
        leaves = tuple(
            x.detach().requires_grad_(passes)
            for x, passes in zip(inputs, self._differentiable, strict=True)
        )
        with torch.set_grad_enabled(not self._recompute):
            output = self._compute(leaves, microbatch).contiguous()
        self._kept[microbatch] = _Kept(leaves, None if self._recompute else output)
        return output.detach()

    def backward(
        self, microbatch: int, gradient: Tensor | None, *, weights: bool = True
    ) -> tuple[Tensor | None, ...]:
        """Add to the parameters' gradients.

        Args:
            microbatch: which.
            gradient: of the output; ``None`` where it is the loss.
            weights: also of the linears' weights; else `backward_weights` does that.

        Returns:
            The gradient of each differentiable input, contiguous, ``None`` for the others.
        """
        leaves, output = self._kept.pop(microbatch)
        if output is None:
            with torch.enable_grad():
                output = self._compute(leaves, microbatch).contiguous()
        if not weights and self._later is not None:
            self._later.collect(microbatch)
        torch.autograd.backward([output], None if gradient is None else [gradient])
        if self._later is not None:
            self._later.close()
        found = [leaf.grad for leaf in leaves]
        return tuple(None if g is None else g.contiguous() for g in found)

    def backward_weights(self, microbatch: int) -> None:
        """Compute the weights' gradients that `backward` left out."""
        if self._later is None:
            raise RuntimeError("no gradients were put off")
        self._later.finish(microbatch)

    def forget(self) -> None:
        """Drop what unfinished micro-batches keep."""
        self._kept.clear()
        if self._later is not None:
            self._later.forget()
