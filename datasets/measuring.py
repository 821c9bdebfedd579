"""Worker: a process that is one device and times programs on it.

Instruction set, threads, cores and memory are set before torch loads, so every device has a
process of its own. Programs go in as JSON lines, one result line comes back for each; a program
that crashes the process or takes too long is a recorded failure, and the next one gets a new
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from foreplan import errors
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.measurement import Measurement
from foreplan.datasets.program import Program
from foreplan.datasets.worker_environment import default_cores, worker_environment
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
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._buffer = b""
        self._identity: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the process says of itself: ``chip``, ``memory_bytes``, ``software`` and so on."""
        return self._identity

    def measure(self, program: Program, effort: Effort | None = None) -> Measurement:
        """Time one program; a failure is a `Measurement` with ``error``."""
        effort = effort or Effort()
        self.send_program(program, effort)
        return self.receive_measurement(effort)

    def send_program(self, program: Program, effort: Effort) -> None:
        """Begin to time a program; `receive_measurement` must follow."""
        request = {
            "op": program.op,
            "dims": program.dims,
            "variant": str(program.variant),
            "effort": asdict(effort),
        }
        self._send(request)

    def receive_measurement(self, effort: Effort) -> Measurement:
        """Wait for the measurement that `send_program` began."""
        try:
            answer = self._receive(effort.timeout_s)
        except _WorkerEnded as ended:
            self._end()
            return Measurement.failed(str(ended))
        if answer.pop("fatal", False):
            self._end()
        return Measurement(**{**answer, "times_s": tuple(answer["times_s"])})

    def figures(self, timeout_s: float = 120.0) -> dict[str, float]:
        """Measure the device itself: bandwidth, peak rates, launch overhead, in SI units.

        Raises:
            MissingDataError: the process ended over it.
        """
        self._send({"figures": True})
        try:
            return {name: float(value) for name, value in self._receive(timeout_s).items()}
        except _WorkerEnded as ended:
            self._end()
            raise MissingDataError(f"{self.device}: no figures of the device: {ended}") from ended

    def close(self) -> None:
        """End the process and wait for it; safe to call twice."""
        self._end()

    # ------------------------------------------------------------------------------ process

    def _start(self) -> None:
        package = Path(errors.__file__).resolve().parent.parent
        path = os.pathsep.join([str(package), self.environment.get("PYTHONPATH", "")])
        settings = {
            "device": str(self.device),
            "cores": list(self.cores),
            "memory_bytes": self.memory_bytes,
            "parent": os.getpid(),
        }
        # The process outlives this block; `_end` closes both.
        log = self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "foreplan.datasets._measuring_worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**self.environment, "PYTHONPATH": path},
        )
        self._buffer = b""
        try:
            identity = self._receive(180.0)
        except _WorkerEnded as ended:
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
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what was not yet sent may not go anywhere
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        if self._log is not None:
            self._log.close()
            self._log = None

    def _send(self, request: Mapping[str, object]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer tells that it ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """Read one line.

        Raises:
            _WorkerEnded: it took too long, or the process ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise _WorkerEnded(f"no result within {timeout_s:g} s")
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise _WorkerEnded(self._obituary())
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _obituary(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        said = ""
        if self._log is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
        return (f"killed by signal {-code}" if code < 0 else f"ended with code {code}") + said


class _WorkerEnded(Exception):
    """The process gave no answer; the text says why."""
