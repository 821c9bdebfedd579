"""One training step of all workers as a `Schedule`: forward, backward by buckets, all-reduce, step.

Gradients of bucket ``q`` are reduced while the backward pass works towards bucket ``q + 1``; the
all-reduces of a rank queue up in launch order (FIFO), and one starts when the bucket is ready on
every rank (rendezvous). Each part of the backward pass is a stage of its own: the next part leaves
alone what it handed to the all-reduce, so that the runtime need not wait in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.cost_models.costs import Collective, Work
from foreplan.cost_models.ddp_buckets import GRADIENT_BYTES
from foreplan.cost_models.schedule import COMPUTE, Memory, Schedule, refuse_long
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.spec import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER

LINK = "link:all_reduce"


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What one worker does in a step.

    Attributes:
        device: rank label.
        forward: the whole forward pass.
        backward: the backward pass, cut where buckets become ready.
        optimizer: the update.
        saved_bytes: what each part of the backward pass frees of the saved tensors.
        pressure: shares of the time of forward pass, backward pass and update that are bound by
            memory bandwidth.
    """

    device: str
    forward: Work
    backward: tuple[Work, ...]
    optimizer: Work
    saved_bytes: tuple[int, ...]
    pressure: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Buckets:
    """DDP buckets of a graph.

    Attributes:
        names: parameters of each, in launch order.
        bytes: of each bucket's gradients.
        part: for every operator the part of the backward pass that it belongs to.
    """

    names: tuple[tuple[str, ...], ...]
    bytes: tuple[int, ...]
    part: tuple[int, ...]

    @classmethod
    def of(cls, graph: TrainingGraph, names: tuple[tuple[str, ...], ...]) -> Buckets:
        """Cut a graph's backward pass by buckets.

        A gradient is ready when the first operator of the forward pass that reads the parameter
        has had its backward pass; a bucket when all of its gradients and all earlier buckets are.
        """
        first: dict[str, int] = {}
        for i in reversed(range(len(graph))):
            for name in graph.operators[i].node.parameters:
                first[name] = i
        ready = len(graph)
        cuts: list[int] = []
        for bucket in names:
            ready = min([ready, *(first[name] for name in bucket if name in first)])
            cuts.append(ready)
        cuts[-1] = 0
        part = tuple(next(q for q, cut in enumerate(cuts) if i >= cut) for i in range(len(graph)))
        sizes = tuple(
            GRADIENT_BYTES * sum(graph.parameters[name] for name in bucket) for bucket in names
        )
        return cls(names, sizes, part)


def all_reduce(size_bytes: int, ranks: int) -> Collective:
    """The all-reduce of a bucket's fp32 gradients over all ranks."""
    return Collective("all_reduce", size_bytes, tuple(range(ranks)), "fp32")


def step_schedule(workers: Sequence[WorkerStep], buckets: Buckets, steps: int = 1) -> Schedule:
    """The schedule of ``steps`` training steps."""
    builder = ScheduleBuilder([worker.device for worker in workers])
    ranks, count = len(workers), len(buckets.bytes)
    refuse_long(steps * ranks * (2 + count * min(ranks, 2)))
    last: list[tuple[int, ...]] = [() for _ in workers]
    for step in range(steps):
        reduced: list[list[int]] = [[] for _ in workers]
        done = [0] * ranks
        for rank, worker in enumerate(workers):
            done[rank] = builder.add(
                FORWARD, rank, worker.forward, microbatch=_step(step, steps),
                dependencies=last[rank], resources=(COMPUTE,), pressure=worker.pressure[0],
                memory=Memory("activations", allocate_bytes=sum(worker.saved_bytes)),
            )  # fmt: skip
        for q in range(count):
            for rank, worker in enumerate(workers):
                done[rank] = builder.add(
                    BACKWARD, rank, worker.backward[q], stage=q, step=q,
                    microbatch=_step(step, steps),
                    dependencies=(done[rank],), resources=(COMPUTE,),
                    pressure=worker.pressure[1],
                    memory=Memory("activations", free_bytes=worker.saved_bytes[q]),
                )  # fmt: skip
                if ranks > 1:
                    reduced[rank].append(
                        builder.add(
                            ALL_REDUCE, rank, all_reduce(buckets.bytes[q], ranks), stage=q,
                            step=q, microbatch=_step(step, steps), dependencies=(done[rank],),
                            resources=(LINK,), rendezvous=step * count + q,
                        )
                    )  # fmt: skip
        for rank, worker in enumerate(workers):
            end = builder.add(
                OPTIMIZER, rank, worker.optimizer, microbatch=_step(step, steps),
                dependencies=(done[rank], *reduced[rank]), resources=(COMPUTE,),
                pressure=worker.pressure[2],
            )  # fmt: skip
            last[rank] = (end,)
    return builder.build()


def _step(step: int, steps: int) -> int:
    return step if steps > 1 else -1
