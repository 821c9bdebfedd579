"""`PeerMemory`: messages between the GPUs of a host by copy engines, without a multiprocessor.

A rank opens the memory that another rank receives into, copies there and writes a word behind it; a
stream of the receiver waits for the word. NCCL's messages are kernels: a receive that is posted
early holds multiprocessors until its message comes, and so takes them from what computes meanwhile.

The driver's functions are called directly, because torch has none of these waits: CUDA driver API,
"Memory Management" (IPC) and "Stream Memory Operations".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: What a rank calls this way of its messages.
BY_COPY = "copy engines"

_LAZY_PEER_ACCESS = 1
_AT_LEAST = 0


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class Offer(NamedTuple):
    """Where a rank receives a message.

    Attributes:
        handle: of the allocation, for other processes, in hexadecimal digits.
        offset: of the buffer in it, bytes.
        size: of the buffer, bytes.
        word_handle, word_offset: likewise of the word behind the message.
    """

    handle: str
    offset: int
    size: int
    word_handle: str
    word_offset: int


class PeerMemory:
    """The messages of one rank; every message has a tag, a buffer and a word of its own.

    Args:
        buffers: by tag what the rank receives into, the same in every run.
        device: the rank's GPU.

    Raises:
        OSError: no driver.
        RuntimeError: the driver refuses.
    """

    def __init__(self, buffers: Mapping[int, torch.Tensor], device: torch.device) -> None:
        import torch

        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._words = torch.zeros(max(1, len(buffers)), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._buffers = dict(buffers)
        self._mine = {tag: self._words[k].data_ptr() for k, tag in enumerate(self._buffers)}
        self._theirs: dict[int, tuple[int, int, int]] = {}
        self._opened: dict[str, int] = {}
        self._count: dict[int, int] = {}

    def offers(self) -> dict[int, Offer]:
        """What other ranks need to send here."""
        word, start = self._export(self._words.data_ptr())
        found = {}
        for tag, buffer in self._buffers.items():
            handle, base = self._export(buffer.data_ptr())
            offset = buffer.data_ptr() - base
            found[tag] = Offer(handle, offset, buffer.nbytes, word, self._mine[tag] - start)
        return found

    def open(self, tags: Sequence[int], offers: Mapping[int, Offer]) -> None:
        """Open where this rank sends to.

        Args:
            tags: of this rank's sends.
            offers: of all ranks.

        Raises:
            RuntimeError: a GPU cannot reach another one's memory.
        """
        for tag in tags:
            offer = offers[tag]
            self._theirs[tag] = (
                self._import(offer.handle) + offer.offset, offer.size,
                self._import(offer.word_handle) + offer.word_offset,
            )  # fmt: skip

    def send(self, tag: int, tensor: torch.Tensor, stream: Any) -> None:
        """Queue a message on a stream."""
        target, size, word = self._theirs[tag]
        if tensor.nbytes != size:
            raise RuntimeError(f"a message of {tensor.nbytes} bytes into a buffer of {size}")
        self._call("cuMemcpyDtoDAsync_v2", _address(target), _address(tensor.data_ptr()),
                   ctypes.c_size_t(size), _stream(stream))  # fmt: skip
        # Without a flag the word is written behind everything before it on the stream.
        self._call("cuStreamWriteValue32_v2", _stream(stream), _address(word),
                   ctypes.c_uint32(self._turn(tag)), ctypes.c_uint(0))  # fmt: skip

    def receive(self, tag: int, stream: Any) -> None:
        """Let a stream wait for a message."""
        self._call("cuStreamWaitValue32_v2", _stream(stream), _address(self._mine[tag]),
                   ctypes.c_uint32(self._turn(tag)), ctypes.c_uint(_AT_LEAST))  # fmt: skip

    def close(self) -> None:
        """Give back what was opened."""
        for address in self._opened.values():
            self._call("cuIpcCloseMemHandle", _address(address))
        self._opened.clear()
        self._theirs.clear()

    def __del__(self) -> None:
        # Memory that another process has open is not freed when its owner frees it.
        with contextlib.suppress(RuntimeError, AttributeError):
            self.close()

    def _turn(self, tag: int) -> int:
        """How often a message has been sent, this time included; both ends count alike."""
        self._count[tag] = self._count.get(tag, 0) + 1
        return self._count[tag]

    def _export(self, address: int) -> tuple[str, int]:
        """Handle and start of the allocation around an address."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size),
                   _address(address))  # fmt: skip
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), start)
        return bytes(handle).hex(), start.value

    def _import(self, handle: str) -> int:
        if handle not in self._opened:
            found, opened = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(found), opened,
                       ctypes.c_uint(_LAZY_PEER_ACCESS))  # fmt: skip
            self._opened[handle] = found.value
        return self._opened[handle]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


def _address(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _stream(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
