"""`Channels`: the connections of one rank, over gloo or NCCL.

gloo matches messages by tag, so one process group carries every transfer; it moves host memory, so
a GPU's tensors are staged through it. NCCL matches by order, so each pair and direction has a
communicator and a stream of its own, and so has each group of a collective; they are set up before
anything is timed. Where the kernels receive into the same memory in every run and the GPUs of all
ranks can reach it, messages go by copy engines instead (`PeerMemory`).

Collectives that work on the same memory in every run are recorded as CUDA graphs, which take the
host one call. Members of one that something is computed beside meet before it is started
(`Meetings`), because its kernel would wait for them on multiprocessors.

A stream that waits for a message carries nothing else, of NCCL's neither: what stood behind the
wait would be held up, and the message may be waiting for just that on its sender's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from foreplan.planner.verify.clock import Clock
from foreplan.planner.verify.connections import Connections
from foreplan.planner.verify.gloo_channels import GlooChannels
from foreplan.planner.verify.nccl_channels import NcclChannels
from foreplan.planner.verify.rank_program import RankProgram, Step

if TYPE_CHECKING:
    import torch


class Channels(Protocol):
    """Posts transfers and waits for them, and stamps both.

    Attributes:
        messages: what carries those between two ranks: a library, or `BY_COPY`.
    """

    messages: str

    def prepare(
        self, sends: Sequence[int], buffers: Mapping[int, torch.Tensor] | None,
        collectives: Sequence[tuple[Step, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
        """Make ready for messages; called once by all ranks, before anything is posted.

        Args:
            sends: tags of this rank's sends.
            buffers: what it receives into, by tag, if that is the same in every run.
            collectives: those that work on the same memory in every run, and on which.
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
    ordered, timeout = sorted(groups), timedelta(seconds=timeout_s)
    if backend == "nccl":
        return NcclChannels(ordered, beside, rank, clock, device, timeout, connections)
    return GlooChannels(ordered, beside, rank, clock, timeout, connections)
