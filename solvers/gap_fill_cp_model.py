"""CP-SAT's model of a gap-filling problem in whole ticks: plain numbers in, plain numbers out.

``ortools`` and ``highspy`` bring their own builds of HiGHS and cannot live in one process. Hence
this module imports neither the programmes nor ``ortools`` before it is called, and a document can
be sent to another process as JSON. See ``gap_fill_cp`` for what the numbers mean.
"""

from __future__ import annotations

import itertools
from typing import Any

from foreplan.errors import MissingDataError


def solve_document(given: dict[str, Any]) -> dict[str, Any]:
    """Solve what ``gap_fill_cp.solve_cp`` hands to its ``run``.

    Args:
        given: the document; all its times are ticks.

    Returns:
        ``status`` in CP-SAT's words, ``bound`` in ticks (``None`` if infeasible), ``map`` by slot
        and ``starts`` by direction, slot and unit, both ``None`` without an answer.

    Raises:
        MissingDataError: ``ortools`` is not installed.
    """
    try:
        from ortools.sat.python import cp_model  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise MissingDataError("ortools is not installed", fix="pip install ortools") from None
    model = cp_model.CpModel()
    slots, pipelines = range(given["slots"]), range(given["pipelines"])
    low, high = -given["reach"], given["length"] + given["reach"]
    head = model.new_int_var(0, given["reach"], "head")
    end = model.new_int_var(given["length"], high, "end")
    on = {(i, j): model.new_bool_var(f"on {i} {j}") for i in slots for j in pipelines}
    for i in slots:
        model.add_exactly_one(on[i, j] for j in pipelines)
    rows: dict[tuple[int, int, int], list[Any]] = {
        (j, s, r): [
            model.new_fixed_size_interval_var(a, b - a, "backbone")
            for a, b in given["busy"][j][s][r]
        ]
        for j in pipelines
        for s in range(given["stages"])
        for r in range(2)
    }
    starts = []
    for name in ("forward", "backward"):
        start = _side(model, given, name, on, rows, head, end, (low, high))
        starts.append(start)
    for intervals in rows.values():
        model.add_no_overlap(intervals)
    if given["cap"] is not None:
        _cap(model, given, on, starts)
    for side, table in zip(starts, given["hint"] or ({}, {}), strict=True):
        for (i, u), start in side.items():
            if table:
                model.add_hint(start, table[i][u])
    for i, j in enumerate(given["hint_map"] or ()):
        for other in pipelines:
            model.add_hint(on[i, other], int(other == j))
    model.minimize(head + end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = given["workers"]
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = given["limit"]
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "status": solver.status_name(status).lower(),
        "bound": solver.best_objective_bound if status != cp_model.INFEASIBLE else None,
        "map": [next(j for j in pipelines if solver.value(on[i, j])) for i in slots]
        if found
        else None,
        "starts": [
            [[solver.value(side[i, u]) for u in range(len(given[name]["stage"]))] for i in slots]
            for name, side in zip(("forward", "backward"), starts, strict=True)
        ]
        if found
        else None,
    }


def _side(
    model: Any, given: dict[str, Any], name: str, on: Any, rows: Any, head: Any, end: Any,
    span: tuple[int, int],
) -> dict[tuple[int, int], Any]:  # fmt: skip
    """Starts of one direction by slot and unit, with everything but the cap."""
    side = given[name]
    stage, resource, work = side["stage"], side["resource"], side["duration"]
    units, slots, pipelines = range(len(stage)), range(given["slots"]), range(given["pipelines"])
    start = {(i, u): model.new_int_var(*span, f"{name} {i} {u}") for i in slots for u in units}
    for (i, u), begin in start.items():
        model.add(begin >= -head)
        for j in pipelines:
            here = on[i, j]
            rows[j, stage[u], resource[u]].append(
                model.new_optional_fixed_size_interval_var(begin, work[j][u], here, f"{i} {u} {j}")
            )
            model.add(begin + work[j][u] <= end).only_enforce_if(here)
            if u:
                ready = start[i, u - 1] + work[j][u - 1] + side["lag"][j][u]
                model.add(begin >= ready).only_enforce_if(here)
            if name == "forward" and u == units[-1]:
                arrive = begin + work[j][u] + side["edge"][j]
                model.add(arrive <= given["deadline"][i]).only_enforce_if(here)
            if name == "backward" and u == 0:
                ready = given["release"][i] + side["edge"][j]
                model.add(begin >= ready).only_enforce_if(here)
    for s, r in itertools.product(range(given["stages"]), range(2)):
        mine = [u for u in units if stage[u] == s and resource[u] == r]
        if mine:
            for (i, k), j in itertools.product(itertools.combinations(slots, 2), pipelines):
                done = start[i, mine[-1]] + work[j][mine[-1]]
                model.add(start[k, mine[0]] >= done).only_enforce_if(on[i, j], on[k, j])
    return start


def _cap(model: Any, given: dict[str, Any], on: Any, starts: list[Any]) -> None:
    """A forward ends after the backward of the job ``cap`` places before it on the pipeline."""
    forward, backward = (given[name]["duration"] for name in ("forward", "backward"))
    for i, k in itertools.combinations(range(given["slots"]), 2):
        if k - i < given["cap"]:
            continue
        for j in range(given["pipelines"]):
            full = model.new_bool_var(f"full {i} {k} {j}")
            between = sum(on[x, j] for x in range(i, k))
            model.add(between <= given["cap"] - 1).only_enforce_if(full.negated())
            last_f, last_b = len(forward[j]) - 1, len(backward[j]) - 1
            model.add(
                starts[0][k, last_f] + forward[j][last_f]
                >= starts[1][i, last_b] + backward[j][last_b]
            ).only_enforce_if(full, on[i, j], on[k, j])
