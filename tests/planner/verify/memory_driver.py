"""The CUDA driver's calls of `PeerWords` over one process's own memory."""

from __future__ import annotations

import ctypes
from typing import Any


class Driver:
    """The driver's functions over this process's own memory."""

    def __init__(self) -> None:
        self.fail = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fail:
                return 201
            return int(getattr(self, f"_{name.removesuffix('_v2')}")(*arguments) or 0)

        return call

    def _cuMemGetAddressRange(self, start: Any, size: Any, address: Any) -> None:
        start._obj.value = address.value - 16  # inside a larger allocation

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        text = str(address.value).encode().ljust(64, b"\1")
        ctypes.memmove(ctypes.addressof(handle._obj), text, 64)

    def _cuIpcOpenMemHandle(self, found: Any, handle: Any, flags: Any) -> None:
        found._obj.value = int(bytes(handle).rstrip(b"\1"))

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        pass

    def _cuMemcpyDtoDAsync(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        ctypes.memmove(target.value, source.value, size.value)

    def _cuStreamWriteValue32(self, stream: Any, address: Any, value: Any, flags: Any) -> None:
        ctypes.c_uint32.from_address(address.value).value = value.value

    def _cuStreamWaitValue32(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        return 0 if ctypes.c_uint32.from_address(address.value).value >= value.value else 600


class Stream:
    cuda_stream = 0
