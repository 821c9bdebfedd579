"""Worker: a process that is one device and times programs on it.

Instruction set, threads, cores and memory are set before torch loads, so every device has a
process of its own. Programs go in as JSON lines, one result line comes back for each; a program
that crashes the process or takes too long is a recorded failure, and the next one gets a new
process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program
from foreplan.datasets.timing.child_process import ChildEnded, ChildProcess
from foreplan.datasets.timing.measurement import Measurement
from foreplan.datasets.timing.worker_environment import default_cores, worker_environment
from foreplan.errors import MissingDataError


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to time one program.

    Attributes:
        min_s: measure at least this long after warm-up, in seconds ...
        min_samples: ... and at least this many samples, unless ``max_s`` is over.
        max_s: stop after this long; a program slower than that is called twice, and the second
            call counts.
        timeout_s: kill a program (inputs included) that has not answered by then.
        max_samples: stop after this many, however short they are.
    """

    min_s: float = 0.05
    min_samples: int = 7
    max_s: float = 0.3
    timeout_s: float = 60.0
    max_samples: int = 400


class Worker:
    """One measuring process. Use as a context manager; leaving it ends the process.

    Args:
        device: what the process is to be.
        cores: cores it is held to; the first of this process's own by default.
        memory_bytes: cap on its memory, ``None`` for none.

    Raises:
        SpecError: a zoo device, or more threads than there are cores.
        MissingDataError: on entering or measuring, if the process cannot start (no such GPU, torch
            missing).
    """

    def __init__(
        self,
        device: DeviceName,
        *,
        cores: Sequence[int] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.environment = worker_environment(device)
        self.cores = tuple(cores) if cores is not None else default_cores(device)
        self.memory_bytes = memory_bytes
        self._child: ChildProcess | None = None
        self._identity: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the process says of itself: ``chip``, ``memory_bytes``, ``software`` and so on."""
        return self._identity

    def measure(
        self, program: Program, effort: Effort | None = None, *, keep: bool = False
    ) -> Measurement:
        """Time one program; a failure is a `Measurement` with ``error``.

        Args:
            program: what to time.
            effort: how long.
            keep: hold its inputs until the process ends, so that it can be timed again at once.
        """
        effort = effort or Effort()
        self.send_program(program, effort, keep=keep)
        return self.receive_measurement(effort)

    def send_program(self, program: Program, effort: Effort, *, keep: bool = False) -> None:
        """Begin to time a program; `receive_measurement` must follow."""
        request = {
            "op": program.op,
            "dims": program.dims,
            "variant": str(program.variant),
            "effort": asdict(effort),
            "keep": keep,
        }
        self._send(request)

    def receive_measurement(self, effort: Effort) -> Measurement:
        """Wait for the measurement that `send_program` began."""
        try:
            answer = self._receive(effort.timeout_s)
        except ChildEnded as ended:
            self._end()
            return Measurement.failed(str(ended))
        if answer.pop("fatal", False):
            self._end()
        return Measurement(**{**answer, "times_s": tuple(answer["times_s"])})

    def measure_pass(
        self, calls: Sequence[tuple[Program, int]], effort: Effort, *, keep: bool = False
    ) -> list[Measurement]:
        """Time programs as a pass runs them, one behind the other; see `send_pass`."""
        self.send_pass(calls, effort, keep=keep)
        return self.receive_pass(len(calls), effort)

    def send_pass(
        self, calls: Sequence[tuple[Program, int]], effort: Effort, *, keep: bool = False,
        recorded: bool = False,
    ) -> None:  # fmt: skip
        """Begin to time programs as a pass runs them; `receive_pass` must follow.

        All are called in turn, again and again, each on operands that the pass before has left
        where it left them: of a training step's programs as many sets as there are calls. A GPU
        keeps next to nothing from pass to pass; there each is timed by itself.

        Args:
            calls: programs, each with its number of calls in a pass.
            effort: how long; samples are counted in passes.
            keep: hold the inputs until the process ends.
            recorded: on a GPU, as a pass that is one CUDA graph.
        """
        self._send(
            {
                "pass": [
                    {"op": p.op, "dims": p.dims, "variant": str(p.variant), "calls": count}
                    for p, count in calls
                ],
                "effort": asdict(effort),
                "keep": keep,
                "recorded": recorded,
            }
        )

    def receive_pass(self, count: int, effort: Effort) -> list[Measurement]:
        """Wait for what `send_pass` began: one measurement a program, in seconds a call."""
        try:
            answer = self._receive(effort.timeout_s)
        except ChildEnded as ended:
            self._end()
            return [Measurement.failed(str(ended))] * count
        if answer.pop("fatal", False):
            self._end()
        return [Measurement(**{**one, "times_s": tuple(one["times_s"])}) for one in answer["pass"]]

    def figures(self, timeout_s: float = 120.0) -> dict[str, float]:
        """Measure the device itself: bandwidth, peak rates, launch overhead, in SI units.

        Raises:
            MissingDataError: the process ended over it.
        """
        self._send({"figures": True})
        try:
            return {name: float(value) for name, value in self._receive(timeout_s).items()}
        except ChildEnded as ended:
            self._end()
            raise MissingDataError(f"{self.device}: no figures of the device: {ended}") from ended

    def close(self) -> None:
        """End the process and wait for it; safe to call twice."""
        self._end()

    def _start(self) -> None:
        settings = {
            "device": str(self.device),
            "cores": list(self.cores),
            "memory_bytes": self.memory_bytes,
            "parent": os.getpid(),
        }
        self._child = ChildProcess(
            "foreplan.datasets.timing._measuring_worker",
            [json.dumps(settings)],
            environment=self.environment,
        )
        try:
            identity = self._child.receive(180.0)
        except ChildEnded as ended:
            self._end()
            raise MissingDataError(f"{self.device}: cannot measure: {ended}") from ended
        except BaseException:
            self._end()
            raise
        if "error" in identity:
            self._end()
            raise MissingDataError(f"{self.device}: cannot measure: {identity['error']}")
        self._identity = identity

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _send(self, request: Mapping[str, object]) -> None:
        if self._child is None:
            self._start()
        assert self._child is not None
        self._child.send(request)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._child is not None
        return self._child.receive(timeout_s)
