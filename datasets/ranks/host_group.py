"""`HostGroup`: sums and gathers among the processors of one host, through memory that they share.

gloo hands a collective to threads of its own, which then fight with the rank for its one core: of
sums of 12 KB one in seven took 2 to 5 ms where the others took 0.14
(`foreplan.datasets.ranks.gloo_wait` says why). Here the rank itself writes its tensor into memory
that all ranks of the group map, tells the others by a byte through a Unix socket, and adds up what
they have written, all in the order of the ranks, so that everybody gets the same bits. Servers that
share layers among sockets or cores do likewise. Ranks that cannot share memory get no group: gloo
carries their sums.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes of a tensor that are exchanged at once; what caches hold of two ranks. Larger ones go in
#: pieces.
_PIECE_BYTES = 1 << 20
#: A rank may write its next piece while others still read the one before.
_TURNS = 2
#: How long to keep the core while waiting, and to stay awake, in nanoseconds: a peer's copy of a
#: piece takes some 100 us; for the other see `foreplan.datasets.ranks.gloo_wait`.
_KEPT_NS, _AWAKE_NS = 100_000, 10_000_000
#: Bytes for the name of the folder in which the ranks meet.
_NAME_BYTES = 256


class HostGroup:
    """One rank's end of a group; see the module.

    Args:
        place: of this rank in the group.
        memory: what all ranks map, ``[_TURNS, ranks, _PIECE_BYTES]`` uint8.
        peers: connections to the others by place.
        timeout_s: after which one counts as lost.
    """

    def __init__(
        self, place: int, memory: Tensor, peers: Mapping[int, socket.socket], timeout_s: float
    ) -> None:
        self._place = place
        self._memory = memory
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._turn = 0
        self._views: dict[tuple[Any, int], list[list[Tensor]]] = {}
        for peer in self._peers.values():
            peer.setblocking(False)

    @classmethod
    def open(cls, ranks: Sequence[int], group: Any, timeout_s: float) -> HostGroup | None:
        """Open a group; called by all of its ranks at the same time.

        Args:
            ranks: of the default process group, ascending.
            group: their gloo group, over which they find each other.
            timeout_s: after which a rank counts as lost.

        Returns:
            ``None``, on every rank, where they are not on one host or cannot share memory.

        Raises:
            RuntimeError: another rank has gone.
        """
        import torch
        import torch.distributed as dist

        place, told = list(ranks).index(dist.get_rank()), b""
        name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
        with contextlib.ExitStack() as stack:
            if place == 0:
                with contextlib.suppress(OSError):
                    folder = _folder(len(ranks))
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    told = os.fsencode(folder)
                    name[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
            dist.broadcast(name, ranks[0], group=group)
            told = bytes(name.tolist()).rstrip(b"\0")
            folder = Path(os.fsdecode(told))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.settimeout(timeout_s)
            memory: Tensor | None = None
            with contextlib.suppress(OSError, RuntimeError):
                if told:
                    mapped = _map(folder / "memory", len(ranks))
                    mapped[:, place].zero_()  # touched before anything is timed
                    listener.bind(str(folder / str(place)))
                    listener.listen(len(ranks))
                    memory = mapped
            if not _all(memory is not None, group) or memory is None:
                return None
            try:
                peers = _meet(folder, listener, place, len(ranks), timeout_s)
            except OSError as error:
                raise RuntimeError(f"another rank of the host has gone: {error}") from error
            _all(True, group)  # the first rank removes the folder: not before all have been called
        return cls(place, memory, peers, timeout_s)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum of everybody's, rounded after each addition.

        Raises:
            RuntimeError: another rank has gone, or did not come in time.
        """
        import torch

        flat = tensor.view(-1)
        step = _PIECE_BYTES // flat.element_size()
        for begin in range(0, len(flat), step):
            piece = flat[begin : begin + step] if len(flat) > step else flat
            parts = self._exchanged(piece)
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)

    def all_gather(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor of equal parts, by place, of which this rank has its own.

        Raises:
            RuntimeError: as of `all_reduce`.
        """
        every = tensor.view(-1).chunk(len(self._peers) + 1)
        step = _PIECE_BYTES // tensor.element_size()
        for begin in range(0, len(every[0]), step):
            parts = self._exchanged(every[self._place][begin : begin + step])
            for place in self._peers:
                every[place][begin : begin + step].copy_(parts[place])

    def close(self) -> None:
        """Hang up; the memory goes when the group does."""
        for peer in self._peers.values():
            peer.close()

    def _exchanged(self, piece: Tensor) -> list[Tensor]:
        """What everybody gave, by place; to be read before the next exchange but one."""
        key = piece.dtype, len(piece)
        views = self._views.get(key)
        if views is None:
            size = piece.element_size() * len(piece)
            views = self._views[key] = [
                [slot[:size].view(piece.dtype) for slot in turn] for turn in self._memory
            ]
        self._turn = (self._turn + 1) % _TURNS
        parts = views[self._turn]
        parts[self._place].copy_(piece)
        try:
            for peer in self._peers.values():
                # A rank is at most one exchange ahead, so that the byte always finds room.
                peer.send(b"\1")
            for place, peer in self._peers.items():
                self._hear(place, peer)
        except OSError as error:
            raise RuntimeError(f"another rank of the host has gone: {error}") from error
        return parts

    def _hear(self, place: int, peer: socket.socket) -> None:
        """Wait for a peer's byte: on the core, giving way to whoever wants it, then asleep."""
        started = time.monotonic_ns()
        while True:
            try:
                if not peer.recv(1):
                    raise RuntimeError(f"rank {place} of the group has gone")
                return
            except BlockingIOError:
                waited = time.monotonic_ns() - started
                if waited < _KEPT_NS:
                    continue
                if waited < _AWAKE_NS:
                    os.sched_yield()
                elif not select.select([peer], [], [], self._timeout_s)[0]:
                    raise RuntimeError(
                        f"rank {place} of the group did not come within {self._timeout_s:g} s"
                    ) from None


def _folder(ranks: int) -> Path:
    """A new folder with the memory of so many ranks, in memory where there is such a place."""
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="foreplan-sums-", dir=room))
    try:
        with (folder / "memory").open("xb") as file:
            # Taken now: where it is lacking later, the process that touches it would be killed.
            os.posix_fallocate(file.fileno(), 0, _TURNS * ranks * _PIECE_BYTES)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _map(path: Path, ranks: int) -> Tensor:
    """The memory of a group that the first rank has made.

    Raises:
        OSError: it is not on this host.
        RuntimeError: torch cannot map it.
    """
    import torch

    size = _TURNS * ranks * _PIECE_BYTES
    if path.stat().st_size != size:  # torch would make what is lacking
        raise OSError(f"{path} is not the group's memory")
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return mapped.view(_TURNS, ranks, _PIECE_BYTES)


def _meet(
    folder: Path, listener: socket.socket, place: int, ranks: int, timeout_s: float
) -> dict[int, socket.socket]:
    """Connect every two ranks: each calls those before it, and all listen by now."""
    peers: dict[int, socket.socket] = {}
    for other in range(place):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].settimeout(timeout_s)
        peers[other].connect(str(folder / str(other)))
        peers[other].sendall(bytes([place]))
    for _ in range(place + 1, ranks):
        caller, _ = listener.accept()
        caller.settimeout(timeout_s)
        peers[caller.recv(1)[0]] = caller
    return dict(sorted(peers.items()))


def _all(mine: bool, group: Any) -> bool:
    """Whether it holds on every rank."""
    import torch
    import torch.distributed as dist

    agreed = torch.tensor([int(mine)])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())
