"""`time_calls`: times of single calls of passes, as they wait in a queue and inside CUDA graphs.

A call that cannot be recorded is timed in a queue, and why it could not is kept. One that leaves
the device unusable ends the process; it is not run again in that way by the next one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from foreplan.cost_models.execution import Execution

if TYPE_CHECKING:
    from foreplan.cost_models.passes.call_operands import CallKey
    from foreplan.cost_models.passes.call_steps import CallStep
    from foreplan.cost_models.passes.call_timer import CallTimer


class CallSeconds(NamedTuple):
    """Times of a call alone.

    Attributes:
        device_s: on the device, as the call waits in a queue; ``None`` where it was not timed so.
        host_s: until it returns to the host.
        recorded_s: inside a CUDA graph; ``None`` where it was not timed so, or could not be.
        why: it could not be recorded.
    """

    device_s: float | None
    host_s: float | None
    recorded_s: float | None = None
    why: str | None = None

    @property
    def queued(self) -> tuple[float, float] | None:
        """Seconds on the device and of the host, where the call was timed in a queue."""
        if self.device_s is None or self.host_s is None:
            return None
        return self.device_s, self.host_s


class LostDeviceError(RuntimeError):
    """A call left the device unusable for this process.

    Attributes:
        call: what it was.
        execution: how it was run.
    """

    def __init__(self, call: tuple[CallKey, str], execution: Execution, why: str) -> None:
        super().__init__(why)
        self.call, self.execution = call, execution


#: Ways in which a call left a device unusable, and why.
Lost = Mapping[tuple["CallKey", str], Mapping[Execution, str]]


def time_calls(
    steps: Iterable[CallStep], device: str, seconds: float,
    executions: Sequence[Execution] = ("eager",), lost: Lost | None = None,
) -> dict[tuple[CallKey, str], CallSeconds | None]:  # fmt: skip
    """Seconds of each distinct call; ``None`` of what did not run.

    Args:
        steps: of a pass.
        device: torch device.
        seconds: spent on each.
        executions: ``eager``: as a call waits in a queue; ``graph``: inside a CUDA graph, views
            left out, and in a queue where that fails.
        lost: calls that are not run again in a way that left the device unusable.

    Raises:
        LostDeviceError: a call left the device unusable.
    """
    from foreplan.cost_models.passes.call_timer import CallTimer

    timer = CallTimer(device, seconds=seconds)
    found: dict[tuple[CallKey, str], CallSeconds | None] = {}
    with no_collection():
        for step in steps:
            call = (step.key, step.mode)
            if call in found:
                continue
            before = {} if lost is None else lost.get(call, {})
            recorded_s, why = None, None
            if "graph" in executions and step.view:
                recorded_s = 0.0
            elif "graph" in executions:
                recorded_s, why = _recorded(timer, call, before)
            if recorded_s is not None and "eager" not in executions:
                found[call] = CallSeconds(None, None, recorded_s)
                continue
            device_s, host_s = _queued(timer, call, before) or (None, None)
            ran = device_s is not None or recorded_s is not None
            found[call] = CallSeconds(device_s, host_s, recorded_s, why) if ran else None
    return found


def _recorded(
    timer: CallTimer, call: tuple[CallKey, str], lost: Mapping[Execution, str]
) -> tuple[float | None, str | None]:
    """Seconds of a call inside a graph, or why there are none."""
    from foreplan.cost_models.passes.call_steps import UPDATE

    key, mode = call
    if "graph" in lost:
        return None, lost["graph"]
    try:
        if key.target == UPDATE:
            return timer.graph_update(*json.loads(key.arguments)), None
        return timer.graph_time(key, mode), None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        why = first_line(error)
        print(f"{key.target} {mode} was not recorded: {why}", file=sys.stderr)
        _check_usable(timer.device, call, "graph", why)
        return None, why


def _queued(
    timer: CallTimer, call: tuple[CallKey, str], lost: Mapping[Execution, str]
) -> tuple[float, float] | None:
    """Seconds of a call in a queue, on the device and of the host; ``None`` if it does not run."""
    from foreplan.cost_models.passes.call_steps import UPDATE

    key, mode = call
    if "eager" in lost:
        return None
    try:
        if key.target == UPDATE:
            shapes, dtype = json.loads(key.arguments)
            return timer.time_update(shapes, dtype, key.backward_bytes)
        return timer.time(key, mode)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # the rest goes on
        why = first_line(error)
        print(f"{key.target} {mode}: {why}", file=sys.stderr)
        _check_usable(timer.device, call, "eager", why)
        return None


def first_line(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _check_usable(
    device: str, call: tuple[CallKey, str], execution: Execution, why: str
) -> None:  # fmt: skip
    """Refuse to go on where a call has left the device unusable."""
    import torch

    if not device.startswith("cuda"):
        return
    try:
        torch.cuda.synchronize()
        torch.rand(1, device=device).add_(1.0)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LostDeviceError(call, execution, why) from error


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage stays where it is: a collection takes longer than a pass."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
