"""Times of calls recorded as CUDA graphs: what the device takes, without the host. Imports torch.

A graph's kernels are handed to the device by the device itself, so that calls far shorter than
their launch can be timed. A replay counts while another one before it keeps the device busy, so
that the graph's own launch does not.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

#: Anything that a stream can record.
Call = Callable[[], object]

#: Calls before the first is recorded: libraries load and pick their kernels.
_WARM = 3
#: Calls of one graph at most, and how long they last together, if operands in turn are not more:
#: the event behind a graph shall not count (assumed).
_MOST_CALLS, _GRAPH_S = 100, 0.001
#: Times that calls are run: at most, and at least where one takes long.
_MOST_TIMES, _FEWEST_TIMES = 15, 5
#: Cycles of a kernel that only waits, until a graph behind it has been launched: 0.2 ms.
_LAUNCH_CYCLES = 400_000


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph in it that ends voids what is being recorded."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def record(calls: Sequence[Call], stream: Any = None) -> torch.cuda.CUDAGraph:
    """Record calls that run one after another as one graph.

    Args:
        calls: in their order; the first ones are called before. What they hold outlives the graph.
        stream: to record on; gradients can only be recorded on the stream of their forward pass.

    Raises:
        RuntimeError: a call fails, or cannot be recorded: it waits for the device, for instance.
    """
    made: Any = torch.cuda.Stream  # untyped
    stream = made() if stream is None else stream
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # memory of graphs before
    with torch.cuda.stream(stream), uncollected():
        for call in calls[:_WARM]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL ask for events meanwhile, which only this mode lets them do.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except BaseException:
            # The capture is void then, and to say so would hide why.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def graph_seconds(
    calls: Sequence[Call], *, stream: Any = None, most_s: float = 1.0, rested: bool = False
) -> float:
    """Median seconds of calls recorded as one graph; of all of them together.

    Args:
        calls: as `record`.
        stream: as `record`.
        most_s: after so long, the fewest replays are enough.
        rested: the device is idle before each replay for twice as long as one takes, so that large
            products meet no power limit, as `end_to_end_passes.single_seconds` has passes rest.

    Raises:
        RuntimeError: as `record`.
    """
    graph = record(calls, stream)
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        graph.replay()
        before = partial(_rest, busy_seconds(graph.replay, graph.replay)) if rested else None
        return median_seconds(before or graph.replay, graph.replay, most_s=most_s)


def _rest(seconds: float) -> None:
    """Let the device idle for twice as long, then wait where it costs no power."""
    spin: Any = torch.cuda._sleep  # untyped
    torch.cuda.synchronize()
    resumed = time.perf_counter() + 2.0 * seconds
    while time.perf_counter() < resumed:
        pass
    spin(_LAUNCH_CYCLES)


def call_seconds(
    turns: Sequence[Call], *, stream: Any = None, most_s: float = 1.0, rested: bool = False
) -> float:
    """Median seconds of one call, recorded on all its operands in turn, again and again if short.

    Args:
        turns: the call on each set of its operands.
        stream: as `record`.
        most_s: as `graph_seconds`.
        rested: as `graph_seconds`.

    Raises:
        RuntimeError: as `record`.
    """
    for call in turns[:_WARM]:
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    turns[0]()
    torch.cuda.synchronize()
    once_s = time.perf_counter() - begun
    wanted = max(1, min(_MOST_CALLS, math.ceil(_GRAPH_S / max(once_s, 1e-9))))
    calls = [*turns] * -(-wanted // len(turns))
    return graph_seconds(calls, stream=stream, most_s=most_s, rested=rested) / len(calls)


def median_seconds(before: Call, run: Call, *, most_s: float = 1.0) -> float:
    """Median of `busy_seconds`.

    Args:
        before: as `busy_seconds`.
        run: as `busy_seconds`.
        most_s: after so long, the fewest times are enough.
    """
    times = list[float]()
    begun = time.perf_counter()
    while len(times) < _FEWEST_TIMES or (
        len(times) < _MOST_TIMES and time.perf_counter() - begun < most_s
    ):
        times.append(busy_seconds(before, run))
    return sorted(times)[len(times) // 2]


def busy_seconds(before: Call, run: Call) -> float:
    """Seconds of the device for a run that is queued while it is busy.

    Args:
        before: keeps the device busy until the run has been issued.
        run: issues what is timed.
    """
    event: Any = torch.cuda.Event  # untyped
    start, stop = event(enable_timing=True), event(enable_timing=True)
    before()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
