"""`PeerMemory`: messages between the GPUs of a host by copy engines, without a multiprocessor.

A rank opens the memory that another rank receives into, copies there and writes a word behind it; a
stream of the receiver waits for the word. NCCL's messages are kernels: a receive that is posted
early holds multiprocessors until its message comes, and so takes them from what computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.planner.verify.peer_words import PeerWords

if TYPE_CHECKING:
    import torch

#: What a rank calls this way of its messages.
BY_COPY = "copy engines"


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

        self._memory = PeerWords()
        self._words = torch.zeros(max(1, len(buffers)), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._buffers = dict(buffers)
        self._mine = {tag: self._words[k].data_ptr() for k, tag in enumerate(self._buffers)}
        self._theirs: dict[int, tuple[int, int, int]] = {}
        self._count: dict[int, int] = {}

    def offers(self) -> dict[int, Offer]:
        """What other ranks need to send here."""
        found = {}
        for tag, buffer in self._buffers.items():
            handle, offset = self._memory.handed_out(buffer.data_ptr())
            word = self._memory.handed_out(self._mine[tag])
            found[tag] = Offer(handle, offset, buffer.nbytes, *word)
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
                self._memory.opened(offer.handle) + offer.offset, offer.size,
                self._memory.opened(offer.word_handle) + offer.word_offset,
            )  # fmt: skip

    def send(self, tag: int, tensor: torch.Tensor, stream: Any) -> None:
        """Queue a message on a stream."""
        target, size, word = self._theirs[tag]
        if tensor.nbytes != size:
            raise RuntimeError(f"a message of {tensor.nbytes} bytes into a buffer of {size}")
        self._memory.copy(target, tensor.data_ptr(), size, stream)
        self._memory.write(word, self._turn(tag), stream)

    def receive(self, tag: int, stream: Any) -> None:
        """Let a stream wait for a message."""
        self._memory.wait(self._mine[tag], self._turn(tag), stream)

    def close(self) -> None:
        """Give back what was opened."""
        self._memory.close()
        self._theirs.clear()

    def _turn(self, tag: int) -> int:
        """How often a message has been sent, this time included; both ends count alike."""
        self._count[tag] = self._count.get(tag, 0) + 1
        return self._count[tag]
