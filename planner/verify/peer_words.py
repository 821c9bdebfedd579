"""`PeerWords`: the driver's calls by which streams of two GPUs wait for each other.

A word is four bytes in a GPU's memory that another process of the host opens: its stream writes
there behind what it holds, and a stream of the owner waits for that. torch has none of these calls:
CUDA driver API, "Memory Management" (IPC) and "Stream Memory Operations".
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

_LAZY_PEER_ACCESS = 1
_AT_LEAST = 0


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class PeerWords:
    """The memory of other processes that this one has opened, and waits between streams.

    Raises:
        OSError: no driver.
    """

    def __init__(self) -> None:
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._opened: dict[str, int] = {}

    def handed_out(self, address: int) -> tuple[str, int]:
        """By what other processes open the memory at an address.

        Returns:
            The handle of its allocation in hexadecimal digits, and how many bytes into it.

        Raises:
            RuntimeError: the driver refuses.
        """
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size),
                   _address(address))  # fmt: skip
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), start)
        return bytes(handle).hex(), address - start.value

    def opened(self, handle: str) -> int:
        """Where another process's allocation lies in this one.

        Raises:
            RuntimeError: this GPU cannot reach that one's memory.
        """
        if handle not in self._opened:
            found, told = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(found), told,
                       ctypes.c_uint(_LAZY_PEER_ACCESS))  # fmt: skip
            self._opened[handle] = found.value
        return self._opened[handle]

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Queue a copy of ``size`` bytes between two addresses."""
        self._call("cuMemcpyDtoDAsync_v2", _address(target), _address(source),
                   ctypes.c_size_t(size), _stream(stream))  # fmt: skip

    def write(self, word: int, value: int, stream: Any) -> None:
        """Queue the writing of a word; without a flag it comes behind all before it there."""
        self._call("cuStreamWriteValue32_v2", _stream(stream), _address(word),
                   ctypes.c_uint32(value), ctypes.c_uint(0))  # fmt: skip

    def wait(self, word: int, value: int, stream: Any) -> None:
        """Let a stream wait until a word has reached a value."""
        self._call("cuStreamWaitValue32_v2", _stream(stream), _address(word),
                   ctypes.c_uint32(value), ctypes.c_uint(_AT_LEAST))  # fmt: skip

    def close(self) -> None:
        """Give back what was opened."""
        for address in self._opened.values():
            self._call("cuIpcCloseMemHandle", _address(address))
        self._opened.clear()

    def __del__(self) -> None:
        # Memory that another process has open is not freed when its owner frees it.
        with contextlib.suppress(RuntimeError, AttributeError):
            self.close()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


def _address(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _stream(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
