"""What a binding limit costs: the decision made again with one limit relaxed, one at a time.

A limit is binding where at least 80 % of it is used: the memory of a device (a search keeps some of
it free, for layers that it has not placed yet), and fields of the workload named ``max_...`` or
``min_...`` that the decision or its metrics answer by name. The relaxed problem is solved as the
plan's was; nothing is extrapolated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import DeviceEntry, Rank
from foreplan.datasets.specs import validate
from foreplan.errors import ForeplanError, InfeasibleError, MissingDataError
from foreplan.planner.base import Planner, Problem
from foreplan.planner.plan import WhatIf
from foreplan.planner.predict import Forecast
from foreplan.planner.prediction import Prediction

#: Share of a limit from which on it is looked at, and by how much it is relaxed.
BINDING, RELAXED = 0.8, 0.1


def what_if(
    planner: Planner[Any, Any],
    problem: Problem[Any],
    decision: Any,
    predicted: Prediction,
    total_s: float,
) -> tuple[WhatIf, ...]:
    """Relax every binding limit by 10 % and decide again.

    Args:
        planner: that decides.
        problem: of the plan.
        decision: of the plan.
        predicted: of the plan: memory of each rank, metrics.
        total_s: of the plan.

    Returns:
        One entry a limit, in the order memory, workload. A decision that the relaxed problem's
        search misses cannot make it worse: the plan's own stays possible.
    """
    mine = planner.objective(problem, decision, total_s)
    found = []
    for limit, relaxed in (*_memory(problem, predicted), *_named(problem, decision, predicted)):
        try:
            answer = planner.decide(relaxed).decision
            forecast = Forecast.of(planner, relaxed, answer)
            for rank, ledger in enumerate(forecast.ledgers):
                ledger.check(rank)
        except (InfeasibleError, MissingDataError):
            answer, forecast = decision, None
        worth = mine
        seconds = total_s
        if forecast is not None:
            worth = planner.objective(relaxed, answer, forecast.total_s)
            seconds = forecast.total_s
        if worth >= mine:
            answer, worth, seconds = decision, mine, total_s
        gain = (mine - worth) / abs(mine) if mine else 0.0
        found.append(WhatIf(limit=limit, relaxed=RELAXED, total_s=seconds, gain=gain))
    return tuple(found)


def _memory(problem: Problem[Any], predicted: Prediction) -> Iterator[tuple[str, Problem[Any]]]:
    """Problems with more memory on every device like one that is nearly full."""
    ranks = {rank.label: rank for rank in problem.cluster.ranks()}
    seen: set[tuple[Any, ...]] = set()
    for of in predicted.ranks:
        rank, held = ranks.get(of.device), sum(of.memory_bytes.values())
        if rank is None or not of.capacity_bytes or held < BINDING * of.capacity_bytes:
            continue
        if rank.memory_bytes is None:
            continue
        # Devices that share layers have to be alike: more memory for one of them is of no use.
        shared = getattr(problem.workload, "tensor_parallel", 1) != 1
        alike = _alike(rank, rank.memory_bytes, shared=shared)
        if alike in seen:
            continue
        seen.add(alike)
        more = int(rank.memory_bytes * (1 + RELAXED))
        cluster = _with_memory(problem.cluster, alike, more, shared=shared)
        names = {str(r.name) for r in ranks.values()
                 if _alike(r, r.memory_bytes, shared=shared) == alike}  # fmt: skip
        yield f"memory of {', '.join(sorted(names))}", dataclasses.replace(problem, cluster=cluster)


def _alike(of: Rank | DeviceEntry, memory_bytes: int | None, *, shared: bool) -> tuple[Any, ...]:
    """What devices have in common that get more memory together."""
    if shared and of.name.kind == "cuda":  # listed one by one, with a profile each
        return of.host, of.name.any_index, memory_bytes
    return of.host, of.name, of.profile, memory_bytes


def _with_memory(cluster: Cluster, alike: tuple[Any, ...], size: int, *, shared: bool) -> Cluster:
    entries = []
    for entry in cluster.devices:
        published = entry.published()
        known = entry.memory_bytes or (published.memory_bytes if published else None)
        same = _alike(entry, known, shared=shared) == alike
        # A copy is not checked again: a zoo device may not have more than was published.
        entries.append(entry.model_copy(update={"memory_bytes": size}) if same else entry)
    return cluster.model_copy(update={"devices": tuple(entries)})


def _named(
    problem: Problem[Any], decision: Any, predicted: Prediction
) -> Iterator[tuple[str, Problem[Any]]]:
    """Problems whose workload asks for less."""
    fields = problem.workload.model_dump(mode="json")
    known = {**predicted.metrics, **decision.model_dump(mode="json")}
    for field, limit in fields.items():
        bound, _, name = field.partition("_")
        value = known.get(name)
        if bound not in ("min", "max") or not (_is_number(limit) and _is_number(value)):
            continue
        small, large = (value, limit) if bound == "max" else (limit, value)
        if large <= 0 or small / large < BINDING:
            continue
        eased = limit * (1 + RELAXED if bound == "max" else 1 - RELAXED)
        try:
            workload = validate(type(problem.workload), {**fields, field: eased}, field)
        except ForeplanError:  # whole numbers only, for instance
            continue
        yield field, dataclasses.replace(problem, workload=workload)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
