"""Memory of a bubble decision, rank by rank; see `memory.py` for the terms."""

from __future__ import annotations

import functools
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
    ranks = problem.cluster.ranks()
    sizes = []
    for replica in range(step.plan.dp):
        for lane in range(step.plan.tp):
            found = ranks[step.cluster_rank(rank, replica, lane)]
            if found.memory_bytes is None:
                raise MissingDataError(
                    f"memory of {found.label} is not known",
                    fix="give memory_bytes in the cluster, or measure it with 'foreplan profile'",
                )
            sizes.append(found.memory_bytes)
    return min(sizes)


def static_items(step: TrainingStep, decision: BubblesDecision, rank: int) -> dict[str, int]:
    """Model states and workspace of one device of a rank, by item."""
    w, plan = step.workload, step.plan
    states_of = functools.partial(
        state_bytes, sharded=w.sharded_optimizer, weight_bytes=step.arithmetic.element_bytes,
        optimizer_bytes=step.arithmetic.optimizer_bytes,
    )  # fmt: skip
    items: Counter[str] = Counter()
    own = sum(
        step.backbone.range_parameters(s.start, s.end) for s in decision.stages if s.rank == rank
    )
    items.update(states_of(own // plan.tp, replicas=plan.dp))
    for e, encoder in enumerate(decision.encoders):
        for k, layers in enumerate(encoder.stages):
            holders = {row[k] for row in encoder.ranks}
            if rank in holders:
                states = states_of(
                    step.encoders[e].range_parameters(*layers) // encoder.tp,
                    replicas=plan.dp * len(holders),
                    frozen=step.encoder(e).frozen,
                )
                items.update({f"encoder_{name}": size for name, size in states.items()})
    items["workspace"] = _workspace(step, decision.encoders)
    return dict(items)


def _workspace(step: TrainingStep, encoders: tuple[EncoderPlan, ...]) -> int:
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
    return tuple(
        MemoryLedger(
            step.devices[rank],
            capacity_bytes(problem, step, rank),
            {name: size for name, size in static_items(step, decision, rank).items() if size},
        )
        for rank in range(step.plan.pp)
    )
