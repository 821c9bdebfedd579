"""WorkerProcess: the child of `_worker`, which may die or hang, and is replaced.

Free of TVM: the parent of a measurement must survive whatever a generated program does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from foreplan.datasets.timing.child_process import ChildEnded, ChildProcess

__all__ = ["ChildEnded", "WorkerProcess"]


class WorkerProcess:
    """One child at a time, started when first asked.

    Not safe to share between threads: each thread has its own.

    Args:
        environment: of the child; None for the caller's.
        cores: the child is held to these; empty for all.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, cores: Sequence[int] = ()
    ) -> None:
        self._environment = environment
        self._cores = tuple(cores)
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            ChildEnded: the child died, or did not answer in ``timeout_s``; it is gone then.
        """
        if self._child is None or not self._child.running:
            self.close()
            self._child = ChildProcess(
                "foreplan.datasets.tir._worker", environment=self._environment, cores=self._cores
            )
        self._child.send(request)
        return self._child.receive(timeout_s)

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()
