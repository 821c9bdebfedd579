"""`RecordedActions`: passes and units of a rank as CUDA graphs, each queued in one call.

Kernel by kernel a half layer keeps the host busy for 0.1 to 0.5 ms, where a GPU may need less, and
a step then takes what its hosts take. Nothing that a rank computes depends on values, so each
action of its list is recorded once, in the order of the list, and replayed in every step. All
graphs share one pool of memory, in which a backward pass finds what the forward pass left.

A sum of lanes that something is computed beside cannot lie in a graph: the next piece waits for it,
which is another graph. `RecordableLanes` leave it out, and it is started and waited for between.
Sums on the spot are recorded on the stream that computes, so that a graph is one chain of kernels:
a branch of its own would go to some queue of the GPU, behind a receive that waits there perhaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from foreplan.cost_models.schedule import Action
from foreplan.planner.bubbles.execution.handover import Key
from foreplan.planner.bubbles.execution.lanes import Lanes

Body = Callable[[], None]


class Graphs(Protocol):
    """What records; see `foreplan.planner.verify.pass_graphs.PassGraphs`."""

    def record(self, body: Body) -> Body:
        """What does all that ``body`` would do; nothing runs yet."""
        ...

    def pause(self, call: Body) -> None:
        """Leave ``call`` out, and what comes behind it."""
        ...

    def resume(self, call: Body) -> None:
        """Leave ``call`` out, and record on."""
        ...

    @property
    def paused(self) -> bool:
        """Whether nothing is recorded now."""
        ...


class _Sum:
    """A sum that every replay starts and waits for anew."""

    def __init__(self, lanes: Lanes, x: Tensor) -> None:
        self._lanes, self._x = lanes, x
        self._work: Any = None

    def start(self) -> None:
        self._work = self._lanes.start_sum(self._x)

    def wait(self) -> None:
        """Wait for it, once."""
        work, self._work = self._work, None
        if work is not None:
            self._lanes.wait(work)


class RecordableLanes(Lanes):
    """Lanes whose sums beside computation are left out of what is recorded."""

    graphs: Graphs | None = None
    #: The last sum that was started while recording and is waited for by another action.
    left: _Sum | None = None

    def start_sum(self, x: Tensor) -> Any:
        """As `Lanes.start_sum`; while recording nothing starts yet."""
        if self.graphs is None or self.size == 1:
            return super().start_sum(x)
        self.left = _Sum(self, x)
        self.graphs.pause(self.left.start)
        return self.left

    def wait(self, work: Any) -> None:
        """As `Lanes.wait`."""
        if not isinstance(work, _Sum):
            super().wait(work)
        elif self.graphs is None:
            work.wait()
        elif work is self.left:  # of the same action; another's is waited for before its replay
            self.left = None
            self.graphs.resume(work.wait)


class Left(NamedTuple):
    """What an action leaves besides memory.

    Attributes:
        handed: on its way to other ranks, see `Handover`.
        losses: by micro-batch.
    """

    handed: Mapping[Key, Tensor]
    losses: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class _Entry:
    replay: Body
    left: Left
    sum: _Sum | None


class RecordedActions:
    """See the module.

    Args:
        graphs: records and holds the memory.
        lanes: of the rank.
    """

    def __init__(self, graphs: Graphs, lanes: RecordableLanes) -> None:
        self._graphs, self._lanes = graphs, lanes
        self._entries: dict[tuple[str, int, int, int], _Entry] = {}
        self._open: dict[tuple[int, int], _Sum] = {}

    def record(self, action: Action, compute: Body, left: Callable[[], Left]) -> None:
        """Record an action; all of a rank's in the order of its list.

        Args:
            action: which.
            compute: carries it out.
            left: says afterwards what it has left.

        Raises:
            RuntimeError: it does what cannot be recorded.
        """
        self._lanes.graphs, self._lanes.left = self._graphs, None
        try:
            replay = self._graphs.record(compute)
        finally:
            self._lanes.graphs = None
        self._entries[_key(action)] = _Entry(replay, left(), self._lanes.left)

    def replay(self, action: Action) -> Left | None:
        """Carry an action out.

        Returns:
            What it leaves; ``None`` if it is none of those that were recorded.
        """
        self.wait(action)
        entry = self._entries.get(_key(action))
        if entry is None:
            return None
        entry.replay()
        if entry.sum is not None:
            self._open[action.stage, action.microbatch] = entry.sum
        return entry.left

    def wait(self, action: Action) -> None:
        """Wait for the sum that the last piece of the action's pass started, if there is one."""
        pending = self._open.pop((action.stage, action.microbatch), None)
        if pending is not None:
            pending.wait()

    def forget(self) -> None:
        """Wait for whatever is on its way."""
        for pending in self._open.values():
            pending.wait()
        self._open.clear()


def _key(action: Action) -> tuple[str, int, int, int]:
    return action.op, action.stage, action.microbatch, action.step
