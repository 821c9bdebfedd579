"""``foreplan verify`` of bubble plans: pinned processes, memory caps, equal to one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bubble_cases as cases

from foreplan.cost_models.costs import CostBook, Estimate, Work
from foreplan.planner.base import Problem
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.baselines import balanced
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.plan import (
    Alternative,
    Plan,
    Provenance,
    ProvenBound,
    VerifyHints,
)
from foreplan.planner.predict import Forecast
from foreplan.planner.report.files import timelines
from foreplan.planner.sureness import Confidence
from foreplan.planner.times import Times
from foreplan.planner.verify.verify import verify


class Everything:
    """Prices whatever is asked at a millisecond."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        return Estimate.exact(1e-3)


def plan_of(
    problem: Problem[BubblesWorkload], chosen: BubblesDecision, others: dict[str, BubblesDecision]
) -> Plan:
    def forecast(decision: BubblesDecision) -> Forecast:
        return Forecast(BubblesPlanner(), problem, decision)

    main = forecast(chosen)
    return Plan(
        kind="bubbles", model=None, cluster=problem.cluster, predicted=main.prediction(),
        workload=problem.workload.model_dump(mode="json"),
        decision=chosen.model_dump(mode="json"), times=Times.of(main.timeline),
        alternatives=tuple(
            Alternative(
                name=name, decision=decision.model_dump(mode="json"),
                predicted=forecast(decision).prediction(),
            )
            for name, decision in others.items()
        ),
        confidence=Confidence(probability_best=1.0, draws=1),
        bound=ProvenBound(status="heuristic", lower_s=None, gap=None, solver="hand"),
        verify=VerifyHints(backend="gloo", ranks=2, tolerance=1e6),
        provenance=Provenance(foreplan="0", costs="measured", seed=problem.seed),
    )  # fmt: skip


def test_every_lane_of_a_rank_is_a_process() -> None:
    made = cases.problem(2, [cases.encoder()], sharded_optimizer=False)
    problem = replace(made, costs=CostBook([Everything()]))
    options: dict[str, Any] = {"ranks": 1, "encoder_ranks": [[[0]]], "tp": 2}
    split = cases.decision(problem, "1f1b", pieces=1, **options)
    whole = cases.decision(problem, "1f1b", **options)
    plan = plan_of(problem, split, {"whole": whole})
    document = verify(plan, rounds=1).document
    assert document is not None
    assert document.passed
    predicted, measured = timelines(plan, document)
    assert predicted is not None
    assert measured is not None
    assert (predicted.schedule.ranks, measured.schedule.ranks) == (1, 2)
    assert all(one.failure is None for one in document.candidates)
    first, second = document.chosen.ranks
    assert first.device != second.device
    # Both lanes do what the plan says of their pipeline rank.
    assert first.predicted_s == second.predicted_s
    assert {p.op: p.predicted_s for p in first.phases} == {
        p.op: p.predicted_s for p in second.phases
    }
    assert all(a.details["largest_gradient_difference"] < 1e-5 for a in document.agreement)


def test_a_rank_may_have_encoder_layers_alone_where_passes_are_split() -> None:
    made = cases.problem(2, [cases.encoder()])
    problem = replace(made, costs=CostBook([Everything()]))
    step = TrainingStep(problem, BackbonePlan(pp=2))
    chain = balanced(step, problem.costs, "zb-h1", 4, 1, cuts=[0, 2, 6])
    assert [stage.rank for stage in chain.stages] == [1]
    document = verify(plan_of(problem, chain, {}), rounds=1).document
    assert document is not None
    assert document.passed
    assert [(a.mode, a.exact) for a in document.agreement] == [("fast", True)]


def test_ranks_run_on_the_devices_that_their_order_says() -> None:
    problem = replace(cases.problem(2, [cases.encoder()]), costs=CostBook([Everything()]))
    made = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]])
    turned = made.model_copy(update={"plan": made.plan.model_copy(update={"device_order": (1, 0)})})
    document = verify(plan_of(problem, turned, {"in order": made}), rounds=1).document
    assert document is not None
    assert document.passed
    labels = [rank.label for rank in problem.cluster.ranks()]
    assert [rank.device for rank in document.chosen.ranks] == labels[::-1]
    assert [(a.mode, a.exact) for a in document.agreement] == [("fast", True)]


def test_verify_runs_the_plan_and_its_baselines_and_finds_them_exact() -> None:
    problem = replace(cases.problem(2, [cases.encoder()]), costs=CostBook([Everything()]))
    rows = [[[0], [1]]]
    filled = cases.decision(problem, "interleaved-1f1b", ranks=2, chunks=2, encoder_ranks=rows)
    others = {
        "three phases": cases.decision(
            problem, "1f1b", ranks=2, encoder_ranks=rows, fill="three-phase"
        ),
        "on the first stage": cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]]]),
    }

    plan = plan_of(problem, filled, others)
    document = verify(plan, rounds=1).document
    assert document is not None
    assert document.passed
    assert [(a.mode, a.exact) for a in document.agreement] == [("fast", True)]
    assert all(a.details["gradient_elements"] > 10_000 for a in document.agreement)
    found = [(one.name, one.failure) for one in document.candidates]
    assert found == [(name, None) for name in ("chosen", *others)]
    ops = {phase.op for phase in document.chosen.ranks[0].phases}
    assert {"F", "B", "encode", "encode_backward", "optimizer"} <= ops
    # What the ledger names is what the kernels report, so that the two can be compared.
    held = {item.item: item for item in document.chosen.ranks[0].memory}
    for name in ("weights", "encoder_gradients", "optimizer", "encoder_optimizer"):
        assert held[name].held_bytes
