"""`Wire`: messages between the leader of a verification and its processes: JSON lines over TCP.

One kind of connection serves ranks on this host, on another and under torchrun, and it closes when
a process dies, however it dies. Messages are plain data, never code.
"""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

from foreplan.errors import SpecError, VerificationError

Message = dict[str, Any]

#: A longer line is an error of whoever sends it (records of 10 million actions fit).
_MAX_LINE = 1 << 28
#: Longest line of somebody who has not yet said the plan's word.
_MAX_GREETING = 1 << 16


class WireClosed(VerificationError):
    """The other end has gone."""


class WireSilent(WireClosed):
    """The other end is there but said nothing in time."""


class WireGarbled(WireClosed):
    """The other end says what no foreplan process of this version says."""


class Wire:
    """One end of a connection.

    Args:
        connection: a connected stream socket; this object closes it.
        known: whether the other end may send long messages; see `trust`.
    """

    def __init__(self, connection: socket.socket, *, known: bool = True) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._seen = 0  # bytes of the buffer that hold no end of a line
        self._longest = _MAX_LINE if known else _MAX_GREETING

    def trust(self) -> None:
        """The other end has said the plan's word: its messages may be long from here on."""
        self._longest = _MAX_LINE

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """Address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """Address of the other end."""
        return str(self._socket.getpeername()[0])

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            WireClosed: the other end has gone.
        """
        data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise WireClosed(f"the connection was lost ({error.strerror or error})") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for one message.

        Raises:
            WireClosed: the other end has gone, or sends no messages.
            WireSilent: it said nothing for ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = self._lines(1)
            if ready:
                return ready[0]
            left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
            self._socket.settimeout(left)
            try:
                self._read()
            except TimeoutError as error:
                raise WireSilent(f"nothing was heard for {timeout_s:.0f} s") from error
            finally:
                self._socket.settimeout(None)

    def pump(self) -> list[Message]:
        """Read once, when the socket is readable; the messages that are complete by then.

        Raises:
            WireClosed: the other end has gone.
        """
        self._read()
        return self._lines()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            raise
        except OSError as error:
            raise WireClosed(f"the connection was lost ({error.strerror or error})") from error
        if not data:
            raise WireClosed("the connection was closed")
        self._buffer += data
        if len(self._buffer) > self._longest and b"\n" not in data:
            raise WireGarbled("a message is too long")

    def _lines(self, most: int | None = None) -> list[Message]:
        found: list[Message] = []
        while most is None or len(found) < most:
            end = self._buffer.find(b"\n", self._seen)
            if end < 0:
                self._seen = len(self._buffer)
                break
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._seen = 0
            if len(line) > self._longest:
                raise WireGarbled("a message is too long")
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise WireGarbled("something else than a foreplan process speaks") from error
            if not isinstance(message, dict):
                raise WireGarbled("something else than a foreplan process speaks")
            found.append(message)
        return found


def dial(endpoint: tuple[str, int], timeout_s: float) -> Wire:
    """Connect to a leader, which may not listen yet.

    Raises:
        VerificationError: nobody listened for ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(endpoint, timeout=max(timeout_s, 1.0))
            connection.settimeout(None)
            return Wire(connection)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise VerificationError(
                    f"nobody listens at {endpoint[0]}:{endpoint[1]} ({error.strerror or error})",
                    fix="start 'foreplan verify' with the same plan on the host of rank 0",
                ) from error
            time.sleep(0.1)


def parse_endpoint(text: str, where: str = "--rdzv-endpoint") -> tuple[str, int]:
    """``HOST:PORT`` as a pair.

    Raises:
        SpecError: no such form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise SpecError(where, got=text, expected="HOST:PORT, as node0:29500")
    return host.strip("[]"), int(port)
