"""`Channels`: the connections of one rank, over gloo or NCCL.

gloo matches messages by tag, so one process group carries every transfer; it moves host memory, so
a GPU's tensors are staged through it. NCCL matches by order, so each pair and direction has a
communicator and a stream of its own, and so has each group of a collective; they are set up before
anything is timed. Where the kernels receive into the same memory in every run and the GPUs of all
ranks can reach it, messages go by copy engines instead (`PeerMemory`).

A stream that waits for a message carries nothing else, of NCCL's neither: what stood behind the
wait would be held up, and the message may be waiting for just that on its sender's side.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from foreplan.datasets.ranks.gloo_wait import nicer_reader, wait_awake
from foreplan.datasets.ranks.host_group import HostGroup
from foreplan.errors import VerificationError
from foreplan.planner.verify.clock import Clock, CudaClock, HostClock
from foreplan.planner.verify.connections import Connections, pair_options
from foreplan.planner.verify.exchange import exchange
from foreplan.planner.verify.peer_memory import BY_COPY, Offer, PeerMemory
from foreplan.planner.verify.rank_program import RankProgram, Step

if TYPE_CHECKING:
    import torch


#: What `HostGroup` can do.
_SHARED = ("all_reduce", "all_gather")


class ConnectionLost(VerificationError):
    """Another rank has gone or does not answer; its own process knows why."""


class Channels(Protocol):
    """Posts transfers and waits for them, and stamps both.

    Attributes:
        messages: what carries those between two ranks: a library, or `BY_COPY`.
    """

    messages: str

    def prepare(self, sends: Sequence[int], buffers: Mapping[int, torch.Tensor] | None) -> None:
        """Make ready for messages; called once by all ranks, before anything is posted.

        Args:
            sends: tags of this rank's sends.
            buffers: what it receives into, by tag, if that is the same in every run.
        """
        ...

    def post(self, place: int, step: Step, tensor: torch.Tensor) -> None:
        """Start a transfer of ``tensor`` and return at once."""
        ...

    def wait(self, place: int) -> None:
        """Return when what was posted at ``place`` is done (GPU: when its stream will wait)."""
        ...


def connect(
    programs: Sequence[RankProgram],
    rank: int,
    *,
    backend: str,
    clock: Clock,
    device: torch.device,
    timeout_s: float,
    kept: Connections | None = None,
) -> Channels:
    """Open the connections of every program; called by all ranks after ``init_process_group``.

    Args:
        programs: the programs of all ranks, because all have to open the same groups in the same
            order.
        rank: this one.
        backend: ``gloo`` or ``nccl``.
        clock: stamps the transfers.
        device: where the tensors are.
        timeout_s: after which a transfer counts as lost.
        kept: of former calls with the same rank, back end, device and timeout, whose channels carry
            nothing any more: what is there is taken over, what is opened is added. All ranks have
            to keep alike.
    """
    connections = Connections() if kept is None else kept
    groups: dict[tuple[str, tuple[int, ...]], None] = {}
    beside: set[tuple[int, ...]] = set()
    for program in programs:
        for place, step in enumerate(program.steps):
            if step.kind != "run":
                kind = "collective" if step.kind == "collective" else "pair"
                groups[kind, step.group] = None
            if step.kind == "collective" and not program.waits_for(place):
                beside.add(step.group)
    if backend == "nccl":
        return _Nccl(sorted(groups), rank, clock, device, timedelta(seconds=timeout_s), connections)
    return _Gloo(sorted(groups), beside, rank, clock, timedelta(seconds=timeout_s), connections)


class _Gloo:
    """Transfers of host memory; the end of a message is seen when somebody waits for it.

    Sums and gathers that nothing is computed beside go through memory that the ranks share, where
    they are on one host (`HostGroup`).

    Args:
        groups: kinds and members of all connections.
        beside: members of those whose collectives run beside computation.
        rank: this one.
        clock: stamps the transfers.
        timeout: after which one counts as lost.
        kept: connections that are there already.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, tuple[int, ...]]],
        beside: Collection[tuple[int, ...]],
        rank: int,
        clock: Clock,
        timeout: timedelta,
        kept: Connections,
    ) -> None:
        self.messages = "gloo"
        self._rank = rank
        self._clock = clock
        self._timeout = timeout
        self._pairs: Any = kept.take("messages", partial(self._open, None))
        self._beside = beside
        self._groups: dict[tuple[int, ...], Any] = {}
        self._hosts: dict[tuple[int, ...], HostGroup] = {}
        for kind, members in groups:
            if kind == "collective":
                alone = members not in beside
                group = kept.take(("sums", members, alone), partial(self._open, members, alone))
                self._groups[members] = group
                if rank in members and alone:
                    shared = kept.take(
                        ("memory", members),
                        partial(HostGroup.open, members, group, timeout.total_seconds()),
                    )
                    if shared is not None:
                        self._hosts[members] = shared
        self._waits: dict[int, tuple[Callable[[], object], Callable[[], None] | None]] = {}
        self._seen: dict[int, list[int]] = {}

    def _open(self, members: tuple[int, ...] | None, alone: bool = False) -> Any:
        """Make a group, of all ranks if none are given, with nothing computed beside its sums."""
        import torch.distributed as dist

        with nicer_reader() if alone else contextlib.nullcontext():
            ranks = None if members is None else list(members)
            return dist.new_group(ranks, backend="gloo", timeout=self._timeout)

    def prepare(self, sends: Sequence[int], buffers: Mapping[int, torch.Tensor] | None) -> None:
        """Nothing to do."""

    def post(self, place: int, step: Step, tensor: torch.Tensor) -> None:
        """Start a transfer; a GPU's tensor goes through host memory."""
        finish: Callable[[], None] | None = None
        if tensor.device.type != "cpu":
            tensor, finish = _staged(step, tensor)
        self._clock.start(place)
        host = self._hosts.get(step.group) if step.kind == "collective" else None
        if host is not None and step.action.op in _SHARED:
            self._waits[place] = partial(getattr(host, step.action.op), tensor), finish
            return
        work: Any
        try:
            if step.kind == "send":
                work = self._pairs.send([tensor], step.group[1], step.tag)
            elif step.kind == "recv":
                work = self._pairs.recv([tensor], step.group[0], step.tag)
            else:
                work = _collective(step, tensor, self._groups[step.group], self._rank)
                if step.group in self._beside:
                    self._watch(place, work)
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error
        # A message cannot say whether it is there yet.
        awake = partial(wait_awake, work, step.action.op)
        wait = awake if step.kind == "collective" else work.wait
        self._waits[place] = wait, finish

    def wait(self, place: int) -> None:
        """Block until the transfer is done."""
        wait, finish = self._waits.pop(place)
        try:
            wait()
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error
        if finish is not None:
            finish()
        seen = self._seen.pop(place, None)
        if seen and isinstance(self._clock, HostClock):
            self._clock.end_at(place, seen[0])
        else:
            self._clock.end(place)

    def _watch(self, place: int, work: Any) -> None:
        """Note when a collective ends, though nobody waits; messages cannot tell."""
        seen: list[int] = []
        try:
            future = work.get_future()
        except RuntimeError:  # not implemented for this one
            return
        self._seen[place] = seen
        # Called on a thread of gloo. It may come after ``wait`` has returned: then nobody reads it.
        future.add_done_callback(lambda _: seen.append(time.monotonic_ns()))


class _Nccl:
    """Transfers between GPUs, each connection on its own stream, timed there."""

    def __init__(
        self,
        groups: Sequence[tuple[str, tuple[int, ...]]],
        rank: int,
        clock: Clock,
        device: torch.device,
        timeout: timedelta,
        kept: Connections,
    ) -> None:
        import torch

        if not isinstance(clock, CudaClock):
            raise TypeError("NCCL transfers are timed by a CudaClock")
        self.messages = "nccl"
        self._cuda: Any = torch.cuda
        self._rank = rank
        self._clock = clock
        self._device = device
        self._timeout = timeout
        self._kept = kept
        self._pairs = [members for kind, members in groups if kind == "pair"]
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._peers: PeerMemory | None = None
        self._open("collective", [members for kind, members in groups if kind == "collective"])
        mine = [key for key in groups if rank in key[1]]
        streams = kept.streams(len(mine), device)
        if len(streams) < len(mine):
            raise VerificationError(
                f"rank {rank} has more connections than torch has streams, {len(streams)}; two on "
                "one stream can wait for each other",
                fix="verify fewer ranks at a time",
            )
        self._streams = dict(zip(mine, streams, strict=True))

    def _open(self, kind: str, groups: Sequence[tuple[int, ...]]) -> None:
        """Make communicators now, where there are none: NCCL makes them at the first message."""
        import torch

        new = [members for members in groups if ("nccl", kind, members) not in self._kept]
        for members in groups:
            make = partial(self._communicator, kind, members)
            made = self._kept.take(("nccl", kind, members), make)
            if self._rank in members:
                self._groups[kind, members] = made
        for members in new:
            if self._rank in members:
                self._warm_up(kind, members, torch.zeros(1, device=self._device))
        self._cuda.synchronize(self._device)

    def _communicator(self, kind: str, members: tuple[int, ...]) -> Any:
        import torch.distributed as dist

        options = pair_options(self._timeout) if kind == "pair" else None
        return dist.new_group(
            sorted(members), backend="nccl", timeout=self._timeout, pg_options=options
        )

    def prepare(self, sends: Sequence[int], buffers: Mapping[int, torch.Tensor] | None) -> None:
        """Open one another's memory; connections of NCCL's where a rank cannot."""
        peers, offers = None, None
        if buffers is not None:
            with contextlib.suppress(OSError, RuntimeError):
                peers = PeerMemory(buffers, self._device)
                offers = peers.offers()
        told = _exchange(offers)
        ready = peers is not None and all(part is not None for part in told)
        if ready and peers is not None:
            try:
                peers.open(sends, {int(tag): Offer(*o) for part in told for tag, o in part.items()})
            except RuntimeError:
                ready = False
        if all(_exchange(ready)):
            self._peers, self.messages = peers, BY_COPY
        else:
            self._open("pair", self._pairs)

    def _warm_up(self, kind: str, members: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Send a first message, or sum one."""
        import torch.distributed as dist

        group = self._groups[kind, members]
        if kind == "collective":
            dist.all_reduce(tensor, group=group)
        elif self._rank == members[0]:
            group.send([tensor], sorted(members).index(members[1]), 0).wait()
        else:
            group.recv([tensor], sorted(members).index(members[0]), 0).wait()
        self._cuda.synchronize()

    def post(self, place: int, step: Step, tensor: torch.Tensor) -> None:
        """Queue a transfer behind what the compute stream holds by now, if it depends on that."""
        key = "collective" if step.kind == "collective" else "pair", step.group
        stream = self._streams[key]
        by_copy = self._peers is not None and step.kind != "collective"
        # A message by copy lies in its buffer whenever it comes.
        if step.independent or (by_copy and step.kind == "recv"):
            stream.wait_event(self._clock.begun)
        else:
            stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            self._clock.start(place)
            if self._peers is not None and by_copy:
                if step.kind == "send":
                    self._peers.send(step.tag, tensor, stream)
                else:
                    self._peers.receive(step.tag, stream)
                self._clock.end(place)
                return
            group = self._groups[key]
            work: Any
            if step.kind == "send":
                work = group.send([tensor], sorted(step.group).index(step.group[1]), 0)
            elif step.kind == "recv":
                work = group.recv([tensor], sorted(step.group).index(step.group[0]), 0)
            else:
                work = _collective(step, tensor, group, self._rank)
            work.wait()  # queues a wait on ``stream``; the host goes on
            self._clock.end(place)

    def wait(self, place: int) -> None:
        """Let the compute stream wait for the transfer."""
        self._cuda.current_stream().wait_event(self._clock.event(place))


def _exchange(mine: Any) -> list[Any]:
    """What every rank says.

    Raises:
        ConnectionLost: a rank says nothing.
    """
    try:
        return exchange(mine)
    except RuntimeError as error:
        raise ConnectionLost(f"another rank is not ready: {error}") from error


def _staged(step: Step, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A host tensor in place of a GPU's, and what brings the result back."""
    import torch

    if step.kind == "send":
        return tensor.to("cpu"), None
    if step.kind == "recv":
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        host = tensor.to("cpu")

    def finish() -> None:
        tensor.copy_(host)

    return host, finish


def _collective(step: Step, tensor: torch.Tensor, group: Any, rank: int) -> Any:
    """Start a collective in place.

    ``all_gather`` takes this rank's part of ``tensor`` and fills the rest, ``reduce_scatter``
    leaves the sum in this rank's part; parts are equal slices of the flat tensor in the order of
    the ranks. ``broadcast`` takes the tensor of ``peer``, or of the lowest rank. NCCL knows both
    in-place forms, and gloo copies what overlaps when it is posted: a copy of ours would cost the
    rank's core another 3.6 ms for 8 MB (measured).
    """
    import torch.distributed as dist

    op, members = step.action.op, step.group
    if op == "all_reduce":
        return dist.all_reduce(tensor, group=group, async_op=True)
    if op == "broadcast":
        root = step.action.peer if step.action.peer >= 0 else members[0]
        return dist.broadcast(tensor, root, group=group, async_op=True)
    flat = tensor.view(-1)
    if op == "all_to_all":
        return dist.all_to_all_single(flat, flat.clone(), group=group, async_op=True)
    part = flat.chunk(len(members))[members.index(rank)]
    if op == "all_gather":
        return dist.all_gather_into_tensor(flat, part, group=group, async_op=True)
    return dist.reduce_scatter_tensor(part, flat, group=group, async_op=True)
