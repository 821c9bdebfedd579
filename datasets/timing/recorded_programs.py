"""`recorded_seconds`: programs of a pass that a GPU runs as one CUDA graph. Imports torch.

A profile replays each of a training step's programs behind itself, at the clock that it leaves the
board by itself. In a step that replays its passes kernels of many kinds follow each other, and the
clock is that of their mixture. In steps of an H200 it lay
between those of a board that rests and of one that does nothing else (1,980 and 1,700 MHz; in steps
1,790 to 1,950, docs/results/bubbles.md). So the whole pass counts, half way between the two, and
programs share it by what each takes in a graph of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from foreplan.datasets.timing.graph_timer import Call, call_seconds, graph_seconds

#: Seconds after which the fewest replays of a graph are enough (chosen): of a program, of the pass.
_PROGRAM_S, _PASS_S = 0.05, 1.0


def recorded_seconds(
    calls: Sequence[tuple[Sequence[Call], int]], stream: torch.cuda.Stream
) -> list[float | None]:
    """Seconds of a call of each program, as a part of the recorded pass.

    Args:
        calls: of each program the call on every set of its operands, and its calls in a pass.
        stream: to record on, which also made the graphs of gradients.

    Returns:
        ``None`` of a program without calls, or that cannot be recorded; the others are the pass.
    """
    alone: list[float | None] = []
    # A thread of autograd's own would record elsewhere.
    with torch.autograd.set_multithreading_enabled(False):
        for turns, _ in calls:
            try:
                alone.append(
                    call_seconds(turns, stream=stream, most_s=_PROGRAM_S, rested=True)
                    if turns else None
                )  # fmt: skip
            except RuntimeError:
                torch.cuda.synchronize()
                alone.append(None)
        members = [
            (turns[0], often, seconds)
            for (turns, often), seconds in zip(calls, alone, strict=True) if seconds is not None
        ]  # fmt: skip
        if not members:
            return alone
        # In a pass equal programs do not follow each other.
        order = [
            call
            for turn in range(max(often for _, often, _ in members))
            for call, often, _ in members if turn < often
        ]  # fmt: skip
        rested, busy = (
            graph_seconds(order, stream=stream, most_s=_PASS_S, rested=rests)
            for rests in (True, False)
        )
    scale = math.sqrt(rested * busy) / math.fsum(often * seconds for _, often, seconds in members)
    return [None if seconds is None else scale * seconds for seconds in alone]
