"""What a step takes when its parts do not take what was planned: jitter and figures of a run."""

from __future__ import annotations

import numpy as np

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.schedule import FloatArray
from foreplan.cost_models.simulator import Simulator
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import ENCODE, ENCODE_BACKWARD
from foreplan.planner.bubbles.backbone import BackboneTimeline
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.training_step import TrainingStep

#: Shares of a step that are rounding.
_NOTHING = 1e-9


def jittered_s(timeline: Timeline, share: float, *, draws: int, seed: int) -> FloatArray:
    """Steps whose every duration is off by up to a share, in the planned order.

    Args:
        timeline: of the plan.
        share: largest deviation; each action's is uniform in ``+- share`` and independent.
        draws: how many steps.
        seed: of the deviations.

    Returns:
        Seconds, shape ``(draws,)``.

    Raises:
        SpecError: a share outside 0..1.
    """
    if not 0.0 <= share < 1.0:
        raise SpecError("jitter", got=share, expected="a share of 0..1")
    rng = np.random.default_rng(seed)
    steps = Simulator(timeline.schedule)
    length = timeline.end_s - timeline.start_s
    meeting = timeline.schedule.rendezvous
    found = np.empty(draws)
    for i in range(draws):
        factor = 1.0 + share * (2.0 * rng.random(len(length)) - 1.0)
        # Ranks that meet in a collective leave it together.
        factor[meeting >= 0] = 1.0
        found[i] = steps.run(length * factor).makespan_s
    return found


def bubble_shares(
    step: TrainingStep, costs: CostBook, decision: BubblesDecision
) -> dict[str, float]:
    """Idle time of the backbone alone by cause (Optimus, table 1), as shares of its step.

    Means over the ranks, without any encoder work, in the decision's stages and order; see
    `BackboneTimeline.bubbles_s` for the causes.

    Returns:
        Figures by name, ``dp_all_gather_bubble_share`` for instance; causes that no rank has are
        left out. Nothing where encoders are stages of the pipeline, which then has no step alone.
    """
    hosts = {stage.rank for stage in decision.stages}
    if decision.fill == "unfilled" or len(hosts) < decision.plan.pp:
        return {}
    alone = BackboneTimeline.alone(step, costs, decision)
    rows = alone.bubbles_s()
    means = {cause: float(np.mean([row[cause] for row in rows])) for cause in rows[0]}
    return {
        f"{cause}_bubble_share": seconds / alone.total_s
        for cause, seconds in means.items() if seconds > _NOTHING * alone.total_s
    }  # fmt: skip


def inside_share(timeline: Timeline) -> float:
    """Share of the encoders' computation while the backbone's step lasts (the paper's Eff).

    The backbone's step goes from its first pass, or the gather before it, to the end of its last
    pass or reduction, on any rank. 1.0 without encoders.
    """
    schedule = timeline.schedule
    ops = np.array(schedule.ops)
    encoding = np.isin(schedule.op, np.flatnonzero(np.isin(ops, (ENCODE, ENCODE_BACKWARD))))
    if not encoding.any():
        return 1.0
    passes = np.isin(schedule.op, np.flatnonzero(np.isin(ops, ("F", "B", "I", "W"))))
    begin = float(timeline.start_s[passes].min())
    end = float(timeline.end_s[passes].max())
    meetings = schedule.rendezvous >= 0
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        if op in schedule.ops:
            own = meetings & (schedule.op == schedule.ops.index(op)) & (schedule.step < 0)
            length = timeline.end_s - timeline.start_s
            if own.any() and op == "all_gather":
                begin -= float(length[own].max())
            elif own.any():
                end = max(end, float(timeline.end_s[own].max()))
    start, stop = timeline.start_s[encoding], timeline.end_s[encoding]
    within = np.clip(np.minimum(stop, end) - np.maximum(start, begin), 0.0, None)
    total = float((stop - start).sum())
    return float(within.sum()) / total if total else 1.0
