"""Pipeline schedules as pure generators: GPipe, 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2.

An *order* says, rank by rank, which pass comes next; `assemble` turns any order into a `Schedule`
with its transfers. New schedules are new orders, nothing else.

F is the forward pass, B the backward pass for the input, W the backward pass for the weights; GPipe
and both 1F1B run B and W as one pass. Sources: GPipe (Huang et al. 2019), 1F1B and its interleaved
form (Narayanan et al. 2021, section 2.2), ZB-H1 and ZB-H2 (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 2).

Counts per rank r of p, m micro-batches, v chunks (``theory``):

- 1F1B and ZB-H1 run p - r forwards before the first backward, ZB-H2 2(p - r) - 1;
- ZB-H1 runs the W of a micro-batch r backwards late, ZB-H2 2r, which is what fills the tail;
- interleaved 1F1B warms up with 2(p - 1 - r) + (v - 1)p forwards of chunks; with one chunk it is
  1F1B, as Megatron runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foreplan.cost_models.costs import HostLaunch, Segment, Work
from foreplan.cost_models.schedule import COMPUTE, Memory, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError

#: What one rank does next: ``F``, ``B``, ``W`` or ``BW`` (both backward passes as one) of a virtual
#: stage and a micro-batch.
Pass = tuple[Literal["F", "B", "W", "BW"], int, int]

#: Forward passes of a step beyond which its simulation would not end in minutes.
MOST_PASSES = 1_000_000

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")


@dataclass(frozen=True, slots=True)
class PipelineWorks:
    """Work of each virtual stage (``rank + chunk * stages``), in that order.

    Attributes:
        forward, backward_input, backward_weight: one work a virtual stage.
        transfer: what sending an activation or its gradient to the next virtual stage costs;
            ``None`` for no cost.
        activation_bytes: what one micro-batch keeps on each virtual stage from F to its last
            backward pass.
    """

    forward: tuple[Work, ...]
    backward_input: tuple[Work, ...]
    backward_weight: tuple[Work, ...]
    transfer: Callable[[int, int], Work] | None
    activation_bytes: tuple[int, ...]

    @classmethod
    def uniform(cls, stages: int, chunks: int = 1, *, transfer: bool = True) -> PipelineWorks:
        """Equal named passes, to be priced by ``CostBook.given`` (see `given_costs`).

        One micro-batch counts as one byte of activations, so that peaks read as micro-batches.
        """
        count = stages * chunks
        return cls(
            forward=(Segment("F"),) * count,
            backward_input=(Segment("B"),) * count,
            backward_weight=(Segment("W"),) * count,
            transfer=(lambda source, target: Segment("transfer")) if transfer else None,
            activation_bytes=(1,) * count,
        )


def given_costs(
    forward_s: float, backward_input_s: float, backward_weight_s: float, transfer_s: float
) -> dict[Work, float]:
    """Prices of `PipelineWorks.uniform` in seconds, per chunk.

    Raises:
        SpecError: a negative or non-finite time, or no time at all.
    """
    times = {
        "forward": forward_s,
        "backward-input": backward_input_s,
        "backward-weight": backward_weight_s,
        "transfer": transfer_s,
    }
    for name, seconds in times.items():
        if not 0.0 <= seconds < float("inf"):
            raise SpecError(f"pipeline {name} time", got=seconds, expected="a time of at least 0")
    if forward_s + backward_input_s + backward_weight_s <= 0.0:
        raise SpecError("pipeline times", got=0, expected="a pass that takes time")
    both = Segment("BW", ((Segment("B"), 1), (Segment("W"), 1)))
    return {
        Segment("F"): forward_s,
        Segment("B"): backward_input_s,
        Segment("W"): backward_weight_s,
        both: backward_input_s + backward_weight_s,
        Segment("transfer"): transfer_s,
        HostLaunch(0): 0.0,
    }


def pipeline_order(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    warmup: Sequence[int] | None = None,
) -> list[list[Pass]]:
    """The order of passes of each rank.

    Args:
        name: one of `SCHEDULES`.
        stages: ranks of the pipeline (p).
        microbatches: micro-batches of a step (m).
        chunks: virtual stages of a rank (v), only for ``interleaved-1f1b``.
        warmup: forwards of each rank before its first 1F1B pair, to replace Megatron's count of
            the interleaved schedule.

    Raises:
        SpecError: an unknown name, a size below 1, chunks where the schedule has none,
            micro-batches that do not divide by the stages where interleaving needs it, a warm-up
            with another schedule or length. Whether a warm-up deadlocks is for `simulate` to say.
    """
    if name not in SCHEDULES:
        raise SpecError("schedule", got=name, expected=f"one of {', '.join(SCHEDULES)}")
    for field, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise SpecError(field, got=size, expected="at least 1")
    passes = stages * microbatches * chunks
    if passes > MOST_PASSES:
        raise SpecError(
            "stages x microbatches x chunks", got=passes, expected=f"at most {MOST_PASSES}"
        )
    if chunks > 1 and name != "interleaved-1f1b":
        raise SpecError("chunks", got=chunks, expected=f"1 for {name}", fix="use interleaved-1f1b")
    if name == "gpipe":
        return [_gpipe(rank, microbatches) for rank in range(stages)]
    if name == "interleaved-1f1b":
        if microbatches % stages:
            raise SpecError(
                "microbatches", got=microbatches, expected=f"a multiple of the {stages} stages"
            )
        each = 2 if chunks > 1 else 1
        default = [each * (stages - 1 - r) + (chunks - 1) * stages for r in range(stages)]
        counts = list(default if warmup is None else warmup)
        if len(counts) != stages or min(counts) < 0:
            raise SpecError("warmup", got=counts, expected=f"{stages} counts of at least 0")
        return [_interleaved(r, stages, microbatches, chunks, counts[r]) for r in range(stages)]
    if warmup is not None:
        raise SpecError("warmup", got=list(warmup), expected=f"none for {name}")
    orders = []
    for rank in range(stages):
        left = stages - rank
        if name == "zb-h2":
            orders.append(_one_f_one_b(rank, microbatches, 2 * left - 1, 2 * rank))
        else:
            orders.append(_one_f_one_b(rank, microbatches, left, rank if name == "zb-h1" else None))
    return orders


def _gpipe(rank: int, microbatches: int) -> list[Pass]:
    forwards: list[Pass] = [("F", rank, i) for i in range(microbatches)]
    return forwards + [("BW", rank, i) for i in range(microbatches)]


def _one_f_one_b(rank: int, microbatches: int, before: int, delay: int | None) -> list[Pass]:
    """``before`` forwards, then backwards and forwards in turn, W ``delay`` backwards late."""
    before = min(before, microbatches)
    order: list[Pass] = [("F", rank, i) for i in range(before)]
    forwards, weights = before, 0
    for i in range(microbatches):
        order.append(("BW" if delay is None else "B", rank, i))
        if delay is not None and i - weights >= delay:
            order.append(("W", rank, weights))
            weights += 1
        if forwards < microbatches:
            order.append(("F", rank, forwards))
            forwards += 1
    if delay is not None:
        order.extend(("W", rank, i) for i in range(weights, microbatches))
    return order


def _interleaved(rank: int, stages: int, microbatches: int, chunks: int, warmup: int) -> list[Pass]:
    """Micro-batches in groups of ``stages``, each group through every chunk in turn."""

    def place(k: int) -> tuple[int, int]:
        group, within = divmod(k, stages * chunks)
        return within // stages, group * stages + within % stages

    total = microbatches * chunks
    warmup = min(warmup, total)

    def forward(k: int) -> Pass:
        chunk, microbatch = place(k)
        return ("F", chunk * stages + rank, microbatch)

    def backward(k: int) -> Pass:
        chunk, microbatch = place(k)
        return ("BW", (chunks - 1 - chunk) * stages + rank, microbatch)

    order = [forward(k) for k in range(warmup)]
    for k in range(total - warmup):
        order += [forward(warmup + k), backward(k)]
    return order + [backward(k) for k in range(total - warmup, total)]


def assemble(
    orders: Sequence[Sequence[Pass]],
    works: PipelineWorks,
    *,
    devices: Sequence[str] | None = None,
) -> Schedule:
    """Turn an order into a schedule: passes on ``compute``, transfers as delays beside them.

    A transfer is a ``send`` of the source and a ``recv`` of the target, listed where they are made
    and needed; neither occupies the compute resource.

    Args:
        orders: passes of each rank; virtual stage ``s`` lies on rank ``s % len(orders)``.
        works: what the passes cost and keep.
        devices: device of each rank; ``rank 0`` ... if left out.

    Raises:
        SpecError: a pass of a virtual stage that lies on another rank or was not described.
    """
    ranks, stages = len(orders), len(works.forward)
    rows = [row for rank, order in enumerate(orders) for row in _rows(rank, order, ranks, stages)]
    index = {row: i for i, row in enumerate(rows)}
    if len(index) < len(rows):
        raise SpecError("order", got="a pass twice", expected="each pass once")
    both = tuple(
        Segment("BW", ((b, 1), (w, 1)))
        for b, w in zip(works.backward_input, works.backward_weight, strict=True)
    )
    work = {"F": works.forward, "B": works.backward_input, "W": works.backward_weight, "BW": both}
    builder = ScheduleBuilder(tuple(devices or (f"rank {r}" for r in range(ranks))))

    def find(op: str, stage: int, microbatch: int, target: int = -1) -> int:
        found = index.get(_Row(op, stage % ranks, stage, microbatch, target))
        if found is None and op == "B":  # the gradient leaves B, whether W is fused with it or not
            found = index.get(_Row("BW", stage % ranks, stage, microbatch))
        if found is None:
            raise SpecError(
                "order", got=f"no {op} of micro-batch {microbatch} on virtual stage {stage}",
                expected="every pass that another pass needs",
            )  # fmt: skip
        return found

    for row in rows:
        op, rank, stage, batch = row.op, row.rank, row.stage, row.microbatch
        if op == "send":
            passed = "F" if row.other > stage else "B"
            price: Work = HostLaunch(0)
            if works.transfer is not None:
                price = works.transfer(rank, row.other % ranks)
            builder.add(
                "send", rank, price, stage=row.other, microbatch=batch, peer=row.other % ranks,
                resources=(), dependencies=(find(passed, stage, batch),),
            )  # fmt: skip
        elif op == "recv":
            builder.add(
                "recv", rank, HostLaunch(0), stage=stage, microbatch=batch,
                peer=row.other % ranks, resources=(),
                dependencies=(find("send", row.other, batch, stage),),
            )  # fmt: skip
        else:
            needs = [find("F", stage, batch)] if op in ("B", "BW") else []
            needs += [find("B", stage, batch)] if op == "W" else []
            source = _source(op, stage)
            if 0 <= source < stages:
                received = _Row("recv", rank, stage, batch, source)
                local = source % ranks == rank
                needs.append(
                    find("F" if op == "F" else "B", source, batch) if local else index[received]
                )
            builder.add(
                op, rank, work[op][stage], stage=stage, microbatch=batch, dependencies=needs,
                resources=(COMPUTE,), memory=_memory(op, works.activation_bytes[stage]),
            )  # fmt: skip
    return builder.build()


class _Row(NamedTuple):
    """A pass, or a transfer: ``other`` is the virtual stage that it goes to or comes from."""

    op: str
    rank: int
    stage: int
    microbatch: int
    other: int = -1


def _source(op: str, stage: int) -> int:
    """Virtual stage whose output a pass needs; out of range or -1 for none."""
    return {"F": stage - 1, "B": stage + 1, "BW": stage + 1}.get(op, -1)


def _rows(rank: int, order: Sequence[Pass], ranks: int, stages: int) -> Iterator[_Row]:
    """One rank's passes with the receives before and the sends after them."""
    for op, stage, microbatch in order:
        if stage % ranks != rank or not 0 <= stage < stages:
            raise SpecError(
                "order", got=f"{op} of virtual stage {stage} on rank {rank}",
                expected=f"virtual stages {rank}, {rank + ranks}, ... below {stages}",
            )  # fmt: skip
        source = _source(op, stage)
        if 0 <= source < stages and source % ranks != rank:
            yield _Row("recv", rank, stage, microbatch, source)
        yield _Row(op, rank, stage, microbatch)
        target = {"F": stage + 1, "B": stage - 1, "BW": stage - 1}.get(op, -1)
        if 0 <= target < stages and target % ranks != rank:
            yield _Row("send", rank, stage, microbatch, target)


def _memory(op: str, held: int) -> Memory | None:
    """Activations live from F to the last backward pass that needs them."""
    if op == "F":
        return Memory("activations", allocate_bytes=held)
    if op in ("W", "BW"):
        return Memory("activations", free_bytes=held)
    return None


def pipeline_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    works: PipelineWorks | None = None,
) -> Schedule:
    """`pipeline_order` and `assemble` in one call, with uniform passes unless `works` are given."""
    order = pipeline_order(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return assemble(order, works or PipelineWorks.uniform(stages, chunks))


def pipeline_cost_s(timeline: Timeline) -> float:
    """Longest time between first start and last end of a rank (not the global makespan).

    Source: zero-bubble paper, section 5; the two differ for ZB-H2.
    """
    return max(end - start for start, end in timeline.spans())


def bubble_rate(timeline: Timeline, ideal_s: float) -> float:
    """1 - ``ideal_s`` / cost, where ``ideal_s`` is the compute time of one rank."""
    return 1.0 - ideal_s / pipeline_cost_s(timeline)
