"""What the planner decides and what it compares with is computed as one process computes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bubble_cases as cases
import pytest

from foreplan.cost_models.costs import CostBook, Estimate, HostLaunch, Work
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.entry import compare_steps, rank_kernels, reference_step
from foreplan.planner.bubbles.execution.one_process import OneProcess
from foreplan.planner.bubbles.recompute import candidates, stamped, under


class MadeUp:
    """A price for whatever is asked."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        return Estimate.exact(0.0 if isinstance(work, HostLaunch) else 1e-3)


@pytest.mark.parametrize(
    ("encoders", "fields"),
    [
        ([cases.encoder()], {"plan": {"pp": 2, "chunks": 2}}),
        ([cases.encoder(frozen=True)], {"plan": {"pp": 2, "chunks": 1}}),
        ([cases.encoder(), cases.encoder("audio")], {"plan": {"pp": 4}, "schedule": "zb-h1"}),
        ([cases.encoder(recompute=True)], {"plan": {"pp": 4, "chunks": 1}, "recompute": "full"}),
        ([cases.encoder(recompute="auto")], {"plan": {"pp": 2}, "recompute": "auto"}),
    ],
)
def test_every_decision_of_the_planner_computes_the_same_step(
    encoders: list[Any], fields: dict[str, Any]
) -> None:
    ranks = fields["plan"]["pp"]
    problem = replace(cases.problem(ranks, encoders, **fields), costs=CostBook([MadeUp()]))
    planner = BubblesPlanner()
    decisions: dict[str, BubblesDecision | str] = {"chosen": planner.decide(problem).decision}
    decisions |= planner.baselines(problem)
    run = {name: made for name, made in decisions.items() if not isinstance(made, str)}
    assert "chosen" in run
    assert len(run) > 1
    for name, decision in run.items():
        kernels = [
            rank_kernels(problem, decision, rank, mode="fast") for rank in range(decision.plan.pp)
        ]
        process = OneProcess(planner.schedule(problem, decision), kernels)
        process.step()
        reference = planner.reference(problem, decision, mode="fast")
        assert reference == reference_step(problem, decision, mode="fast")
        agreed = compare_steps(process.result(), reference)
        assert agreed.passed, (name, decision.orders, agreed.details)
        assert agreed.details["largest_gradient_difference"] < 1e-5


def test_each_recomputation_that_is_searched_gives_the_same_step_bit_for_bit() -> None:
    asked = cases.problem(2, [cases.encoder(recompute="auto")], plan={"pp": 2}, recompute="auto")
    problem, planner, losses = replace(asked, costs=CostBook([MadeUp()])), BubblesPlanner(), set()
    open_, _ = candidates(problem)
    assert len(open_) == 4
    for chosen in open_:
        one = planner.decide(under(problem, chosen)).decision
        decision = stamped(one, chosen)
        kernels = [rank_kernels(problem, decision, rank, mode="fast") for rank in (0, 1)]
        process = OneProcess(planner.schedule(problem, decision), kernels)
        process.step()
        found = process.result()
        assert compare_steps(found, planner.reference(problem, decision, mode="fast")).exact
        losses.add(tuple(sorted((k, v) for k, v in found.items() if k.startswith("loss"))))
    assert len(losses) == 1
