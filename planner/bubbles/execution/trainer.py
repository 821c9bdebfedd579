"""`BubbleTrainer`: one process's part of a training loop that carries out a bubble plan.

Every process of the run makes one and calls `step` in turn. With an `OnlinePlanner` on rank 0 the
measured steps are fed back, and a new order takes effect between two steps: weights, optimizer,
processes and their connections stay as they are; only connections that were not there are opened.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.entry import rank_kernels
from foreplan.planner.bubbles.execution.kernels import BubbleKernels
from foreplan.planner.bubbles.online import OnlinePlanner
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.verify.channels import connect
from foreplan.planner.verify.clock import Clock, CudaClock, HostClock
from foreplan.planner.verify.connections import Connections
from foreplan.planner.verify.exchange import exchange, gather
from foreplan.planner.verify.measured import measured_timeline
from foreplan.planner.verify.peer_memory import BY_COPY
from foreplan.planner.verify.rank_program import rank_programs
from foreplan.planner.verify.runtime import Record, Runtime


@dataclass(frozen=True)
class StepReport:
    """What came of a step.

    Attributes:
        loss: mean over the step's micro-batches.
        timeline: as measured.
        replanned: whether the next step has another order.
    """

    loss: float
    timeline: Timeline
    replanned: bool


class BubbleTrainer:
    """See the module.

    Args:
        problem: what is trained; costs are not needed.
        decision: of a plan.
        rank: of this process among ``pp * tp``; ``torch.distributed`` is connected over gloo.
        mode: ``fast`` or ``reference``, see `rank_kernels`.
        online: on rank 0, to feed steps back; every process says whether there is one.
        adaptive: whether rank 0 has one.
        timeout_s: after which a transfer counts as lost.
    """

    def __init__(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, rank: int, *,
        mode: str = "fast", online: OnlinePlanner | None = None, adaptive: bool = False,
        timeout_s: float = 120.0,
    ) -> None:  # fmt: skip
        self._problem, self._rank, self._timeout_s = problem, rank, timeout_s
        self._online, self._adaptive = online, adaptive
        if online is not None:
            online.rehearse()
        gpu = problem.cluster.ranks()[0].name.kind == "cuda"
        self._backend = "nccl" if gpu else "gloo"
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        )
        self._connections = Connections()
        self.kernels: BubbleKernels = rank_kernels(problem, decision, rank, mode=mode)
        self._install(decision)

    def step(self) -> StepReport:
        """Train on one batch; called by all processes at the same time.

        Raises:
            VerificationError: a kernel failed, or another process has gone.
        """
        self.kernels.advance()
        records, loss = self._everyone(self._runtime.execute(dist.barrier))
        timeline = measured_timeline(self._schedule, records, sent_by_copy=self._by_copy)
        return StepReport(loss, timeline, self._feed_back(timeline))

    def close(self) -> None:
        """Close all connections and leave the run; called by all processes."""
        del self._runtime  # NCCL waits for graphs that hold a communicator's kernels
        self._connections.close()
        dist.destroy_process_group()

    def _everyone(self, record: Record) -> tuple[list[Record], float]:
        """All processes' records, and the step's loss, in one message: a step waits for it."""
        longest = max(self._counts)
        stamps = torch.zeros(2, longest, dtype=torch.int64)
        for row, values in zip(stamps, (record.start_ns, record.end_ns), strict=True):
            row[: len(values)] = torch.tensor(values)
        losses = torch.full((self._microbatches,), torch.nan, dtype=torch.float64)
        for microbatch, loss in self.kernels.losses().items():
            losses[microbatch] = loss
        told = gather(torch.cat([stamps.flatten(), losses.view(torch.int64)]))
        records = []
        for part, count in zip(told, self._counts, strict=True):
            start, end = part[: 2 * longest].view(2, longest)[:, :count].tolist()
            records.append(Record(tuple(start), tuple(end)))
        known = torch.stack([part[2 * longest :].view(torch.float64) for part in told])
        return records, float(known.nanmean(0).nansum())

    def _feed_back(self, timeline: Timeline) -> bool:
        if not self._adaptive:
            return False
        replanned = None if self._online is None else self._online.observe(timeline)
        if not any(map(bool, gather(torch.tensor([replanned is not None])))):
            return False  # as nearly always, and at a message of a byte
        made = exchange(None if replanned is None else replanned.decision.model_dump(mode="json"))
        new = next(document for document in made if document is not None)
        decision = validate(BubblesDecision, new, "decision")
        self.kernels.adopt(decision)
        self._install(decision)
        return True

    def _install(self, decision: BubblesDecision) -> None:
        """Connections and list of an order."""
        self._schedule, _ = BubblesPlanner().real(self._problem, decision)
        programs = rank_programs(self._schedule, ordered=self._backend == "nccl")
        program = programs[self._rank]
        self._counts = [len(one.steps) for one in programs]
        self._microbatches = decision.microbatches
        count = len(program.steps)
        clock: Clock = (
            HostClock(count) if self._device.type == "cpu" else CudaClock(count, self._device)
        )
        channels = connect(
            programs, self._rank, backend=self._backend, clock=clock, device=self._device,
            timeout_s=self._timeout_s, kept=self._connections,
        )  # fmt: skip
        self._runtime = Runtime(program, self.kernels, channels, clock)
        self._by_copy = channels.messages == BY_COPY
