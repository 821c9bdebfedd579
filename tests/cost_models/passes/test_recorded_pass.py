"""CUDA graphs of passes, and gaps between kernels, on a device that only keeps a clock."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cost_models.clocked_cuda import CYCLE_S, GRAPH_S, QUEUED_S, ClockedCuda, install

from foreplan.cost_models.passes import graph_gaps, recorded_pass
from foreplan.cost_models.passes.graph_gaps import measured_gaps
from foreplan.cost_models.passes.recorded_pass import RecordedPass
from foreplan.datasets.timing import graph_timer


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> ClockedCuda:
    return install(monkeypatch)


def test_gaps_of_a_clock(clocked: ClockedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_gaps, "_ROWS", (1, 2))
    monkeypatch.setattr(graph_gaps, "_WIDTHS", (64,))
    found = measured_gaps("cpu", torch.float32)
    # A chain of waiting kernels takes a gap for each but the first longer than one that waits long.
    assert found["queued_gap_s"] == pytest.approx(QUEUED_S)
    assert found["graph_gap_s"] == pytest.approx(GRAPH_S)
    assert len(found["alone"]) == 2 * 10
    assert all(row[3:] == [0.0, 0.0] for row in found["alone"])  # no other kernel takes time here


def test_a_pass_is_warm_before_it_is_recorded(clocked: ClockedCuda) -> None:
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


def test_what_a_pass_holds_lives_as_long_as_its_graph(clocked: ClockedCuda) -> None:
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


def test_a_graph_that_rests_is_timed_as_long(clocked: ClockedCuda) -> None:
    calls = [lambda: clocked.sleep(2000)] * 5
    found = [graph_timer.graph_seconds(calls, rested=rested) for rested in (False, True)]
    assert found == pytest.approx([5 * (2000 * CYCLE_S + GRAPH_S)] * 2)
    before = clocked.now
    graph_timer._rest(1e-3)
    # A kernel that only waits holds the queue until the graph has been launched.
    assert clocked.now - before == pytest.approx(400_000 * CYCLE_S + QUEUED_S)
