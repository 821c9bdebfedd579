"""What a bubble plan takes for granted, as a plan lists it: of a problem, and of its layout."""

from __future__ import annotations

from foreplan.planner.base import Problem
from foreplan.planner.bubbles.arithmetic import Arithmetic
from foreplan.planner.bubbles.backbone import schedule_name
from foreplan.planner.bubbles.blocks import kind_of
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep


def assumptions(problem: Problem[BubblesWorkload]) -> tuple[str, ...]:
    """Sentences, those that hold of every plan first."""
    w = problem.workload
    notes = [
        "data parallel replicas and tensor parallel lanes do alike work: one rank of the schedule "
        "stands for all of them, collectives are priced for the whole group",
        "parameters of a rank's first virtual stage are gathered and its gradients reduced in the "
        "open, those of its other stages behind computation",
        "encoder work beside the backbone's communication slows neither down, apart from what the "
        "cluster states: contention between ranks of a host, and what collectives take from "
        "computation",
        "passes cost what their operators do one by one; slices, averages over positions and the "
        "host's time between operators are left out"
        if Arithmetic.of(problem.cluster).measurable
        else "backward passes cost what their matrix products do, attention twice its forward pass "
        "and once more where its inside is computed again",
    ]
    if any(fit.lag_share for tier in problem.cluster.tiers for fit in tier.waited):
        notes.append(
            "lanes wait at the sums of whole passes and units for the slowest of them, as long as "
            "the cluster states"
        )
    if any(encoder.dims and encoder.dims.layer_forward_s for encoder in w.encoders) or (
        w.backbone is not None and w.backbone.layer_forward_s is not None
    ):
        notes.append("times of layers are the workload's own")
    if any(value is not None for value in w.times.model_dump().values()):
        notes.append("times of collectives, transfers or the optimizer are the workload's own")
    if schedule_name(w.schedule, w.plan.chunks if w.plan else 2) != w.schedule:
        notes.append("with one chunk a rank interleaved 1F1B is 1F1B")
    return tuple(notes)


def unlike_blocks(step: TrainingStep) -> tuple[str, ...]:
    """A sentence where lanes and replicas of a rank are unlike devices: which one it is priced as.

    Those of `assumptions` hold of every layout.
    """
    found: dict[str, None] = {}
    for rank, standing in enumerate(step.stand_ins):
        kinds = {kind_of(one): one.label for one in reversed(step.block(rank))}
        if len(kinds) > 1:
            found[f"{standing.label} of {', '.join(reversed(kinds.values()))}"] = None
    if not found:
        return ()
    return (
        "lanes and replicas of a rank that are unlike devices wait for the slowest of them, which "
        f"the rank is priced as: {'; '.join(found)}",
    )
