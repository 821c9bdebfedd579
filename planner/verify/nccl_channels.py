"""`NcclChannels`: transfers between GPUs, each connection on a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from foreplan.errors import VerificationError
from foreplan.planner.verify.clock import Clock, CudaClock
from foreplan.planner.verify.collectives import started
from foreplan.planner.verify.connections import ConnectionLost, Connections, pair_options
from foreplan.planner.verify.exchange import exchange
from foreplan.planner.verify.meetings import Meetings, Word
from foreplan.planner.verify.peer_memory import BY_COPY, Offer, PeerMemory
from foreplan.planner.verify.rank_program import Step

if TYPE_CHECKING:
    import torch


class NcclChannels:
    """Transfers between GPUs, each connection on its own stream, timed there."""

    def __init__(
        self,
        groups: Sequence[tuple[str, tuple[int, ...]]],
        beside: Collection[tuple[int, ...]],
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
        self._beside = beside
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._peers: PeerMemory | None = None
        self._meetings: Meetings | None = None
        self._recorded: dict[int, Callable[[], None]] = {}
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

    def prepare(
        self, sends: Sequence[int], buffers: Mapping[int, torch.Tensor] | None,
        collectives: Sequence[tuple[Step, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
        """Open one another's memory; connections of NCCL's where a rank cannot."""
        self._prepare_meetings()
        self._record(collectives)
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

    def _prepare_meetings(self) -> None:
        """Let members of collectives meet, where all ranks can reach each other's memory."""
        meetings, words = None, None
        with contextlib.suppress(OSError, RuntimeError):
            meetings = Meetings(self._beside, self._rank, self._device)
            words = meetings.words()
        told = _exchange(words)
        ready = meetings is not None and all(part is not None for part in told)
        if ready and meetings is not None:
            try:
                meetings.open([[Word(tuple(m), *rest) for m, *rest in part] for part in told])
            except RuntimeError:
                ready = False
        if all(_exchange(ready)):
            self._meetings = meetings

    def _record(self, collectives: Sequence[tuple[Step, torch.Tensor]]) -> None:
        """Record collectives as CUDA graphs, whose start takes the host a call.

        Torch's own takes 0.1-0.2 ms, 0.3 of a slow host, and a graph 0.05 (measured): a step that
        begins with eight gathers of 0.1 ms each would wait for its host.
        """
        from foreplan.planner.verify.pass_graphs import PassGraphs

        if not collectives:
            return
        # In an order that all ranks share: NCCL may still connect to the others meanwhile.
        ordered = sorted(collectives, key=lambda one: one[0].action.rendezvous)
        with contextlib.suppress(RuntimeError):
            graphs = PassGraphs(self._device)
            for step, tensor in ordered:
                call = partial(self._collective, step, tensor)
                self._recorded[step.index] = graphs.record(call)

    def _collective(self, step: Step, tensor: torch.Tensor) -> None:
        """Queue a collective on the current stream."""
        started(step, tensor, self._groups["collective", step.group], self._rank).wait()

    def _warm_up(self, kind: str, members: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Send a first message, or do each of the collectives that connect by a ring or a tree."""
        import torch.distributed as dist

        group = self._groups[kind, members]
        if kind == "collective":
            dist.all_reduce(tensor, group=group)
            every = tensor.repeat(len(members))
            dist.all_gather_into_tensor(every, tensor, group=group)
            dist.reduce_scatter_tensor(tensor, every, group=group)
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
            # What waits below is ``stream``; the host goes on.
            group = self._groups[key]
            if step.kind == "send":
                group.send([tensor], sorted(step.group).index(step.group[1]), 0).wait()
            elif step.kind == "recv":
                group.recv([tensor], sorted(step.group).index(step.group[0]), 0).wait()
            else:
                if self._meetings and step.group in self._meetings:
                    self._meetings.meet(step.group, stream)
                replay = self._recorded.get(step.index)
                if replay is None:
                    self._collective(step, tensor)
                else:
                    replay()
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
