"""Messages by copy engines; the driver's part needs two GPUs, its protocol none."""

from __future__ import annotations

import pytest
import torch
from memory_driver import Driver, Stream

from foreplan.planner.verify.peer_memory import Offer, PeerMemory


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
