"""`RecordedPass`: a network's pass, or a whole training step, as one CUDA graph. Imports torch.

Recorded are the very functions that the eager pass calls one after the other: of a training step
forward, loss, backward and update, so that the host takes no part in any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Passes before one is recorded: libraries load and pick kernels, optimizers make their state.
_WARM = 3
#: ``cudaGraphNodeType``: kernels, copies and fills are what the device runs (cuda_runtime_api.h).
_WORKING_NODES = frozenset({0, 1, 2})


@dataclass(frozen=True)
class RecordedPass:
    """A recorded pass.

    Attributes:
        graph: replays it.
        kernels: kernels, copies and fills in it; ``None`` where CUDA's runtime could not be asked.
        run: what was recorded. It owns tensors made before the recording, as the optimizer's
            state, whose memory the graph goes on using.
    """

    graph: torch.cuda.CUDAGraph
    kernels: int | None
    run: tuple[Callable[[], object], ...]

    @classmethod
    def of(cls, run: Sequence[Callable[[], object]], device: str) -> RecordedPass:
        """Record functions that run one after the other.

        Args:
            run: a pass; what it holds lives as long as the graph. An update must be capturable, and
                nothing of an earlier backward pass may be alive, whose nodes belong to another
                stream.
            device: ``cuda:N``.

        Raises:
            RuntimeError: something in it cannot be recorded: it waits for the device, for instance.
        """
        made: Any = torch.cuda.Stream  # untyped
        with torch.cuda.device(device):
            stream = made()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM):
                    for part in run:
                        part()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, stream=stream):
                for part in run:
                    part()
            kernels = None
            with contextlib.suppress(OSError, AttributeError, RuntimeError):
                kernels = _working_nodes(graph.raw_cuda_graph())
            graph.replay()  # the first one instantiates it
            torch.cuda.synchronize()
        return cls(graph, kernels, tuple(run))


def _working_nodes(graph: int) -> int:
    """Nodes of a ``cudaGraph_t`` that are work of the device."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()

    def ask(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    ask(runtime.cudaGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    ask(runtime.cudaGraphGetNodes(handle, nodes, ctypes.byref(count)))
    working, kind = 0, ctypes.c_int()
    for node in nodes:
        ask(runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        working += kind.value in _WORKING_NODES
    return working
