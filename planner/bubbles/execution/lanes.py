"""`Lanes`: the tensor parallel processes that share a pipeline rank, and their sums.

Each half layer enters with the same input on every lane and leaves with the sum of what the lanes
computed: identity forwards and a sum backwards on the way in, the reverse on the way out (Shoeybi
et al. 2019, "Megatron-LM", section 3). Lane ``t`` of pipeline rank ``r`` is rank ``r tp + t`` of
the widened schedule; lanes send to the same lane of other pipeline ranks.

Processors sum on the spot through memory that they share (`HostGroup`): gloo's threads fight with
the rank for its one core, and one sum of 0.2 MB in four or five takes a tick of the kernel longer,
4 ms, where a half layer takes 2. Sums that something is computed beside are gloo's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from foreplan.datasets.ranks.gloo_wait import nicer_reader, wait_awake
from foreplan.datasets.ranks.host_group import HostGroup
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
        beside: the one for sums that something is computed beside; ``group`` if left out.
        host: carries sums on the spot in place of ``group``.
    """

    def __init__(
        self, size: int = 1, lane: int = 0, group: Any = None, *, beside: Any = None,
        host: HostGroup | None = None,
    ) -> None:  # fmt: skip
        self.size, self.lane, self._group = size, lane, group
        self._beside, self._host = group if beside is None else beside, host

    @classmethod
    def connect(
        cls, pipeline_ranks: int, size: int, rank: int, backend: str, *, beside: bool = True
    ) -> Self:
        """Open the groups of all pipeline ranks; called by every process of the run.

        Args:
            pipeline_ranks: of the decision.
            size: lanes of each.
            rank: of this process, in the widened schedule.
            backend: ``gloo`` or ``nccl``.
            beside: whether some pipeline rank computes beside its lanes' sums.

        Raises:
            SpecError: no processes are connected.
        """
        if size == 1:
            return cls()
        if not dist.is_initialized():
            raise SpecError("tensor parallel ranks", got="one process", expected="connected ones")
        members = [list(range(r * size, (r + 1) * size)) for r in range(pipeline_ranks)]
        place = rank // size

        def opened() -> Any:
            return [dist.new_group(ranks, backend=backend) for ranks in members][place]

        if backend != "gloo":  # a communicator in recorded graphs may not be used beside them
            group = opened()
            return cls(size, rank % size, group, beside=opened() if beside else None)
        with nicer_reader():
            group = opened()
        apart = opened() if beside else None
        patience_s = default_pg_timeout.total_seconds()  # as the groups'
        host = HostGroup.open(members[place], group, patience_s)
        return cls(size, rank % size, group, beside=apart, host=host)

    def enter(self, x: Tensor) -> Tensor:
        """Identity; the gradient is summed over lanes."""
        return x if self.size == 1 else _Enter.apply(x, self)  # type: ignore[no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Sum over lanes, in place; the gradient passes."""
        return x if self.size == 1 else _Leave.apply(x, self)  # type: ignore[no-untyped-call]

    def sum(self, x: Tensor) -> None:
        """Sum over lanes, in place, and wait for it on the spot; NCCL's on the current stream."""
        if self._host is not None:
            self._host.all_reduce(x)
        elif self.size > 1 and dist.get_backend(self._group) == "gloo":
            self.wait(dist.all_reduce(x, group=self._group, async_op=True))
        elif self.size > 1:
            dist.all_reduce(x, group=self._group)

    def start_sum(self, x: Tensor) -> Any:
        """Start to sum over lanes, in place, beside what is computed next.

        Returns:
            For `wait`; until then nobody may read ``x``. ``None`` for a single lane.
        """
        return dist.all_reduce(x, group=self._beside, async_op=True) if self.size > 1 else None

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
