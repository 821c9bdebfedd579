"""`check_planner`: what planning, simulation and verification take for granted about a planner."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from foreplan.cost_models.costs import CostBook, HostLaunch
from foreplan.cost_models.schedule import Action, Schedule
from foreplan.datasets.specs import StrictModel, validate
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Bound, Choice, Planner, Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.verify.rank_program import rank_programs
from foreplan.testing.contract import ContractError, require

_STATUSES = ("optimal", "feasible", "heuristic")


def check_planner(planner: Planner[Any, Any], problem: Problem[Any]) -> Choice[Any]:
    """Decide a problem and check everything that is made from the decision.

    Decisions and workloads survive JSON; deciding twice gives the same; every decision, baselines
    included, becomes a schedule that can be priced, simulated to its end and carried out by the
    runtime (every send has its receive, no rank waits for ever), the same one in a process that
    knows no costs; memory is accounted for on every rank, and the choice itself fits.

    It starts no process. What the kernels compute is checked by a real run:
    ``foreplan verify`` or `foreplan.verify`.

    Args:
        planner: what is checked.
        problem: a feasible one, small enough to be decided in seconds.

    Returns:
        The planner's choice, for further assertions.

    Raises:
        ContractError: a promise does not hold.
        ForeplanError: the planner refuses the problem; choose another.
    """
    name = type(planner).__name__
    _check_declared(planner, problem, name)
    before = _state(problem)
    choice = planner.decide(problem)
    require(isinstance(choice, Choice), f"{name}.decide", "returns a Choice", choice)
    _check_document(planner.decision_type, choice.decision, f"{name}.decide")
    again = planner.decide(problem).decision
    require(again == choice.decision, f"{name}.decide", "decides the same twice", again)
    _check_bound(choice.bound, f"{name}.decide")
    _check_decision(planner, problem, choice.decision, f"{name}.decide", must_fit=True)
    judged = planner.judged(problem, choice.decision)
    require(judged == choice.decision, f"{name}.judged", "leaves its own decision alone", judged)
    for baseline, decision in planner.baselines(problem).items():
        who = f"{name}.baselines[{baseline!r}]"
        if isinstance(decision, str):
            require(bool(decision.strip()), who, "says why it is not feasible", decision)
            continue
        _check_document(planner.decision_type, decision, who)
        _check_decision(planner, problem, decision, who, must_fit=False)
    require(_state(problem) == before, name, "leaves the problem as it was", "a changed problem")
    return choice


def _check_declared(planner: Planner[Any, Any], problem: Problem[Any], name: str) -> None:
    kind = getattr(planner, "kind", "")
    word = isinstance(kind, str) and kind.replace("-", "").replace("_", "").isalnum()
    require(word, name, "has a kind that is one word", kind)
    for field in ("workload_type", "decision_type"):
        declared: Any = getattr(planner, field, None)
        strict = isinstance(declared, type) and issubclass(declared, StrictModel)
        require(strict, f"{name}.{field}", "is a foreplan.StrictModel", declared)
        declared.model_json_schema()  # launchers validate by it
    require(
        not planner.needs_model or problem.model is not None, f"{name}.needs_model",
        "is false where a problem has no model", problem.model,
    )  # fmt: skip
    _check_document(planner.workload_type, problem.workload, f"{name}.workload_type")


def _check_document(kind: type[StrictModel], record: Any, who: str) -> None:
    require(isinstance(record, kind), who, f"gives a {kind.__name__}", record)
    document = json.loads(json.dumps(record.model_dump(mode="json"), allow_nan=False))
    try:
        read = validate(kind, document, who)
    except SpecError as error:
        raise ContractError(who, "gives a record that its own type reads back", error) from None
    require(read == record, who, "gives a record that reads back equal from JSON", read)


def _check_bound(bound: Bound, who: str) -> None:
    require(bound.status in _STATUSES, who, f"has a status of {', '.join(_STATUSES)}", bound)
    for value in (bound.lower_s, bound.gap):
        sound = value is None or (math.isfinite(value) and value >= 0)
        require(sound, who, "proves a finite bound, at least 0, or none", bound)
    require(bound.gap is None or bound.gap <= 1, who, "has a gap of at most 1", bound)
    proven = bound.status != "optimal" or (bound.gap is not None and bound.gap <= 1e-6)
    require(proven, who, "has a gap of 0 where it says optimal", bound)


def _check_decision(
    planner: Planner[Any, Any], problem: Problem[Any], decision: Any, who: str, *, must_fit: bool
) -> None:
    name = type(planner).__name__
    schedule = planner.schedule(problem, decision)
    ranks, places = planner.ranks(problem, decision), len(problem.cluster.ranks())
    sound = len(ranks) == schedule.ranks == len(set(ranks)) and set(ranks) <= set(range(places))
    require(sound, f"{name}.ranks", "names one device of the cluster for each rank", ranks)
    occupied = planner.occupied(problem, decision)
    require(set(ranks) <= set(occupied), f"{name}.occupied", "contains the ranks", occupied)
    blind = dataclasses.replace(problem, costs=CostBook(()))
    same = _steps(planner.schedule(blind, decision)) == _steps(schedule)
    require(same, f"{name}.schedule", "has the same steps in a process without costs", decision)
    seats, count = planner.real(problem, decision)[1], planner.processes(blind, decision)
    require(count == len(seats), f"{name}.processes", "counts the processes of a run", count)
    forecast = Forecast(planner, problem, decision)  # prices, simulates, accounts
    total = forecast.total_s
    require(math.isfinite(total) and total > 0, who, "takes a positive, finite time", total)
    for metric, value in forecast.metrics.items():
        require(math.isfinite(value), f"{name}.metrics", f"has a finite {metric}", value)
    for ordered in (False, True):  # gloo matches transfers by tag, NCCL by their order
        rank_programs(schedule, ordered=ordered)
    if must_fit:
        try:
            for rank, ledger in enumerate(forecast.ledgers):
                ledger.check(rank)
        except InfeasibleError as error:
            raise ContractError(who, "fits every device's memory", error) from None


def _steps(schedule: Schedule) -> list[Action]:
    """What the runtime goes by; what a step costs and how it is slowed is the simulator's."""
    plain = HostLaunch(0)
    return [dataclasses.replace(a, work=plain, pressure=0.0, memory=None) for a in schedule]


def _state(problem: Problem[Any]) -> tuple[str | None, ...]:
    parts = (problem.model, problem.cluster, problem.workload)
    return tuple(None if part is None else part.model_dump_json() for part in parts)
