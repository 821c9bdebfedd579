"""`GlooChannels`: transfers of host memory, of GPUs too where they have no NCCL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from foreplan.datasets.ranks.gloo_wait import nicer_reader, patient_reader, wait_awake
from foreplan.datasets.ranks.host_group import HostGroup
from foreplan.planner.verify.clock import Clock, HostClock
from foreplan.planner.verify.collectives import started
from foreplan.planner.verify.connections import ConnectionLost, Connections
from foreplan.planner.verify.rank_program import Step

if TYPE_CHECKING:
    import torch


_Reader = Callable[[], contextlib.AbstractContextManager[None]]

#: What `HostGroup` can do.
_SHARED = ("all_reduce", "all_gather")


class GlooChannels:
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
        self._pairs: Any = kept.take("messages", partial(self._open, None, patient_reader))
        self._beside = beside
        self._groups: dict[tuple[int, ...], Any] = {}
        self._hosts: dict[tuple[int, ...], HostGroup] = {}
        for kind, members in groups:
            if kind == "collective":
                alone = members not in beside
                reader = nicer_reader if alone else contextlib.nullcontext
                group = kept.take(("sums", members, alone), partial(self._open, members, reader))
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

    def _open(self, members: tuple[int, ...] | None, reader: _Reader) -> Any:
        """Make a group, of all ranks if none are given, and have it read so."""
        import torch.distributed as dist

        with reader():
            ranks = None if members is None else list(members)
            return dist.new_group(ranks, backend="gloo", timeout=self._timeout)

    def prepare(
        self, sends: Sequence[int], buffers: Mapping[int, torch.Tensor] | None,
        collectives: Sequence[tuple[Step, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
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
                work = started(step, tensor, self._groups[step.group], self._rank)
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
