"""`Pieces`: consecutive halves that run one at a time, with the lanes' sums between them.

A half computes the lanes' shares of a sum in both directions: of its output forwards, of the
gradient of its normed input backwards. A piece starts that sum and returns, and the next piece
waits for it; what a rank's list has between the two, units of an encoder say, computes meanwhile
(Optimus, section 3.2: encoder kernels in the idle time of tensor parallelism).

So the autograd graph is cut at both ends of every sum: a *join* adds what was summed to the
residual stream and norms it, an *inside* goes from there to the lane's next share. Behind the last
half and in front of the first, nothing can come between; there a piece waits itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreplan.planner.bubbles.execution.lanes import Lanes
from foreplan.planner.bubbles.execution.layers import Half


class _Join(NamedTuple):
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class _Inside(NamedTuple):
    leaf: Tensor
    share: Tensor


class Pieces:
    """See the module; takes the place of a `Cut`.

    Args:
        halves: in order.
        opening: what comes before them, ``opening(inputs, microbatch)``.
        closing: what comes behind them, ``closing(x, microbatch)``.
        differentiable: whether each input passes its gradient on.
        lanes: that share each half.
        frozen: there is no backward pass, and nothing is kept.
    """

    def __init__(
        self,
        halves: Sequence[Half],
        opening: Callable[[Sequence[Tensor], int], Tensor],
        closing: Callable[[Tensor, int], Tensor],
        differentiable: Sequence[bool],
        lanes: Lanes,
        *,
        frozen: bool = False,
    ) -> None:
        self._halves, self._opening, self._closing = tuple(halves), opening, closing
        self._differentiable, self._lanes, self._frozen = tuple(differentiable), lanes, frozen
        self._joins: dict[int, list[_Join]] = defaultdict(list)
        self._insides: dict[int, list[_Inside]] = defaultdict(list)
        # Of a micro-batch that is between two pieces: the stream, what is being summed, by whom.
        self._open: dict[int, tuple[Tensor, Tensor, Any]] = {}

    def __len__(self) -> int:
        return len(self._halves)

    @property
    def live(self) -> int:
        """Micro-batches between their two passes."""
        return len(self._joins)

    # ------------------------------------------------------------------------------ whole passes

    def forward(self, microbatch: int, inputs: Sequence[Tensor]) -> Tensor:
        """All pieces in turn; the output, detached and contiguous."""
        found = None
        for piece in range(len(self)):
            found = self.forward_piece(microbatch, piece, inputs, beside=False)
        assert found is not None
        return found

    def backward(
        self, microbatch: int, gradient: Tensor | None, *, weights: bool = True
    ) -> tuple[Tensor | None, ...]:
        """All pieces in turn; arguments and result as of `Cut.backward`.

        Raises:
            RuntimeError: without ``weights``; pieces do not put gradients off.
        """
        if not weights:
            raise RuntimeError("pieces compute the gradients of their weights at once")
        found: tuple[Tensor | None, ...] | None = None
        for piece in range(len(self)):
            found = self.backward_piece(microbatch, piece, gradient, beside=False)
        assert found is not None
        return found

    def backward_weights(self, microbatch: int) -> None:
        """Never: see `backward`."""
        raise RuntimeError("no gradients were put off")

    # ------------------------------------------------------------------------------------- pieces

    def forward_piece(
        self, microbatch: int, piece: int, inputs: Sequence[Tensor], *, beside: bool = True
    ) -> Tensor | None:
        """Compute a half and start its sum.

        Args:
            microbatch: which.
            piece: number of the half.
            inputs: for the first piece.
            beside: something may be computed before the sum is waited for.

        Returns:
            Of the last piece the output, detached and contiguous.
        """
        with torch.set_grad_enabled(not self._frozen):
            if piece == 0:
                leaves = tuple(
                    x.detach().requires_grad_(passes and not self._frozen)
                    for x, passes in zip(inputs, self._differentiable, strict=True)
                )
                x = self._opening(leaves, microbatch)
            else:
                leaves, x = self._joined(microbatch, self._halves[piece - 1])
            half = self._halves[piece]
            normed = half.norm(x)
            leaf = normed.detach().requires_grad_(not self._frozen)
            share = half.out.partial(half.inside(leaf))
        if not self._frozen:
            self._joins[microbatch].append(_Join(leaves, (x, normed)))
            self._insides[microbatch].append(_Inside(leaf, share))
        summed = share.detach()
        self._open[microbatch] = x.detach(), summed, self._sum(summed, beside)
        if piece < len(self) - 1:
            return None
        with torch.set_grad_enabled(not self._frozen):
            leaves, x = self._joined(microbatch, half)
            output = self._closing(x, microbatch).contiguous()
        if not self._frozen:
            self._joins[microbatch].append(_Join(leaves, (output,)))
        return output.detach()

    def backward_piece(
        self, microbatch: int, piece: int, gradient: Tensor | None, *, beside: bool = True
    ) -> tuple[Tensor | None, ...] | None:
        """Turn a half back, the last one first, and start the sum of its input's gradient.

        Args:
            microbatch: which.
            piece: 0 for the last half.
            gradient: of the output, for piece 0; ``None`` where it is the loss.
            beside: something may be computed before the sum is waited for.

        Returns:
            Of the last piece the gradients of the inputs, as `Cut.backward`.
        """
        if piece == 0:
            join = self._joins[microbatch].pop()
            torch.autograd.backward(join.outputs, None if gradient is None else [gradient])
        else:
            join = self._turned(microbatch)
        (stream,) = (leaf.grad for leaf in join.leaves)
        assert stream is not None
        inside = self._insides[microbatch].pop()
        torch.autograd.backward([inside.share], [stream])
        found = inside.leaf.grad
        assert found is not None
        found = found.contiguous()
        self._open[microbatch] = stream, found, self._sum(found, beside)
        if piece < len(self) - 1:
            return None
        join = self._turned(microbatch)
        del self._joins[microbatch], self._insides[microbatch]
        gradients = [leaf.grad for leaf in join.leaves]
        return tuple(None if g is None else g.contiguous() for g in gradients)

    def _sum(self, x: Tensor, beside: bool) -> Any:
        """Start a sum, or do it now and return ``None``."""
        if beside:
            return self._lanes.start_sum(x)
        self._lanes.sum(x)
        return None

    def wait(self, microbatch: int) -> None:
        """Wait for the sum that the micro-batch's last piece started, if it is on its way."""
        if microbatch in self._open:
            stream, summed, work = self._open[microbatch]
            if work is not None:
                self._lanes.wait(work)
            self._open[microbatch] = stream, summed, None

    def forget(self) -> None:
        """Drop what unfinished micro-batches keep."""
        for microbatch in tuple(self._open):
            self.wait(microbatch)
        for kept in (self._joins, self._insides, self._open):
            kept.clear()

    def _joined(self, microbatch: int, half: Half) -> tuple[tuple[Tensor, ...], Tensor]:
        """The leaf of a join and the residual stream behind ``half``.

        What was summed and the stream before it have the same gradient, so that one of them is
        enough: autograd would copy it for the other.
        """
        self.wait(microbatch)
        before, summed, _ = self._open.pop(microbatch)
        leaf = summed.requires_grad_(not self._frozen)
        return (leaf,), before + half.out.finish(leaf)

    def _turned(self, microbatch: int) -> _Join:
        """Turn the join back whose input gradient has been summed."""
        self.wait(microbatch)
        stream, summed, _ = self._open.pop(microbatch)
        join = self._joins[microbatch].pop()
        pairs = [
            (made, gradient)
            for made, gradient in zip(join.outputs, (stream, summed), strict=True)
            if made.requires_grad
        ]
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
        return join
