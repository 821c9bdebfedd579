"""`host_note`: says of a plan on GPUs that their hosts, which nobody profiled, may decide."""

from __future__ import annotations

from typing import Any

from foreplan.cost_models.costs import HostWait
from foreplan.cost_models.rates.usual_host import usual_host_s
from foreplan.planner.base import Planner, Problem
from foreplan.planner.predict import Forecast


def host_note(
    planner: Planner[Any, Any], problem: Problem[Any], forecast: Forecast
) -> tuple[str, ...]:
    """What the plan rests on; nothing where hosts are priced, or done before the devices anyhow.

    Args:
        planner: whose real runs may issue operators one by one (`Planner.issues`).
        problem: what was decided.
        forecast: the decision's priced schedule.
    """
    ranks = problem.cluster.ranks()
    if not planner.issues or any(rank.kernel_kind != "cuda" for rank in ranks):
        return ()
    nothing = HostWait("forward", ())
    if any(problem.costs.issuing(nothing, rank.label) is not None for rank in ranks):
        return ()
    hosts_s = usual_host_s(forecast.schedule)
    mean_s, low_s, high_s = hosts_s[hosts_s[:, 0].argmax()]
    if high_s < forecast.total_s:
        return ()
    return (
        f"no host was profiled, and prices leave hosts out: a usual one takes at least "
        f"{1e3 * mean_s:.3g} ms ({1e3 * low_s:.3g} to {1e3 * high_s:.3g}) to issue what a rank "
        f"runs in {1e3 * forecast.total_s:.3g} ms, and may decide how long that takes",
    )
