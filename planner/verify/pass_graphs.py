"""`PassGraphs`: passes of a stage recorded once as CUDA graphs and then queued in one call each.

Issued kernel by kernel, a decode pass of a small batch keeps the host busy for longer than the GPU.
A graph holds the launches of one pass with the addresses they had while it was recorded, so that
whatever a pass reads and writes has to stay where it is: callers keep inputs and outputs in buffers
of their own and copy inside the recorded call.

One graph a pass means one graph a decode step, because the kernels of attention depend on how many
positions of the cache are filled; in return a replayed step runs exactly the kernels that were
profiled for its context. All graphs share one memory pool: they are replayed one at a time, and
what one of them leaves for another in memory of the pool is there only if they are replayed in the
order in which they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreplan.datasets.timing.graph_timer import uncollected

Body = Callable[[], None]


class PassGraphs:
    """Records calls on the GPU's current slice.

    Args:
        device: torch device, a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        current = cuda.current_stream(device)
        # The default stream cannot be recorded; a slice's own stream has to be, because another
        # stream may belong to the whole GPU.
        plain = current == cuda.default_stream(device)
        self._stream: Any = cuda.Stream(device) if plain else current
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._first: Any = None  # the pool ends with the last of its graphs
        # Of the call that is being recorded: the graph that is open, and what came before it.
        self._open: Any = None
        self._parts: list[Body] = []

    def warm_up(self, body: Body) -> None:
        """Run a call once for real: libraries load and pick kernels at their first call."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what it took counts against the rank's memory cap

    def record(self, body: Body) -> Body:
        """What queues all that ``body`` would queue; nothing runs yet.

        Raises:
            RuntimeError: the call waits for the GPU or does what cannot be recorded.
        """
        self._parts = []
        with torch.cuda.stream(self._stream), uncollected():
            self._begin()
            try:
                body()
            finally:
                self._end()
        parts = tuple(self._parts)
        if len(parts) == 1:
            return parts[0]

        def replay() -> None:
            for part in parts:
                part()

        return replay

    def pause(self, call: Body) -> None:
        """Leave something out of the graph that is being recorded; nothing is recorded behind it.

        Args:
            call: carried out at this place by every replay, and not now.
        """
        self._end()
        self._parts.append(call)

    def resume(self, call: Body) -> None:
        """Record on, in another graph, behind something else that is left out; see `pause`."""
        self._parts.append(call)
        self._begin()

    @property
    def paused(self) -> bool:
        """Whether nothing is recorded now."""
        return self._open is None

    def _begin(self) -> None:
        self._open = torch.cuda.CUDAGraph()
        # Threads of NCCL ask for events meanwhile, which only this mode lets them do.
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        if self._open is None:
            return
        graph, self._open = self._open, None
        graph.capture_end()
        self._first = self._first or graph
        self._parts.append(graph.replay)
