"""RpcSite: programs are built here and timed on boards that registered with TVM's RPC tracker.

A child process of this machine holds each session, so that a board that hangs or a program that
crashes it costs that child. Only the runtime is needed on the board:

    python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190                      # anywhere
    python -m tvm.exec.rpc_server --tracker HOST:9190 --key KEY --port 9090        # on each board

RPC does not tell the name of a processor: it is given as ``chip``. A GPU tells its own.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

from foreplan.datasets.timing.child_process import ChildEnded
from foreplan.datasets.tir.site import builder_process, program_environment
from foreplan.datasets.tir.target import TargetDevice, target_device
from foreplan.datasets.tir.worker_process import WorkerProcess
from foreplan.errors import MissingDataError, SpecError

#: Time to connect, and to get a board that is free.
_CONNECT_S = 180.0
_BOARD = re.compile(r"(?P<host>[^/:]+):(?P<port>[0-9]+)/(?P<key>.+)")


class Tracker(NamedTuple):
    """Boards of one kind.

    Attributes:
        host: of the tracker.
        port: of the tracker.
        key: what the boards registered as.
    """

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, text: str) -> Tracker:
        """Read ``HOST:PORT/KEY``.

        Raises:
            SpecError: another form.
        """
        match = _BOARD.fullmatch(text.strip())
        if match is None:
            raise SpecError("--rpc", got=text, expected="HOST:PORT/KEY of a tracker")
        return cls(match["host"], int(match["port"]), match["key"])


class RpcSite:
    """The boards of one key. Use as a context manager.

    Args:
        tracker: where they registered.
        name: device name of the records, as ``cpu:threads=1`` or ``cuda:0``.
        chip: the boards' silicon; needed unless they are GPUs.
        target: TVM's target as JSON text; by default what the board says of its processor, which
            needs a runtime with LLVM there.
        builders: processes of this machine that build.

    Raises:
        SpecError: on entering: a target that is wrong or missing, or no chip.
        MissingDataError: on entering: no tracker, or no such board.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        *,
        chip: str | None = None,
        target: str | None = None,
        builders: int = 1,
    ) -> None:
        self._tracker, self._name, self._chip, self._target = tracker, name, chip, target
        self.builders = max(1, builders)
        self.devices: tuple[TargetDevice, ...] = ()

    def __enter__(self) -> Self:
        try:  # TVM itself tries for a minute, and takes seconds to load
            socket.create_connection(self._tracker[:2], timeout=10.0).close()
            with WorkerProcess(program_environment()) as worker:
                found = worker.ask({"do": "board", "board": self._tracker}, _CONNECT_S)
        except (OSError, ChildEnded) as error:
            found = {"error": str(error)}
        if "error" in found:
            raise MissingDataError(
                f"no board {self._tracker.key} at {self._tracker.host}:{self._tracker.port}: "
                f"{found['error']}",
                fix="python -m tvm.exec.rpc_tracker, and rpc_server --tracker ... --key on a board",
            )
        self.devices = (self._described(found),) * int(found["boards"])
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def builder(self, number: int) -> WorkerProcess:
        """A process of this machine."""
        return builder_process("cuda")  # nothing is timed here, so every core may build

    def timer(self, number: int) -> BoardWorker:
        """A process that times on one board of the key."""
        return BoardWorker(self._tracker)

    def _described(self, found: Mapping[str, Any]) -> TargetDevice:
        chip = self._chip or found["gpu"]
        if chip is None:
            raise SpecError("--chip", got=None, expected="the board's silicon: RPC is not told it")
        if self._target is None and self._name.startswith("cuda"):
            return target_device(self._name, chip=chip, arch=found["arch"])
        named = target_device(self._name, chip=chip, arch="sm_70")
        if self._target is None:
            triple, mcpu = found["mtriple"], found["mcpu"]
            if mcpu is None:
                raise SpecError(
                    "--target", got=None, expected="TVM's target: no LLVM on the board to ask"
                )
            chosen = {} if "isa=" in self._name else {"mcpu": mcpu}
            return replace(named, options={**named.options, **chosen, "mtriple": triple})
        example = '{"kind": "llvm", "mcpu": "cortex-a72"}'
        try:
            options = dict(json.loads(self._target))
        except (ValueError, TypeError):
            options = {}
        if options.get("kind") not in ("llvm", "cuda"):
            raise SpecError("--target", got=self._target, expected=f"JSON such as {example}")
        return replace(named, kind=options["kind"], options=options)


class BoardWorker(WorkerProcess):
    """A timing process whose device is a board."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(program_environment())
        self._board = tracker

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            ChildEnded: the child died, or the board did not answer in time.
        """
        return super().ask({**request, "board": self._board}, timeout_s)
