"""`PassGraphs`: passes of a stage recorded once as CUDA graphs and then queued in one call each.

Issued kernel by kernel, a decode pass of a small batch keeps the host busy for longer than the GPU.
A graph holds the launches of one pass with the addresses they had while it was recorded, so that
whatever a pass reads and writes has to stay where it is: callers keep inputs and outputs in buffers
of their own and copy inside the recorded call.

One graph a pass means one graph a decode step, because the kernels of attention depend on how many
positions of the cache are filled; in return a replayed step runs exactly the kernels that were
profiled for its context. All graphs share one memory pool: they are replayed one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Threads of NCCL ask for events meanwhile, which only this mode lets them do.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        self._first = self._first or graph
        replay: Body = graph.replay
        return replay
