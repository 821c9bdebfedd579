"""What others would do: one precision for everything, QSync's heap, random order.

All use the quickest kernel of a precision on each device and the same limits; one that misses them
is shown, but cannot be the plan.
"""

from __future__ import annotations

import numpy as np

from foreplan.cost_models.schedule import IntArray
from foreplan.planner.precision.pricing import StepTables
from foreplan.planner.precision.search import PrecisionSearch
from foreplan.planner.precision.spec import PrecisionDecision
from foreplan.solvers.choice_heap import solve_heap
from foreplan.solvers.choice_score import evaluate


def precision_baselines(search: PrecisionSearch, seed: int) -> dict[str, PrecisionDecision | str]:
    """Baselines by name, or why one has no feasible form.

    Args:
        search: with its starting plan and target.
        seed: of the random orders.
    """
    s = search.situation
    kinds = range(len(s.kinds))
    plans: dict[str, list[IntArray] | str] = {
        f"uniform {precision}": [s.uniform(k, precision) for k in kinds]
        for precision in s.workload.precisions
    }
    plans["fastest uniform, device by device"] = search.start
    plans["heap, as QSync"] = _heap(search)
    plans["random order"] = _random_order(search, seed)
    made: dict[str, PrecisionDecision | str] = {}
    for name, plan in plans.items():
        if isinstance(plan, str):
            made[name] = plan
            continue
        replayed = s.replay.run(s.each(plan))
        decision = s.decision(
            plan, search.omega, search.target_s, limits_met=search.meets(replayed)
        )
        same = (
            n for n, d in made.items()
            if isinstance(d, PrecisionDecision) and d.workers == decision.workers
        )  # fmt: skip
        twin = next(same, None)
        made[name] = decision if twin is None else f"the same decision as {twin}"
    return made


def _heap(search: PrecisionSearch) -> list[IntArray] | str:
    """QSync's rule: raise the operator whose omega falls most, as long as the limits hold."""
    plan = []
    for k, start in enumerate(search.start):
        problem = search.problem(k, search.target_s)
        given = tuple(int(c) for c in start)
        solution = solve_heap(problem, given if evaluate(problem, given).feasible else None)
        if solution.value is None:
            return "no feasible plan to start from"
        plan.append(np.array(solution.value))
    return plan


def _random_order(search: PrecisionSearch, seed: int) -> list[IntArray]:
    """Modules of all devices raised to fp32 in random order while the replay meets the limits.

    Again and again until none can be: what one saves (a cast less) may let another one in.
    """
    s = search.situation
    plan = list(search.start)
    pairs = [
        (k, m) for k in range(len(s.kinds)) for m in sorted(s.devices[k].tables.names(plan[k]))
    ]
    order = [pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))]
    raised = True
    while raised:
        raised = False
        for k, module in order:
            tables = s.devices[k].tables
            names, top = tables.names(plan[k]), _full(tables, module)
            if names[module] == top:
                continue
            trial = [*plan[:k], tables.choice({**names, module: top}), *plan[k + 1 :]]
            if search.meets(s.replay.run(s.each(trial))):
                plan, raised = trial, True
    return plan


def _full(tables: StepTables, module: str) -> str:
    """Variant of a module in fp32, which stands first."""
    o = next(i for i in tables.graph.adjustable if tables.graph.operators[i].module == module)
    return tables.options[o][0].name
