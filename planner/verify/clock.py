"""`Clock`: when each step of a run began and ended, on the host or on a GPU.

All times are nanoseconds of ``time.monotonic_ns``, which is one clock for every process of a host.
A GPU's steps are timed by events on its streams, because the host runs ahead of it; the events are
anchored to the host's clock by one event recorded while both wait for each other.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    """Stamps the steps of one run; steps are numbered by their place in the program."""

    def begin(self) -> None:
        """Forget the last run; called when nothing runs, right before the first step."""
        ...

    def start(self, place: int) -> None:
        """Step ``place`` starts now (GPU: when its stream gets here)."""
        ...

    def end(self, place: int) -> None:
        """Step ``place`` has ended now."""
        ...

    def pass_by(self, place: int) -> None:
        """Step ``place`` computes nothing: it starts and ends now."""
        ...

    def stamps(self) -> tuple[list[int], list[int]]:
        """Start and end of every step in nanoseconds; waits for the GPU."""
        ...

    def ended(self, place: int) -> bool:
        """Whether step ``place`` is over, or not begun; at once, and from any thread."""
        ...


class HostClock:
    """Times steps that are done when the call returns.

    Args:
        steps: length of the program.
    """

    def __init__(self, steps: int) -> None:
        self._start = [0] * steps
        self._end = [0] * steps

    def begin(self) -> None:
        """Nothing to forget: every step of a run is stamped again."""

    def start(self, place: int) -> None:
        """Step ``place`` starts now."""
        self._start[place] = time.monotonic_ns()

    def end(self, place: int) -> None:
        """Step ``place`` has ended now."""
        self._end[place] = time.monotonic_ns()

    def pass_by(self, place: int) -> None:
        """Step ``place`` starts and ends now."""
        self._start[place] = self._end[place] = time.monotonic_ns()

    def end_at(self, place: int, when_ns: int) -> None:
        """Step ``place`` ended at ``when_ns``, as somebody else has seen."""
        self._end[place] = when_ns

    def stamps(self) -> tuple[list[int], list[int]]:
        """Start and end of every step in nanoseconds."""
        return list(self._start), list(self._end)

    def ended(self, place: int) -> bool:
        """Whether step ``place`` is over, or not begun."""
        return self._end[place] >= self._start[place]


class CudaClock:
    """Times steps on the current stream of a GPU, whichever that is when a step is stamped.

    Args:
        steps: length of the program.
        device: torch's device.
    """

    def __init__(self, steps: int, device: Any) -> None:
        import torch

        cuda: Any = torch.cuda
        self._cuda = cuda
        self._device = device
        self._start = [cuda.Event(enable_timing=True) for _ in range(steps)]
        self._end = [cuda.Event(enable_timing=True) for _ in range(steps)]
        self._anchor = cuda.Event(enable_timing=True)
        self._anchor_ns = 0

    def begin(self) -> None:
        """Tie the GPU's clock to the host's."""
        self._cuda.synchronize(self._device)
        before = time.monotonic_ns()
        self._anchor.record()
        self._anchor.synchronize()
        # The event lies between the two readings, which are microseconds apart on an idle GPU.
        self._anchor_ns = (before + time.monotonic_ns()) // 2

    def start(self, place: int) -> None:
        """Step ``place`` starts when the current stream gets here."""
        self._start[place].record()

    def end(self, place: int) -> None:
        """Step ``place`` has ended when the current stream gets here."""
        self._end[place].record()

    def pass_by(self, place: int) -> None:
        """Step ``place`` starts and ends when the current stream gets here."""
        # One event: each takes the host's and the GPU's time.
        self._start[place] = self._end[place]
        self._end[place].record()

    @property
    def begun(self) -> Any:
        """The event at the beginning of the run."""
        return self._anchor

    def event(self, place: int) -> Any:
        """The event at the end of a step, for other streams to wait for."""
        return self._end[place]

    def stamps(self) -> tuple[list[int], list[int]]:
        """Start and end of every step in nanoseconds; waits for the GPU."""
        self._cuda.synchronize(self._device)
        return self._read(self._start), self._read(self._end)

    def ended(self, place: int) -> bool:
        """Whether step ``place`` is over, or not queued; asks the GPU without waiting for it."""
        return bool(self._end[place].query())

    def _read(self, events: list[Any]) -> list[int]:
        # elapsed_time is in milliseconds with a resolution of about 0.5 us.
        return [self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6) for event in events]
