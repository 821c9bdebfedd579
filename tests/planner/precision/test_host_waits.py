"""Steps on a pretended GPU whose host is slow: replay, schedule and search agree on the waiting."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from foreplan.cost_models.costs import CostBook, Estimate, HostWait
from foreplan.cost_models.simulator import simulate
from foreplan.datasets.program import Program
from foreplan.planner.precision.allocation import HOST
from foreplan.planner.precision.planner import PrecisionPlanner
from foreplan.planner.precision.situation import Situation
from foreplan.solvers.choice_score import evaluate

#: Seconds of the device for each FLOP, by dtype of the product.
PER_FLOP = {"fp32": 8e-12, "bf16": 2e-12}


class Gpu:
    """Made-up prices of a device and of the host that issues its works.

    Args:
        call_s: of the host; low precision asks for twice as many calls.
        once_s: around the calls of a part.
    """

    def __init__(self, call_s: float, once_s: float) -> None:
        self.call_s, self.once_s = call_s, once_s

    def estimate(self, work: object, device: str) -> Estimate | None:
        if isinstance(work, Program):
            return Estimate.exact(1e-7 + PER_FLOP.get(work.variant.compute, 8e-12) * work.flops)
        return Estimate.exact(1e-6)

    def issuing(self, work: HostWait, device: str) -> Estimate | None:
        calls = sum(
            (1 + (isinstance(item, Program) and item.variant.compute == "bf16")) * count
            for item, count in work.works
        )
        return Estimate.exact(self.call_s * calls + self.once_s * work.share)


@pytest.fixture
def situated(make_problem):
    problem = make_problem("2xh100-80g", precisions=("fp32", "bf16"), indicator="uniform")

    def make(call_s: float, once_s: float, steps: int = 1) -> Situation:
        workload = problem.workload.model_copy(update={"steps": steps})
        costs = CostBook([Gpu(call_s, once_s)])
        return Situation(dataclasses.replace(problem, workload=workload, costs=costs))

    return make


def drawn(situation: Situation, rng: np.random.Generator):
    tables = situation.devices[0].tables
    names = {
        tables.graph.operators[i].module: str(rng.choice([p.name for p in tables.options[i]]))
        for i in tables.graph.adjustable
    }
    return situation.each([tables.choice(names)])


@pytest.mark.parametrize(
    ("call_s", "once_s"), [(1e-9, 0.0), (3e-4, 1e-3), (1e-3, 1e-2), (1e-9, 1e-2)]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_replay_is_the_simulation_of_the_schedule(
    situated, call_s: float, once_s: float, steps: int
) -> None:
    situation, free = situated(call_s, once_s, steps), situated(0.0, 0.0, steps)
    rng = np.random.default_rng(1)
    for _ in range(4):
        choices = drawn(situation, rng)
        full = simulate(situation.replay.schedule(choices, steps), situation.problem.costs)
        replayed = situation.replay.run(choices)
        assert replayed.iteration_s == pytest.approx(full.makespan_s / steps, rel=1e-9)
        assert replayed.iteration_s >= free.replay.run(choices).iteration_s * (1 - 1e-12)


def test_a_host_that_decides_is_what_a_step_takes(situated) -> None:
    situation = situated(1e-3, 1e-2)
    parts = [situation.uniform(0, "fp32"), situation.uniform(0, "bf16")]
    forward, backward = situation.devices[0].seconds(parts[0])
    count = len([o for o in situation.devices[0].tables.options if o[0].forward])
    assert forward == pytest.approx(1e-2 + 1e-3 * count)
    assert sum(backward) > 1e-2
    plain, low = (situation.replay.run(situation.each([part])).iteration_s for part in parts)
    assert low > plain, "casts are calls, too"


@pytest.mark.parametrize("call_s", [1e-9, 3e-4, 1e-3])
def test_a_plan_meets_the_target_with_what_it_waits(make_problem, situated, call_s: float) -> None:
    problem = situated(call_s, 1e-5).problem
    found = PrecisionPlanner().decide(problem).decision
    situation = Situation(problem)
    taken = situation.replay.run(situation.choices(found)).iteration_s
    assert taken <= found.target_s * (1 + 1e-6)


@pytest.mark.parametrize("call_s", [3e-4, 1e-3])
def test_the_solvers_row_of_the_host_is_a_bound_of_what_a_step_takes(
    situated, call_s: float
) -> None:
    situation = situated(call_s, 1e-3)
    allocation = situation.allocations(_no_omega(situation))[0]
    update_s = float(situation.replay.update_s[0])
    rng = np.random.default_rng(2)
    tightest = 0.0
    for _ in range(8):
        choices = drawn(situation, rng)
        taken_s = situation.replay.run(choices).iteration_s
        problem = allocation.problem(taken_s, update_s, float("inf"))
        assert problem.rows[-2] == HOST
        found = evaluate(problem, tuple(int(c) for c in choices[0]))
        assert found.feasible, "the very step that took so long"
        tightest = max(tightest, found.usage[-2] / problem.limits[-2])
    assert tightest > 0.9, "where the host decides, the row nearly does"


def test_without_a_known_host_there_is_no_row_of_it(make_problem) -> None:
    problem = make_problem("2xh100-80g", precisions=("fp32", "bf16"), indicator="uniform")
    situation = Situation(problem)
    (allocation,) = situation.allocations(_no_omega(situation))
    assert HOST not in allocation.problem(1.0, 0.0, 1e9).rows


def _no_omega(situation: Situation) -> dict[str, dict[str, float]]:
    tables = situation.devices[0].tables
    return {
        tables.graph.operators[i].module: {p.name: 0.0 for p in tables.options[i]}
        for i in tables.graph.adjustable
    }
