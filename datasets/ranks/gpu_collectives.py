"""Collectives between GPUs, as a step of recorded passes meets them. Imports torch.

The host has queued them long before they begin, so that its own time is none of theirs; and they
take multiprocessors from what is computed beside. Kernels of few waves of blocks lose more to that
than a large product: half a layer 0.54 of a sum's time (two H100s), products of 4096 0.36 (four
H200s; docs/results/bubbles.md). So half a layer stands for computation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from foreplan.datasets.timing.graph_timer import record

#: Cycles for which a GPU waits while its host gets ahead: 2 ms.
_QUEUING_CYCLES = 4_000_000
#: Collectives that are timed in turn, and how often (chosen).
_IN_TURN, _TIMES = 4, 5
#: Positions and width of the half layer, as an encoder's.
_ROWS, _WIDTH = 4096, 1024
#: How much longer than the collectives computation takes alone, and how often it is timed (chosen).
_LONGER, _TURNS = 3.0, 5


def queued_seconds(run: Callable[[], object]) -> float:
    """Median seconds of a collective that was queued before it began.

    Args:
        run: carries one out; every rank calls this at the same time.
    """
    found = []
    for _ in range(_TIMES):
        found.append(_elapsed(run, lambda: [run() for _ in range(_IN_TURN)]) / _IN_TURN)
    return statistics.median(found)


class BesideCollectives:
    """What computation on this GPU loses to collectives beside it.

    Args:
        device: torch device.
        meet: makes all ranks meet.
        agree: the first rank's number, at least 1, from each rank's.
    """

    def __init__(
        self, device: str | torch.device, meet: Callable[[], object], agree: Callable[[float], int]
    ) -> None:
        self._meet, self._agree = meet, agree
        made: Any = torch.cuda.Stream  # untyped
        self._stream = made(device)
        with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
            self._half = record([_half_layer(device)], self._stream)

    def lost_seconds(self, start: Callable[[], Any], count: int) -> float:
        """Seconds lost to one of several collectives that start together.

        Args:
            start: begins one; what it returns is waited for.
            count: how many; 0 on a rank that only keeps step.
        """
        with torch.cuda.stream(self._stream):
            link_s = _elapsed(_nothing, lambda: [work.wait() for work in _started(start, count)])
            half_s = _elapsed(self._half.replay, self._half.replay)
            halves = self._agree(_LONGER * link_s / half_s)
            lost = [
                self._computing(halves, start, count) - self._computing(halves, start, 0)
                for _ in range(_TURNS)
            ]
        return max(0.0, statistics.median(lost)) / max(count, 1)

    def _computing(self, halves: int, start: Callable[[], Any], count: int) -> float:
        works: list[Any] = []

        def compute() -> None:
            works.extend(_started(start, count))
            for _ in range(halves):
                self._half.replay()

        self._meet()
        seconds = _elapsed(_nothing, compute)
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return seconds


def _started(start: Callable[[], Any], count: int) -> list[Any]:
    return [start() for _ in range(count)]


def _elapsed(before: Callable[[], object], run: Callable[[], object]) -> float:
    """Seconds of what is queued on the current stream while the GPU waits, and then does before."""
    event: Any = torch.cuda.Event  # untyped
    begin, end = event(enable_timing=True), event(enable_timing=True)
    spin: Any = torch.cuda._sleep  # untyped
    torch.cuda.synchronize()
    spin(_QUEUING_CYCLES)
    before()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _half_layer(device: str | torch.device) -> Callable[[], object]:
    """Forward and backward pass of a norm, two products and what lies between them, in bf16."""
    functional = torch.nn.functional

    def drawn(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return (0.02 * made).requires_grad_()

    x, norm, bias = drawn(_ROWS, _WIDTH), drawn(_WIDTH), drawn(_WIDTH)
    up, down = drawn(4 * _WIDTH, _WIDTH), drawn(_WIDTH, 4 * _WIDTH)
    gradient = torch.randn(_ROWS, _WIDTH, device=device, dtype=torch.bfloat16)

    def both_passes() -> object:
        inside = functional.gelu(
            functional.layer_norm(x, (_WIDTH,), norm, bias) @ up.t(), approximate="tanh"
        )
        return torch.autograd.grad(x + inside @ down.t(), (x, norm, bias, up, down), gradient)

    return both_passes


def _nothing() -> None:
    return
