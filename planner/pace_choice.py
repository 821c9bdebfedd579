"""`pace_of_ranks`: the programs that a verification of a plan times beside its rounds.

Of each rank those that most of its compute is priced by: rows of its profile, or the row nearest to
what was interpolated. They are few, because they are timed between the rounds of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreplan.cost_models.costs import Segment
from foreplan.cost_models.rates.profiled_alike import timed_alike
from foreplan.cost_models.simulator import Contention
from foreplan.cost_models.sources.in_step import InStepFactor, in_step_factors, nearest
from foreplan.cost_models.sources.tables import measured
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.datasets.tier import ContentionKind
from foreplan.planner.base import Planner, Problem
from foreplan.planner.contention import contention, memory_share
from foreplan.planner.pace import PaceProgram, RankPace
from foreplan.planner.predict import Forecast

#: Programs of a rank at most (chosen: a few are most of its compute, and what is left out leaves
#: its room in the caches to the others).
MOST = 12


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
        One entry a process whose device has a profile with programs that the plan rests on. Of a
        GPU whose prices are those of recorded passes there is none: its clock in a pass is not that
        of programs which it runs one by one.
    """
    if not profiles:
        return ()
    members = planner.real(problem, decision)[1]
    every = problem.cluster.ranks()
    labels = [rank.label for rank in every]
    devices = forecast.schedule.devices
    neighbours = contention(
        problem.cluster, planner.ranks(problem, decision), planner.occupied(problem, decision),
        planner.contends(problem),
    )  # fmt: skip
    alone = in_step_factors(problem.cluster, issued=planner.issues)
    seconds, counted = forecast.program_seconds(problem.costs), forecast.program_calls()
    found = []
    for k, member in enumerate(members):
        # Several processes may stand for one rank of the schedule; they do the same.
        rank = k * len(devices) // len(members)
        profile = profiles.get(labels[member])
        if profile is None or (
            every[member].kernel_kind == "cuda" and not alone[devices[rank]].says_nothing
        ):
            continue
        priced = {p: s for (p, device), s in seconds.items() if device == devices[rank]}
        calls = {p: n for (p, device), n in counted.items() if device == devices[rank]}
        beside = _Beside(
            problem, devices[rank], rank, neighbours, planner.contends(problem),
            alone[devices[rank]],
        )  # fmt: skip
        issued = planner.issues and every[member].kernel_kind == "cuda"
        programs = _programs(priced, calls, profile, beside, issued=issued)
        if programs:
            in_pass = not alone[devices[rank]].says_nothing
            found.append(
                RankPace(device=labels[member], programs=programs, in_pass=in_pass, issued=issued)
            )
    return tuple(found)


def _programs(
    priced: Mapping[Program, float],
    calls: Mapping[Program, int],
    profile: Profile,
    beside: _Beside,
    *,
    issued: bool,
) -> tuple[PaceProgram, ...]:
    rows: dict[Program, Row] = {}
    weight: dict[Program, float] = {}
    count: dict[Program, int] = {}
    for item, seconds in priced.items():
        if item.op == "optimizer_step":  # once a step: in a pass it would empty the caches
            continue
        row = _nearest(timed_alike(item), profile)
        if row is not None and seconds > 0.0:
            timed = row.program()
            rows[timed] = row
            weight[timed] = weight.get(timed, 0.0) + seconds
            count[timed] = max(count.get(timed, 1), calls.get(item, 1))
    most = sorted(weight, key=lambda item: -weight[item])[:MOST]

    def expected_s(item: Program) -> float:
        device_s = measured(rows[item]).mean_s * beside.factor(item)
        return max(device_s, rows[item].issue_s or 0.0) if issued else device_s

    return tuple(
        PaceProgram(
            op=item.op, dims=item.dims, variant=str(item.variant), priced_s=weight[item],
            expected_s=expected_s(item), calls=count[item],
        )
        for item in most
    )  # fmt: skip


def _nearest(item: Program, profile: Profile) -> Row | None:
    """The row of a program, or of that of its kernel path whose sizes differ by least factors."""
    exact = profile.by_program.get(item)
    if exact is not None:
        return exact if exact.status == "ok" else None
    found = nearest(item, [p for p, row in profile.by_program.items() if row.status == "ok"])
    return None if found is None else profile.by_program[found]


class _Beside:
    """What programs take longer, by the plan's prices, while all ranks of the host run them.

    Args:
        problem: whose cluster and prices.
        device, rank: of the schedule.
        neighbours: of its ranks.
        kind: what they contend in.
        alone: by what the plan's prices of one rank are corrected.
    """

    def __init__(
        self, problem: Problem[Any], device: str, rank: int, neighbours: Contention | None,
        kind: ContentionKind, alone: InStepFactor,
    ) -> None:  # fmt: skip
        self._costs, self._device, self._kind = problem.costs, device, kind
        self._alone = alone
        self._factors: tuple[float, ...] = (1.0,)
        self._together = 1
        if neighbours is not None:
            processes = neighbours.processes or (1,) * len(neighbours.host)
            self._together = sum(
                n for n, host in zip(processes, neighbours.host, strict=True)
                if host == neighbours.host[rank]
            )  # fmt: skip
            self._factors = neighbours.slowdown

    def factor(self, item: Program) -> float:
        """Time of a call over its row's."""
        if self._kind == "training":
            return self._alone(item) * self._at(self._together - 1) if is_training(item) else 1.0
        share = memory_share(self._costs, self._device, Segment(item.op, ((item, 1),)))
        others = self._at(share * (self._together - 1))
        return self._alone(item) * (1.0 + share * (others - 1.0))

    def _at(self, others: float) -> float:
        return float(np.interp(others, range(len(self._factors)), self._factors))
