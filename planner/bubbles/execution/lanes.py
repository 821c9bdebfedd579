"""`Lanes`: the tensor parallel processes that share a pipeline rank, and their sums.

Each half layer enters with the same input on every lane and leaves with the sum of what the lanes
computed: identity forwards and a sum backwards on the way in, the reverse on the way out (Shoeybi
et al. 2019, "Megatron-LM", section 3). Lane ``t`` of pipeline rank ``r`` is rank ``r tp + t`` of
the widened schedule; lanes send to the same lane of other pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foreplan.datasets.gloo_wait import wait_awake
from foreplan.errors import SpecError


class Shard(NamedTuple):
    """The part of a parameter that one lane holds.

    Attributes:
        dimension: that is cut.
        spans: ``[begin, end)`` of it, in order.
        full: its whole size.
    """

    dimension: int
    spans: tuple[tuple[int, int], ...]
    full: int

    @property
    def size(self) -> int:
        """Size of the dimension here."""
        return sum(end - begin for begin, end in self.spans)

    def shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self.full if d == self.dimension else n for d, n in enumerate(local))

    def take(self, whole: Tensor) -> Tensor:
        """This lane's part."""
        parts = [whole.narrow(self.dimension, a, b - a) for a, b in self.spans]
        return torch.cat(parts, self.dimension)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write this lane's part into the whole."""
        pieces = torch.split(part, [b - a for a, b in self.spans], self.dimension)
        for (a, b), piece in zip(self.spans, pieces, strict=True):
            whole.narrow(self.dimension, a, b - a).copy_(piece)


class Lanes:
    """See the module.

    Args:
        size: lanes of a pipeline rank.
        lane: which of them this process is.
        group: torch's process group of the lanes, ``None`` for a single one.
    """

    def __init__(self, size: int = 1, lane: int = 0, group: Any = None) -> None:
        self.size, self.lane, self._group = size, lane, group

    @classmethod
    def connect(cls, pipeline_ranks: int, size: int, rank: int, backend: str) -> Lanes:
        """Open the groups of all pipeline ranks; called by every process of the run.

        Args:
            pipeline_ranks: of the decision.
            size: lanes of each.
            rank: of this process, in the widened schedule.
            backend: ``gloo`` or ``nccl``.

        Raises:
            SpecError: no processes are connected.
        """
        if size == 1:
            return cls()
        if not dist.is_initialized():
            raise SpecError("tensor parallel ranks", got="one process", expected="connected ones")
        groups = [
            dist.new_group(list(range(r * size, (r + 1) * size)), backend=backend)
            for r in range(pipeline_ranks)
        ]
        return cls(size, rank % size, groups[rank // size])

    def enter(self, x: Tensor) -> Tensor:
        """Identity; the gradient is summed over lanes."""
        return x if self.size == 1 else _Enter.apply(x, self)  # type: ignore[no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Sum over lanes, in place; the gradient passes."""
        return x if self.size == 1 else _Leave.apply(x, self)  # type: ignore[no-untyped-call]

    def sum(self, x: Tensor) -> None:
        """Sum over lanes, in place."""
        work = self.start_sum(x)
        if work is not None:
            self.wait(work)

    def start_sum(self, x: Tensor) -> Any:
        """Start to sum over lanes, in place.

        Returns:
            What has a ``wait()``; until then nobody may read ``x``. ``None`` for a single lane.
        """
        return dist.all_reduce(x, group=self._group, async_op=True) if self.size > 1 else None

    def wait(self, work: Any) -> None:
        """Wait for a sum that `start_sum` started; for gloo's as a profile does."""
        if dist.get_backend(self._group) == "gloo":
            wait_awake(work, "all_reduce")
        else:
            work.wait()

    def cut(self, dimension: int, *blocks: int) -> Shard | None:
        """This lane's part of a dimension made of blocks, each cut evenly.

        Raises:
            SpecError: a block that the lanes do not divide.
        """
        if self.size == 1:
            return None
        spans, begin = [], 0
        for block in blocks:
            if block % self.size:
                raise SpecError("tp", got=self.size, expected=f"a divisor of {block} features")
            part = block // self.size
            spans.append((begin + self.lane * part, begin + (self.lane + 1) * part))
            begin += block
        return Shard(dimension, tuple(spans), begin)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lanes: Lanes) -> Tensor:
        ctx.lanes = lanes
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        summed = gradient.contiguous()
        ctx.lanes.sum(summed)
        return summed, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lanes: Lanes) -> Tensor:
        ctx.mark_dirty(x)
        lanes.sum(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        return gradient, None
