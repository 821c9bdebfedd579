"""ChildProcess: a Python module in a process of its own that answers JSON lines and may die.

What is measured can crash or hang a process, so whatever runs it is a child: requests go to its
stdin, one line each, answers come on the stdout it was started with. Free of torch and TVM.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from foreplan import errors


class ChildEnded(Exception):
    """The child gave no answer and is gone; the text says why.

    Attributes:
        status: ``fault`` (it died) or ``timeout``.
    """

    def __init__(self, status: Literal["fault", "timeout"], reason: str) -> None:
        super().__init__(reason)
        self.status: Literal["fault", "timeout"] = status


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of ours with this Python."""
    return [sys.executable, "-m", module, *arguments]


def module_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment in which a child finds this very package; ``base`` is the caller's by default."""
    found = dict(os.environ if base is None else base)
    package = Path(errors.__file__).resolve().parent.parent
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), found.get("PYTHONPATH")]))
    return found


class ChildProcess:
    """A running child.

    Not safe to share between threads: each thread has its own.

    Args:
        module: what it runs.
        arguments: command line after the module.
        environment: of the child; the caller's by default.
        cores: it is held to these; empty for all.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        self._unread = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            module_command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=module_environment(environment),
        )
        if cores:
            with contextlib.suppress(ProcessLookupError):  # `receive` tells that it ended
                os.sched_setaffinity(self._process.pid, cores)

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, request: Mapping[str, Any]) -> None:
        """Write one request; that the child is gone shows in `receive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Read one answer.

        Raises:
            ChildEnded: there was none in time, or the child died; it is ended then.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.end()
                    raise ChildEnded("timeout", f"no answer within {timeout_s:g} s")
                chunk = os.read(descriptor, 1 << 20)
                if not chunk:
                    reason = self._last_words()
                    self.end()
                    raise ChildEnded("fault", reason)
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill it and wait for that; safe to call twice."""
        self._process.kill()  # it may be inside a kernel, where nothing gentler is heard
        with contextlib.suppress(OSError):  # what was not yet sent may not go anywhere
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read()[-4000:].decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:160]}" if lines else ""
        if code >= 0:
            return f"ended with code {code}{said}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}{said}"
        return f"killed by signal {-code}{said}"
