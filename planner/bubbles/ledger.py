"""Memory of a bubble decision, rank by rank; see `memory.py` for the terms."""

from __future__ import annotations

from collections import Counter

from foreplan.cost_models.memory import MemoryLedger
from foreplan.errors import MissingDataError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision, EncoderPlan
from foreplan.planner.bubbles.memory import half_activation_bytes, state_bytes
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep


def capacity_bytes(problem: Problem[BubblesWorkload], step: TrainingStep, rank: int) -> int:
    """What the smallest device behind a rank of the schedule may use.

    Raises:
        MissingDataError: a device whose memory is not known.
    """
    return _smallest(problem, step, rank)[0]


def _smallest(problem: Problem[BubblesWorkload], step: TrainingStep, rank: int) -> tuple[int, str]:
    """Bytes and label of the smallest device behind a rank of the schedule."""
    ranks, sizes = problem.cluster.ranks(), []
    for member in step.block(rank):
        found = ranks[member.index]
        if found.memory_bytes is None:
            raise MissingDataError(
                f"memory of {found.label} is not known",
                fix="give memory_bytes in the cluster, or measure it with 'foreplan profile'",
            )
        sizes.append((found.memory_bytes, found.label))
    return min(sizes, key=lambda size: size[0])


def static_items(step: TrainingStep, decision: BubblesDecision, rank: int) -> dict[str, int]:
    """Model states and workspace of one device of a rank, by item."""
    own = sum(
        step.backbone.range_parameters(s.start, s.end) for s in decision.stages if s.rank == rank
    )
    return backbone_states(step, own) | encoder_items(step, decision.encoders, rank)


def backbone_states(step: TrainingStep, parameters: int) -> dict[str, int]:
    """Model states of so many parameters of the backbone on one device of their rank, by item."""
    return _states(step, parameters // step.plan.tp, step.plan.dp)


def encoder_states(
    step: TrainingStep, encoder: int, layers: tuple[int, int], tp: int, *, holders: int
) -> dict[str, int]:
    """Model states of some layers of an encoder on one device, by item.

    Args:
        step: works under the layout.
        encoder: which one.
        layers: first, and one past the last.
        tp: devices that share them.
        holders: ranks that hold the same layers.
    """
    own = step.encoders[encoder].range_parameters(*layers) // tp
    states = _states(step, own, step.plan.dp * holders, frozen=step.encoder(encoder).frozen)
    return {f"encoder_{name}": size for name, size in states.items()}


def encoder_items(
    step: TrainingStep, encoders: tuple[EncoderPlan, ...], rank: int
) -> dict[str, int]:
    """Model states of a rank's share of the encoders, and workspace, of one device, by item."""
    items: Counter[str] = Counter()
    for e, encoder in enumerate(encoders):
        for k, layers in enumerate(encoder.stages):
            holders = {row[k] for row in encoder.ranks}
            if rank in holders:
                items.update(encoder_states(step, e, layers, encoder.tp, holders=len(holders)))
    items["workspace"] = workspace_bytes(step, encoders)
    return dict(items)


def live_bytes(step: TrainingStep, encoders: tuple[EncoderPlan, ...], stage: int) -> int:
    """Activations of one micro-batch in a stage of all encoders."""
    return sum(
        step.unit_bytes(e, plan.tp, plan.units[u], plan.units[u + 1])
        for e, plan in enumerate(encoders)
        for u in plan.stage_units(stage)
    )


def _states(step: TrainingStep, own: int, replicas: int, *, frozen: bool = False) -> dict[str, int]:
    return state_bytes(
        own, replicas=replicas, sharded=step.workload.sharded_optimizer, frozen=frozen,
        weight_bytes=step.arithmetic.element_bytes,
        optimizer_bytes=step.arithmetic.optimizer_bytes,
    )  # fmt: skip


def workspace_bytes(step: TrainingStep, encoders: tuple[EncoderPlan, ...]) -> int:
    """Inside of the largest layer or unit that is computed again, while that lasts."""
    w = step.workload
    rows = w.microbatch * w.sequence_length
    largest = sum(
        half_activation_bytes(
            step.backbone, half, rows=rows, tokens=w.sequence_length, tp=step.plan.tp,
            recompute="selective", element_bytes=step.arithmetic.element_bytes,
        )
        for half in (0, 1)
    )  # fmt: skip
    for e, plan in enumerate(encoders):
        widest = max(b - a for a, b in zip(plan.units[:-1], plan.units[1:], strict=True))
        spec = step.encoder(e)
        halves = range(widest) if spec.recompute or spec.frozen else range(2)
        inside = sum(
            half_activation_bytes(
                step.encoders[e], half, rows=step.rows(e), tokens=spec.tokens, tp=plan.tp,
                recompute="selective", element_bytes=step.arithmetic.element_bytes,
            )
            for half in halves
        )  # fmt: skip
        largest = max(largest, inside)
    return largest


def ledgers(
    problem: Problem[BubblesWorkload], step: TrainingStep, decision: BubblesDecision
) -> tuple[MemoryLedger, ...]:
    """A ledger a rank with its static items."""
    found = []
    for rank in range(step.plan.pp):
        room, device = _smallest(problem, step, rank)
        items = {name: size for name, size in static_items(step, decision, rank).items() if size}
        found.append(MemoryLedger(device, room, items))
    return tuple(found)
