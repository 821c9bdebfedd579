"""WorkerProcess: a child process that answers JSON requests, may die or hang, and is replaced.

Free of TVM: the parent of a measurement must survive whatever a generated program does.
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
from types import TracebackType
from typing import Any, Self


class WorkerLost(Exception):
    """The child died or ran out of time; the next request starts another.

    Attributes:
        status: ``fault`` (it died) or ``timeout``.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


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
        self._environment = dict(os.environ if environment is None else environment)
        self._cores = tuple(cores)
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            WorkerLost: the child died, or did not answer in ``timeout_s``; it is gone then.
        """
        if self._child is None or self._child.poll() is not None:
            self._start()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            line = self._line(time.monotonic() + timeout_s)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close()
            raise WorkerLost("timeout", f"no answer in {timeout_s:g} s")
        if not line:
            code = child.wait()
            reason = self._last_words(code)
            self.close()
            raise WorkerLost("fault", reason)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()  # it may be inside a kernel, where nothing gentler is heard
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # an unsent request
                        stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start(self) -> None:
        self.close()
        self._errors, self._unread = tempfile.TemporaryFile(), b""  # noqa: SIM115 - closed by close
        self._child = subprocess.Popen(
            [sys.executable, "-m", "foreplan.datasets.tir._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
        )
        if self._cores:
            os.sched_setaffinity(self._child.pid, self._cores)

    def _line(self, deadline: float) -> bytes | None:
        """Next line; empty where the child closed its end, ``None`` at the deadline."""
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                chunk = os.read(descriptor, 1 << 20)
                if not chunk:
                    return b""
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self, code: int) -> str:
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1][:160] if lines else ''}"
