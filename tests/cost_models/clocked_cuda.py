"""A CUDA device that only keeps a clock, for tests of what records and times graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

#: Seconds of a cycle, and from kernel to kernel in a queue and in a graph.
CYCLE_S, QUEUED_S, GRAPH_S = 0.5e-9, 1e-6, 4e-7


class ClockedCuda:
    """Stands in for ``torch.cuda``: its only kernel waits, and takes time on this clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recording: list[float] | None = None

    def sleep(self, cycles: int) -> None:
        if self.recording is None:
            self.now += cycles * CYCLE_S + QUEUED_S
        else:
            self.recording.append(cycles * CYCLE_S)

    @contextlib.contextmanager
    def graph(self, graph: Graph, **_: object) -> Iterator[None]:
        self.recording = graph.seconds
        try:
            yield
        finally:
            self.recording = None

    def event(self, **_: object) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: ClockedCuda) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Graph:
    device: ClockedCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self.seconds: list[float] = []
        self.keep = keep_graph

    def capture_begin(self, **_: object) -> None:
        self.device.recording = self.seconds

    def capture_end(self) -> None:
        self.device.recording = None

    def replay(self) -> None:
        self.device.now += sum(self.seconds) + GRAPH_S * len(self.seconds)

    def raw_cuda_graph(self) -> int:
        return 0


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> ClockedCuda:
    """Put a fresh one in the place of ``torch.cuda``."""
    device = ClockedCuda()
    Graph.device = device
    fakes: dict[str, Any] = {
        "_sleep": device.sleep, "graph": device.graph, "Event": device.event, "CUDAGraph": Graph,
        "Stream": Stream, "current_stream": Stream, "synchronize": lambda: None,
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return device
