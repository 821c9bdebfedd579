"""CUDA graphs of passes, and gaps between kernels, on a device that only keeps a clock."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from foreplan.cost_models import graph_gaps, recorded_pass
from foreplan.cost_models.graph_gaps import measured_gaps
from foreplan.cost_models.recorded_pass import RecordedPass

#: Seconds of a cycle, and from kernel to kernel in a queue and in a graph.
CYCLE_S, QUEUED_S, GRAPH_S = 0.5e-9, 1e-6, 4e-7


class Clocked:
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
    def __init__(self, device: Clocked) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Graph:
    device: Clocked

    def __init__(self, keep_graph: bool = False) -> None:
        self.seconds: list[float] = []
        self.keep = keep_graph

    def replay(self) -> None:
        self.device.now += sum(self.seconds) + GRAPH_S * len(self.seconds)

    def raw_cuda_graph(self) -> int:
        return 0


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    device = Clocked()
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


def test_gaps_of_a_clock(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_gaps, "_ROWS", (1, 2))
    monkeypatch.setattr(graph_gaps, "_WIDTHS", (64,))
    found = measured_gaps("cpu", torch.float32)
    # A chain of waiting kernels takes a gap for each but the first longer than one that waits long.
    assert found["queued_gap_s"] == pytest.approx(QUEUED_S)
    assert found["graph_gap_s"] == pytest.approx(GRAPH_S)
    assert len(found["alone"]) == 2 * 10
    assert all(row[3:] == [0.0, 0.0] for row in found["alone"])  # no other kernel takes time here


def test_a_pass_is_warm_before_it_is_recorded(clocked: Clocked) -> None:
    calls: list[tuple[str, bool]] = []

    def part(name: str) -> Callable[[], None]:
        def run() -> None:
            calls.append((name, clocked.recording is not None))
            clocked.sleep(2000)

        return run

    made = RecordedPass.of([part("forward"), part("backward")], "cuda:0")
    assert calls == [("forward", False), ("backward", False)] * 3 + [
        ("forward", True), ("backward", True)]  # fmt: skip
    assert made.kernels is None  # no CUDA runtime that could be asked
    before = clocked.now
    made.graph.replay()
    assert clocked.now - before == pytest.approx(2 * (2000 * CYCLE_S + GRAPH_S))


def test_what_a_pass_holds_lives_as_long_as_its_graph(clocked: Clocked) -> None:
    class Optimizer:
        def step(self) -> None:
            clocked.sleep(1)

    optimizer = Optimizer()
    held = weakref.ref(optimizer)
    made: RecordedPass | None = RecordedPass.of([optimizer.step], "cuda:0")
    del optimizer
    assert held() is not None  # the graph writes to its state in every replay
    made = None
    gc.collect()
    assert made is None
    assert held() is None


def test_nodes_that_are_work_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [0, 0, 1, 2, 5, 7, 0]  # kernels, a copy, a fill; an empty node and an event's wait

    class Runtime:
        @staticmethod
        def cudaGraphGetNodes(graph: Any, nodes: Any, count: Any) -> int:
            count._obj.value = len(kinds)
            for at in range(len(kinds) if nodes is not None else 0):
                nodes[at] = at + 1
            return 0

        @staticmethod
        def cudaGraphNodeGetType(node: Any, kind: Any) -> int:
            kind._obj.value = kinds[node.value - 1]
            return 0

    monkeypatch.setattr(recorded_pass.ctypes, "CDLL", lambda _: Runtime)
    assert recorded_pass._working_nodes(1) == 5
    monkeypatch.setattr(Runtime, "cudaGraphGetNodes", staticmethod(lambda *_: 1))
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        recorded_pass._working_nodes(1)
