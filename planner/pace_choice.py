"""`pace_of_ranks`: the programs that a verification of a plan times beside its rounds.

Of each rank those that most of its compute is priced by: rows of its profile, or the row nearest to
what was interpolated. They are few, because they are timed between the rounds of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from foreplan.cost_models.costs import CostBook, Segment
from foreplan.cost_models.failed import regime
from foreplan.cost_models.profiled_alike import timed_alike
from foreplan.cost_models.simulator import Contention
from foreplan.cost_models.tables import measured
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.planner.base import Planner, Problem
from foreplan.planner.pace import PaceProgram, RankPace
from foreplan.planner.predict import Forecast, contention, memory_share

#: Programs of a rank at most (chosen: some 0.1 s each, several times a verification).
MOST = 4


def pace_of_ranks(
    planner: Planner[Any, Any],
    problem: Problem[Any],
    decision: Any,
    forecast: Forecast,
    profiles: Mapping[str, Profile],
) -> tuple[RankPace, ...]:
    """Choose programs for every process of a decision.

    Args:
        planner: of the decision.
        problem: priced from the profiles.
        decision: what will be run.
        forecast: of the decision.
        profiles: by rank label.

    Returns:
        One entry a process whose device has a profile with programs that the plan rests on.
    """
    if not profiles:
        return ()
    members = planner.real(problem, decision)[1]
    labels = [rank.label for rank in problem.cluster.ranks()]
    devices = forecast.schedule.devices
    neighbours = contention(
        problem.cluster, planner.ranks(problem, decision), planner.occupied(problem, decision)
    )
    seconds = forecast.program_seconds(problem.costs)
    found = []
    for k, member in enumerate(members):
        # Several processes may stand for one rank of the schedule; they do the same.
        rank = k * len(devices) // len(members)
        profile = profiles.get(labels[member])
        if profile is None:
            continue
        priced = {p: s for (p, device), s in seconds.items() if device == devices[rank]}
        programs = _programs(priced, profile, problem.costs, devices[rank], rank, neighbours)
        if programs:
            found.append(RankPace(device=labels[member], programs=programs))
    return tuple(found)


def _programs(
    priced: Mapping[Program, float],
    profile: Profile,
    costs: CostBook,
    device: str,
    rank: int,
    neighbours: Contention | None,
) -> tuple[PaceProgram, ...]:
    rows: dict[Program, Row] = {}
    weight: dict[Program, float] = {}
    for item, seconds in priced.items():
        row = _nearest(timed_alike(item), profile)
        if row is not None and seconds > 0.0:
            timed = row.program()
            rows[timed] = row
            weight[timed] = weight.get(timed, 0.0) + seconds
    most = sorted(weight, key=lambda item: -weight[item])[:MOST]
    found = []
    for item in most:
        beside = _beside(item, costs, device, rank, neighbours)
        found.append(
            PaceProgram(
                op=item.op, dims=item.dims, variant=str(item.variant), priced_s=weight[item],
                expected_s=measured(rows[item]).mean_s * beside,
            )
        )  # fmt: skip
    return tuple(found)


def _nearest(item: Program, profile: Profile) -> Row | None:
    """The row of a program, or of that of its kernel path whose sizes differ by least factors."""
    exact = profile.by_program.get(item)
    if exact is not None:
        return exact if exact.status == "ok" else None
    like = [
        row for other, row in profile.by_program.items()
        if row.status == "ok" and regime(other) == regime(item)
    ]  # fmt: skip

    def far(row: Row) -> float:
        return sum(abs(math.log(row.dims[name] / size)) for name, size in item.dims.items())

    return min(like, key=far, default=None)


def _beside(
    item: Program, costs: CostBook, device: str, rank: int, neighbours: Contention | None
) -> float:
    """What a call takes longer, by the plan's prices, while all ranks of the host run it."""
    if neighbours is None:
        return 1.0
    share = memory_share(costs, device, Segment(item.op, ((item, 1),)))
    processes = neighbours.processes or (1,) * len(neighbours.host)
    together = sum(
        n for n, host in zip(processes, neighbours.host, strict=True)
        if host == neighbours.host[rank]
    )  # fmt: skip
    others = share * (together - 1)
    factors = neighbours.slowdown
    return 1.0 + share * (float(np.interp(others, range(len(factors)), factors)) - 1.0)
