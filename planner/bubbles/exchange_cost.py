"""`exchange_cost_s`: what exchange and optimizer of the encoders add to a filling's own step.

An estimate that ranks answers before they are simulated.
"""

from __future__ import annotations

from foreplan.cost_models.costs import Work
from foreplan.planner.bubbles.filling import Filling


def exchange_cost_s(filling: Filling) -> float:
    """Seconds of what is exchanged beyond or instead of one micro-batch's work, and the optimizer.

    On the device that takes longest: every rank has a share of the encoders.
    """
    return max(_on_device_s(filling, device) for device in filling.timeline.step.unlike_devices)


def _on_device_s(filling: Filling, device: str) -> float:
    """Likewise on one device.

    Bucket by bucket parameters are gathered under the units before them and gradients reduced under
    those behind, so that the first bucket and what outlasts the units is exposed; where that takes
    longer, what exchanges take from computation beside them.
    """
    timeline = filling.timeline
    step, costs = timeline.step, timeline.costs
    sharded = step.workload.sharded_optimizer
    gather = scatter = forward = backward = optimizer = taken = opening = closing = 0.0

    def seconds(work: Work) -> float:
        return costs.cost(work, device).mean_s

    def beside(work: Work) -> float:
        lost = step.beside(work)
        return 0.0 if lost is None else seconds(lost)

    for e, tower in enumerate(step.encoders):
        if step.encoder(e).frozen:
            continue
        group = step.replica_group(tuple(range(0, step.plan.pp, filling.stages)))
        layers = -(-tower.layers // filling.stages)  # of the longest stage
        own = tower.range_parameters(0, layers) // step.plan.tp
        optimizer += seconds(step.steps.optimizer(own // (len(group) if sharded else 1)))
        if len(group) < 2:
            continue
        if not sharded:
            reduced = step.steps.reduce(own, group)
            scatter, taken = scatter + seconds(reduced), taken + beside(reduced)
            continue
        gathered = step.steps.gather(own, group, encoder=True)
        reduced = step.steps.scatter(own, group, encoder=True)
        count = step.bucket_count(own, group)
        gather, scatter = gather + seconds(gathered), scatter + seconds(reduced)
        opening, closing = opening + seconds(gathered) / count, closing + seconds(reduced) / count
        taken += beside(gathered) + beside(reduced)
        halves = 2 * layers
        forward += seconds(step.unit(e, step.plan.tp, 0, halves, "F", bare=False))
        backward += seconds(step.unit(e, step.plan.tp, 0, halves, "B", bare=False))
    exposed = max(opening, gather - forward) + max(closing, scatter - backward)
    return max(exposed, taken) + optimizer
