"""Why no assignment of a chain problem is feasible, and by how much.

Asked in the order in which a user would mend it: can the devices run and reach each other at all,
does the least memory fit, can each budget be met within memory, can both be met together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from foreplan.solvers._chain_driver import timeless
from foreplan.solvers._chain_path import cheapest_path
from foreplan.solvers._stage_modes import modes_of, stage_sums
from foreplan.solvers.chain_partition import solve
from foreplan.solvers.chain_problem import ChainProblem, FloatArray
from foreplan.solvers.chain_score import ChainAssignment, evaluate
from foreplan.solvers.solution import Solution


class Obstacle(StrEnum):
    """What stands in the way first."""

    NONE = "none"
    """Something is feasible."""
    AVAILABILITY = "availability"
    """Even with endless memory no chain of devices can run every layer."""
    MEMORY = "memory"
    """At every layer's least memory the layers still don't fit."""
    OMEGA = "omega"
    """Within memory the least omega is above its budget."""
    COST2 = "cost2"
    """Within memory the least cost2 is above its budget."""
    BOTH_BUDGETS = "both budgets"
    """Each budget can be met, not both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainDiagnosis:
    """The first obstacle, in bytes or in the budget's unit.

    Attributes:
        obstacle: what stands in the way.
        need: least that any assignment needs: bytes on the devices that it uses, or the budgeted
            cost. With ``both budgets`` it is omega.
        available: what there is: bytes of those devices, or the budget.
        excess: the least possible shortage. For memory the sum over stages of what each lacks,
            which can be positive though the total would fit.
        stages: for memory, (type, start, end, bytes needed, bytes available) of each stage of the
            assignment that lacks least.
        message: one line for a person.
    """

    obstacle: Obstacle
    need: float = math.nan
    available: float = math.nan
    excess: float = 0.0
    stages: tuple[tuple[int, int, int, float, float], ...] = ()
    message: str


def diagnose(problem: ChainProblem, *, max_evaluations: int = 20_000) -> ChainDiagnosis:
    """Find the first obstacle to feasibility.

    Args:
        problem: the instance.
        max_evaluations: of each budget question; if they do not suffice, ``need`` and ``excess``
            are those of the best assignment found.

    Returns:
        The diagnosis; ``Obstacle.NONE`` if no obstacle was found.

    Raises:
        SpecError: too many different devices, as in ``solve``.
    """
    runs = _least_shortage(problem, with_memory=False)
    if runs is None:
        return ChainDiagnosis(
            obstacle=Obstacle.AVAILABILITY, message=_unavailable(problem), excess=math.inf
        )
    memory = _least_shortage(problem, with_memory=True)
    if memory is not None and memory[0] > 0:
        return _memory_diagnosis(problem, *memory)
    both = problem.max_omega is not None and problem.max_cost2 is not None
    for obstacle, question, value, limit in (
        (
            Obstacle.OMEGA,
            timeless(problem, problem.omega, None),
            lambda a: evaluate(problem, a).omega,
            problem.omega_limit,
        ),
        (
            Obstacle.COST2,
            timeless(problem, problem.cost2 - problem.cost2.min(axis=1)[:, None], None),
            lambda a: evaluate(problem, a).cost2,
            problem.cost2_limit,
        ),
        (
            Obstacle.BOTH_BUDGETS,
            timeless(problem, problem.omega, problem.max_cost2 if both else None),
            lambda a: evaluate(problem, a).omega,
            problem.omega_limit if both else math.inf,
        ),
    ):
        if limit < math.inf:
            solution = solve(question, max_evaluations=max_evaluations)
            found = _budget_diagnosis(problem, obstacle, solution, value, limit)
            if found is not None:
                return found
    return ChainDiagnosis(obstacle=Obstacle.NONE, message="no limit stands in the way")


def _budget_diagnosis(
    problem: ChainProblem,
    obstacle: Obstacle,
    solution: Solution[ChainAssignment],
    value: Callable[[ChainAssignment], float],
    limit: float,
) -> ChainDiagnosis | None:
    if solution.value is None:
        return None
    need = value(solution.value)
    if need <= limit:
        return None
    budget = problem.max_cost2 if obstacle is Obstacle.COST2 else problem.max_omega
    assert budget is not None
    name = "cost2" if obstacle is Obstacle.COST2 else "omega"
    under = " that meets the cost2 budget" if obstacle is Obstacle.BOTH_BUDGETS else ""
    return ChainDiagnosis(
        obstacle=obstacle,
        need=need,
        available=budget,
        excess=need - budget,
        message=(
            f"the least {name} of any assignment that fits in memory{under} is {need:.6g}, "
            f"{need - budget:.6g} above its budget of {budget:.6g}"
        ),
    )


def _least_shortage(
    problem: ChainProblem, *, with_memory: bool
) -> tuple[float, list[tuple[int, int, int]], FloatArray] | None:
    """Chain that lacks the fewest bytes, at every layer's least memory.

    Returns:
        Bytes short, (type, start, end) of its stages and the need ``[K, L, L+1]`` of every stage;
        ``None`` if no chain can run at all.
    """
    n_layers = problem.n_layers
    # Without capacity the room of a stage is what it needs beside its layers.
    empty = replace(problem, capacity_bytes=np.zeros(problem.n_types))
    modes = modes_of(empty, every=True)
    layers = np.where(modes.allowed, problem.memory_bytes[modes.of], math.inf).min(axis=2)
    need = modes.least(stage_sums(layers) - modes.room)
    runs = np.isfinite(need)
    for edge, at in (("first", np.s_[:, 0]), ("last", np.s_[:, :, -1])):
        times = getattr(problem, f"{edge}_prefill_s") + getattr(problem, f"{edge}_decode_s")
        runs[at] &= np.isfinite(times)[:, None]
    lacking = np.zeros_like(need)
    if with_memory:
        finite = np.where(np.isfinite(need), need, 0.0)
        lacking = np.maximum(finite - problem.capacity_limit_bytes[:, None, None], 0.0)
    arc = np.where(runs & np.isfinite(need), lacking, math.inf)
    linked = np.isfinite(problem.link_prefill_s) & np.isfinite(problem.link_decode_s)
    hop = np.where(linked, 0.0, math.inf)
    back = np.where(np.isfinite(problem.link_return_decode_s), 0.0, math.inf)
    by_first = bool(np.any(back != back[:, :1]))
    counts = np.minimum(problem.counts, n_layers)
    short, path, _ = cheapest_path(arc, hop, back, by_first, counts)
    if short == math.inf:
        return None
    return short, [(k, a, b) for k, a, b in path.tolist()], need


def _memory_diagnosis(
    problem: ChainProblem,
    short: float,
    path: list[tuple[int, int, int]],
    need: FloatArray,
) -> ChainDiagnosis:
    stages = tuple(
        (k, a, b, float(need[k, a, b]), float(problem.capacity_bytes[k])) for k, a, b in path
    )
    worst = max(stages, key=lambda stage: stage[3] - stage[4])
    return ChainDiagnosis(
        obstacle=Obstacle.MEMORY,
        need=sum(stage[3] for stage in stages),
        available=sum(stage[4] for stage in stages),
        excess=short,
        stages=stages,
        message=(
            f"at every layer's least memory the best split still lacks {short:.0f} bytes; its "
            f"stage of layers {worst[1]}..{worst[2] - 1} on type {worst[0]} needs {worst[3]:.0f} "
            f"bytes, the device has {worst[4]:.0f}"
        ),
    )


def _unavailable(problem: ChainProblem) -> str:
    there = problem.counts > 0
    if not there.any():
        return "there are no devices"
    nowhere = np.flatnonzero(~problem.available[there].any(axis=(0, 2)))
    if len(nowhere):
        return f"no device has a variant for layer {int(nowhere[0])}"
    return "no chain of linked devices has a variant for every layer"
