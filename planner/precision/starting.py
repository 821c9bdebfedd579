"""Starting plans: every device at the uniform precision that is fastest on it within its memory.

They take prices and sizes alone, so that a device that holds no plan is refused before minutes go
into an indicator.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from foreplan.cost_models.schedule import IntArray
from foreplan.errors import InfeasibleError
from foreplan.planner.precision.allocation import MEMORY, Allocation
from foreplan.planner.precision.situation import Situation, least_seconds
from foreplan.solvers.choice_problem import ChoiceProblem
from foreplan.solvers.multiple_choice import solve
from foreplan.solvers.solution import Solution

#: Rounds of tightening, and relative gap at which the solver stops.
ROUNDS, GAP = 8, 1e-4


def starting_plans(situation: Situation) -> list[IntArray]:
    """One a kind of devices: the fastest uniform plan that fits, else the fastest mixture.

    Raises:
        InfeasibleError: nothing fits.
    """
    allocations = situation.allocations({})
    return [_start(situation, k, allocation) for k, allocation in enumerate(allocations)]


def fastest_plan(
    situation: Situation, kind: int, allocation: Allocation, room: float
) -> IntArray | None:
    """The plan whose passes take least, by the solver; ``None`` if it finds none.

    Args:
        situation: of the devices.
        kind: which of them.
        allocation: theirs.
        room: bytes that saved tensors may take, by the linear form of `SavedBytes`.
    """
    found = _solved(situation, allocation.problem(math.inf, 0.0, room, fastest=True))
    return None if found.value is None else np.array(found.value)


def _start(situation: Situation, kind: int, allocation: Allocation) -> IntArray:
    device, limit = situation.devices[kind], situation.saved_limit(kind)
    uniform = [situation.uniform(kind, word) for word in situation.workload.precisions]
    fitting = [c for c in uniform if device.saved.held_bytes(c).sum() <= limit]
    if fitting:
        return least_seconds(fitting, device)
    room = float(limit)
    for _ in range(ROUNDS):
        choice = fastest_plan(situation, kind, allocation, room)
        if choice is None:
            break
        excess = float(device.saved.held_bytes(choice).sum()) - limit
        if excess <= 0:
            return choice
        room -= excess
    situation.check_memory(kind, _least_saved(situation, kind, allocation))
    raise InfeasibleError(
        f"no plan was found that fits {situation.ranks[situation.kinds[kind][0]].label}",
        fix="lower the batch a little, or give more memory",
    )


def _least_saved(situation: Situation, kind: int, allocation: Allocation) -> float:
    """Fewest saved bytes of any plan: by the solver, else of the uniform plans."""
    problem = allocation.problem(math.inf, 0.0, math.inf, fastest=True)
    row = problem.row(MEMORY)
    by_memory = dataclasses.replace(
        problem,
        items=tuple(dataclasses.replace(i, values=i.weights[:, row]) for i in problem.items),
        pairs=tuple(dataclasses.replace(p, values=p.weights[..., row]) for p in problem.pairs),
    )
    solution = _solved(situation, by_memory)
    saved = situation.devices[kind].saved
    found = [situation.uniform(kind, precision) for precision in situation.workload.precisions]
    if solution.value is not None:
        found.append(np.array(solution.value))
    return float(min(saved.held_bytes(choice).sum() for choice in found))


def _solved(situation: Situation, problem: ChoiceProblem) -> Solution[tuple[int, ...]]:
    return solve(problem, gap=GAP, max_nodes=situation.workload.max_nodes)
