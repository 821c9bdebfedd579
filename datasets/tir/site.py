"""Where programs are built and timed: this machine, a Ray cluster, or boards of an RPC tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from foreplan.datasets.tir.target import TargetDevice
from foreplan.datasets.tir.worker_process import WorkerProcess


class ProgramWorker(Protocol):
    """Something that answers the requests of `_worker`, may be lost, and is then replaced."""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            ChildEnded: the program that was built or timed ended the worker, or took too long.
        """
        ...

    def close(self) -> None:
        """End the worker; the next request starts another."""
        ...


class Site(Protocol):
    """Workers of one measurement. Each is used by one thread.

    Attributes:
        devices: what programs are timed on; all take the same code.
        builders: workers that build.
    """

    @property
    def devices(self) -> Sequence[TargetDevice]: ...  # noqa: D102 - see the class
    @property
    def builders(self) -> int: ...  # noqa: D102
    def builder(self, number: int) -> ProgramWorker:
        """A worker that builds."""
        ...

    def timer(self, number: int) -> ProgramWorker:
        """A worker that times, on the device of that number."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *raised: object) -> None: ...


class LocalSite:
    """Processes of this machine.

    Args:
        devices: one CPU, or the GPUs of this host.
        builders: processes that build.
        timer_core: core of the timing process (CPU only); the last one by default.
    """

    def __init__(
        self, devices: Sequence[TargetDevice], builders: int = 1, timer_core: int | None = None
    ) -> None:
        self.devices = tuple(devices)
        self.builders = max(1, builders)
        self._timer_core = timer_core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def builder(self, number: int) -> WorkerProcess:
        """A process on every core but the one that programs are timed on."""
        return builder_process(self.devices[0].kind, self._timer_core)

    def timer(self, number: int) -> WorkerProcess:
        """A process that is the device."""
        device = self.devices[number]
        environment = program_environment()
        if device.kind == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = str(device.index)
        return timer_process(device.kind, self._timer_core, environment)


def builder_process(kind: str, timer_core: int | None = None) -> WorkerProcess:
    """A building process of this machine for devices of a kind (``llvm`` or ``cuda``)."""
    mine = os.sched_getaffinity(0)
    apart = kind == "llvm" and len(mine) > 1
    cores = mine - {_timer_core(timer_core)} if apart else mine
    return WorkerProcess(program_environment(), tuple(cores))


def timer_process(
    kind: str, timer_core: int | None = None, environment: Mapping[str, str] | None = None
) -> WorkerProcess:
    """A timing process of this machine; on a CPU it is held to one core."""
    cores = () if kind == "cuda" else (_timer_core(timer_core),)
    return WorkerProcess(program_environment() if environment is None else environment, cores)


def program_environment() -> dict[str, str]:
    """The caller's environment with one thread everywhere."""
    return {**os.environ, "TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _timer_core(wanted: int | None) -> int:
    return max(os.sched_getaffinity(0)) if wanted is None else wanted
