"""`LocalProcesses`: the worker processes of this host, and their certain end.

Each worker is an ordinary subprocess with the environment of its device, in a process group of its
own. The group is killed when the block ends, however it ends; if this process itself is killed, the
kernel kills the workers (``PR_SET_PDEATHSIG``, see `worker`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Self

import foreplan
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.timing.worker_environment import worker_environment

#: Variable that carries the word by which processes of one verification know each other; not an
#: argument, because every user of a host can read those.
TOKEN_VARIABLE = "FOREPLAN_VERIFY_TOKEN"
WORKER_MODULE = "foreplan.planner.verify.worker"


class LocalProcesses:
    """Starts workers and ends them; use as a context manager.

    Args:
        endpoint: where the leader listens.
        token: word that workers greet the leader with.
        folder: that the plan's relative paths start from on this host.
    """

    def __init__(self, endpoint: tuple[str, int], token: str, folder: str | Path = "") -> None:
        self._endpoint = endpoint
        self._token = token
        self._folder = str(folder)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._output: dict[int, IO[bytes]] = {}

    def start(self, ranks: Iterable[Rank]) -> None:
        """Start one worker a rank of the cluster."""
        host, port = self._endpoint
        for rank in ranks:
            command = [sys.executable, "-P", "-m", WORKER_MODULE]
            command += ["--leader", f"{host}:{port}", "--member", str(rank.index)]
            command += ["--folder", self._folder]
            self._output[rank.index] = output = tempfile.TemporaryFile()  # noqa: SIM115
            self._processes[rank.index] = subprocess.Popen(
                command, env=rank_environment(rank, self._token), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def dead(self) -> dict[int, str]:
        """Workers that have ended without being told to, and how."""
        codes = {index: process.poll() for index, process in self._processes.items()}
        return {index: describe_exit(code) for index, code in codes.items() if code}

    def tail(self, index: int) -> str:
        """The last line that a worker printed, to tell why it died; "" where it said nothing."""
        output = self._output.get(index)
        if output is None:
            return ""
        size = output.seek(0, os.SEEK_END)
        output.seek(max(size - 4096, 0))
        lines = output.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:300] if said else ""

    def close(self) -> None:
        """End every worker and whatever it started."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        for output in self._output.values():
            output.close()
        self._processes.clear()
        self._output.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def rank_environment(rank: Rank, token: str, base: dict[str, str] | None = None) -> dict[str, str]:
    """The environment in which a worker becomes the device of a rank."""
    environment = worker_environment(rank.name, base=base)
    # A pool that numpy's BLAS starts at import would make forking unsafe.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    environment[TOKEN_VARIABLE] = token
    home = str(Path(next(iter(foreplan.__path__))).parent)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if home in [str(Path(p).resolve()) for p in sys.path if p] and "site-packages" not in home:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([home, *filter(None, paths)]))
    return environment


def describe_exit(code: int) -> str:
    """How a process ended, from ``Popen.returncode``."""
    if code >= 0:
        return f"it exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    why = {"SIGKILL": " (killed, perhaps because the host ran out of memory)",
           "SIGABRT": " (aborted, perhaps because its memory cap was reached)"}  # fmt: skip
    return f"it was ended by {name}{why.get(name, '')}"
