"""`step_figures`: what a user reads first of a simulated step."""

from __future__ import annotations

import numpy as np

from foreplan.cost_models.mfu import model_flops_utilisation
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets import device_zoo
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.robustness import bubble_shares, inside_share, jittered_s
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.towers import backbone_tower, encoder_towers
from foreplan.planner.bubbles.training_step import TrainingStep

#: Jitter that a plan reports, and from how many draws.
JITTER, DRAWS = 0.05, 20


def step_figures(
    problem: Problem[BubblesWorkload], decision: BubblesDecision, timeline: Timeline
) -> dict[str, float]:
    """Throughput, encoder time inside the backbone's step, idle time by cause, jitter."""
    w, total = problem.workload, timeline.makespan_s
    samples = decision.microbatches * w.microbatch * decision.plan.dp
    idle = 1.0 - float(np.mean(timeline.busy_s())) / total
    jitter = jittered_s(timeline, JITTER, draws=DRAWS, seed=problem.seed)
    figures = {
        "samples_per_s": samples / total,
        "tokens_per_s": samples * w.sequence_length / total,
        "encoder_inside_share": inside_share(timeline),
        "compute_idle_share": idle,
        "jitter_5_percent_p95_s": float(np.percentile(jitter, 95)),
    }
    figures |= bubble_shares(TrainingStep.of(problem, decision), problem.costs, decision)
    peak = _peak_flops(problem)
    if peak is not None:
        flops = training_flops(problem) * samples
        figures["model_flops_utilisation"] = model_flops_utilisation(
            flops_per_token=flops, tokens=1, step_s=total, devices=decision.plan.devices,
            peak_flops=peak,
        )  # fmt: skip
    return figures


def training_flops(problem: Problem[BubblesWorkload]) -> float:
    """Model FLOP of one sample: forward and backward, nothing computed again (``theory``).

    Products 2 FLOP a weight and token forwards and 4 backwards (none of a frozen encoder),
    attention 4 s h a token and layer for each direction's pass, half of it under a causal mask
    counted in full, as is usual.
    """
    w = problem.workload
    total = 0.0
    towers = [(backbone_tower(problem), w.sequence_length, 1, 3.0)]
    for spec, tower in zip(w.encoders, encoder_towers(problem), strict=True):
        towers.append((tower, spec.tokens, spec.images, 1.0 if spec.frozen else 3.0))
    for tower, tokens, sequences, passes in towers:
        weights = tower.parameters - tower.vocab * tower.hidden
        attention = 4.0 * tower.layers * tower.heads * tower.head_dim * tokens
        total += passes * sequences * tokens * (2.0 * weights + attention)
    return total


def _peak_flops(problem: Problem[BubblesWorkload]) -> float | None:
    """Dense bf16 peak of the devices, where all are of one published kind."""
    names = {rank.name.zoo for rank in problem.cluster.ranks()}
    if len(names) != 1 or (name := names.pop()) is None:
        return None
    return device_zoo.device(name).peak("bf16")
