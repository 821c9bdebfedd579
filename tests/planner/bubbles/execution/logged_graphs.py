"""`LoggedGraphs`: what a processor can show of recorded passes: a log of operators as a graph.

Like a CUDA graph, a log is replayed on the very memory that was there when it was recorded, and
knows nothing of Python's state. Unlike one, recording computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foreplan.planner.bubbles.execution.recorded import RecordableLanes

Body = Callable[[], None]


class LoggedGraphs:
    """Takes the place of `PassGraphs` on a processor."""

    def __init__(self) -> None:
        self._parts: list[Body] = []
        self.paused = True

    def record(self, body: Body) -> Body:
        self._parts, self.paused = [], False
        with _Log(self):
            body()
        self.paused = True
        parts = tuple(self._parts)

        def replay() -> None:
            with torch.no_grad():
                for part in parts:
                    part()

        return replay

    def pause(self, call: Body) -> None:
        assert not self.paused
        self._parts.append(call)
        self.paused = True

    def resume(self, call: Body) -> None:
        assert self.paused
        self._parts.append(call)
        self.paused = False

    def log(self, call: Body) -> None:
        """An operator ran."""
        assert not self.paused, "an operator behind what was left out"
        self._parts.append(call)


class _Log(TorchDispatchMode):
    def __init__(self, graphs: LoggedGraphs) -> None:
        super().__init__()
        self._graphs = graphs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if any(result.alias_info is not None for result in func._schema.returns):
            outputs = []  # a view, or written in place: already where it belongs

        def again() -> None:
            found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for known, new in zip(outputs, found if outputs else (), strict=True):
                known.detach().copy_(new)

        self._graphs.log(again)
        return made


class LoggedLanes(RecordableLanes):
    """Lanes of processors sum through shared memory on the spot, which no log sees."""

    def sum(self, x: Tensor) -> None:
        if self.graphs is None:
            super().sum(x)
            return
        self.graphs.pause(lambda: super(LoggedLanes, self).sum(x))
        self.graphs.resume(lambda: None)
