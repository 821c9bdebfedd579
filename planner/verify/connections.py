"""`Connections`: what one process has opened to others, kept from one plan to the next.

A process that changes its plan between two steps needs most of what it has: process groups of the
same ranks, memory shared with them, streams. Opened anew each time, every re-plan would take file
descriptors, threads and memory that nobody gives back before the run ends, and on GPUs NCCL's
communicators, which take their streams in turn from a pool of 32, would come to share one; a wait
for a message could then hold up what the message waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from foreplan.datasets.ranks.host_group import HostGroup
from foreplan.errors import VerificationError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

#: Streams that torch has of a priority; it hands them out in turn (c10/cuda/CUDAStream.cpp).
_POOL = 32
#: Of the streams of connections. NCCL's communicators take theirs from those of priority 0
#: (ProcessGroupNCCL.cpp, initNCCLComm), so that a stream of that priority may be one on which lanes
#: are summed.
_APART = -1
#: Thread blocks of a transfer between two GPUs. A receive is posted long before its message comes
#: and keeps its multiprocessors until then: with NCCL's 32 the passes of a training step beside it
#: took 24-32 % longer on two H200, with 2 at most 8 %, and 16 MiB took 0.6 ms instead of 0.1
#: (measured).
_PAIR_CTAS = 2


class ConnectionLost(VerificationError):
    """Another rank has gone or does not answer; its own process knows why."""


class Connections:
    """What one process has opened, by what it is.

    Opening is a meeting: a process group is made by all ranks in the same order. So every rank has
    to hand its connections to the same calls of `connect`.
    """

    def __init__(self) -> None:
        self._opened: dict[Hashable, Any] = {}
        self._streams: list[Any] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._opened

    def take(self, key: Hashable, opened: Callable[[], _T]) -> _T:
        """What is there under a key; if nothing is, what is opened now and kept from now on.

        Args:
            key: what it is, the same on all ranks that meet to open it.
            opened: opens it; returns only when the other ranks have come, where it is a meeting.
        """
        if key not in self._opened:
            self._opened[key] = opened()
        return cast("_T", self._opened[key])

    def streams(self, count: int, device: torch.device) -> list[Any]:
        """CUDA streams, no two of them the same one, for the connections of one plan.

        Plans share them, because no two are carried out at the same time.

        Args:
            count: how many.
            device: the GPU.

        Returns:
            Fewer if torch has no more.
        """
        import torch

        cuda: Any = torch.cuda
        taken = {stream.cuda_stream for stream in self._streams}
        while len(self._streams) < count:
            drawn = (cuda.Stream(device, priority=_APART) for _ in range(_POOL))
            new = next((stream for stream in drawn if stream.cuda_stream not in taken), None)
            if new is None:
                break
            taken.add(new.cuda_stream)
            self._streams.append(new)
        return self._streams[:count]

    def close(self) -> None:
        """Drop everything; process groups end with ``destroy_process_group``."""
        for opened in self._opened.values():
            if isinstance(opened, HostGroup):
                opened.close()
        self._opened.clear()
        self._streams.clear()


def pair_options(timeout: timedelta) -> Any:
    """NCCL's options of a connection between two GPUs that leave the rest of them to computation.

    Args:
        timeout: after which a transfer counts as lost.
    """
    import torch.distributed as dist

    nccl: Any = dist
    options = nccl.ProcessGroupNCCL.Options()
    options._timeout = timeout  # else torch warns that it will be overwritten
    options.config.min_ctas, options.config.max_ctas = 1, _PAIR_CTAS
    return options
