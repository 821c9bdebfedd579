"""Messages by copy engines; the driver's part needs two GPUs, its protocol none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from foreplan.planner.verify import peer_memory
from foreplan.planner.verify.peer_memory import Offer, PeerMemory


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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(peer_memory.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def pair(driver: Driver) -> tuple[PeerMemory, PeerMemory, list[torch.Tensor]]:
    buffers = [torch.zeros(8), torch.zeros(3)]
    device = torch.device("cpu")
    receiver = PeerMemory(dict(zip((7, 9), buffers, strict=True)), device)
    sender = PeerMemory({}, device)
    told = {tag: Offer(*offer) for tag, offer in receiver.offers().items()}
    sender.open([7, 9], told)
    return sender, receiver, buffers


def test_a_message_comes_with_its_word_and_again_in_the_next_run(driver: Driver) -> None:
    sender, receiver, buffers = pair(driver)
    for run in (1.0, 2.0):
        with pytest.raises(RuntimeError, match="cuStreamWaitValue32"):
            receiver.receive(9, Stream())  # a real stream would wait
        receiver._count[9] -= 1
        sender.send(9, torch.full((3,), run), Stream())
        receiver.receive(9, Stream())
        assert buffers[1].tolist() == [run] * 3
        sender.send(7, torch.arange(8.0) + run, Stream())
        receiver.receive(7, Stream())
        assert buffers[0].tolist() == (torch.arange(8.0) + run).tolist()
    sender.close()


def test_sizes_that_differ_and_refusals_are_said(driver: Driver) -> None:
    sender, _, _ = pair(driver)
    with pytest.raises(RuntimeError, match="a message of 8 bytes into a buffer of 12"):
        sender.send(9, torch.zeros(2), Stream())
    driver.fail = "cuIpcGetMemHandle"
    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle: CUDA error 201"):
        pair(driver)
