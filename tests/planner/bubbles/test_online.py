"""Measured steps fed back: prices are scaled, orders change where that pays, parameters stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.costs import Collective, CostBook, Estimate, HostLaunch, Work
from foreplan.cost_models.simulator import Simulator, simulate
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.online import Kind, OnlinePlanner, ScaledBook
from foreplan.planner.bubbles.spec import BubblesWorkload


class Priced:
    def estimate(self, work: Work, device: str) -> Estimate | None:
        return Estimate.exact(0.0 if isinstance(work, HostLaunch) else 1e-3)


EXCHANGE_S = 1e-2


class SlowLink(Priced):
    def estimate(self, work: Work, device: str) -> Estimate | None:
        return (
            Estimate.exact(EXCHANGE_S)
            if isinstance(work, Collective)
            else super().estimate(work, device)
        )


def problem_of() -> Problem[BubblesWorkload]:
    dims = {"layers": 4, "hidden": 64, "heads": 2}
    workload = validate(BubblesWorkload, {
        "encoders": [{"name": "vit", "dims": dims | {"layers": 2}, "tokens": 8}],
        "backbone": dims | {"vocab": 50}, "sequence_length": 16, "microbatches": 6,
        "plan": {"pp": 2}, "unit_layers": [0.5],
    }, "workload")  # fmt: skip
    devices = [{"name": "cpu:threads=1", "count": 2, "memory_bytes": 1 << 30}]
    cluster = validate(Cluster, {"devices": devices}, "cluster")
    return Problem(None, cluster, workload, CostBook([Priced()]))


PROBLEM = problem_of()
PLANNER = BubblesPlanner()
DECISION = PLANNER.decide(PROBLEM).decision
SLOW, FAST = "localhost/cpu:threads=1#1", "localhost/cpu:threads=1#0"


def measured(decision: BubblesDecision, factors: dict[Kind, float]) -> Timeline:
    """A step whose works take longer than priced."""
    book = ScaledBook(PROBLEM.costs, factors)
    return simulate(PLANNER.schedule(PROBLEM, decision), book)


def everything(device: str, factor: float) -> dict[Kind, float]:
    return {(device, op): factor for op in ("F", "B", "encode", "encode_backward")}


def test_a_rehearsal_changes_nothing() -> None:
    online, other = (OnlinePlanner(PROBLEM, DECISION, patience=1) for _ in range(2))
    online.rehearse()
    assert (online.decision, online.factors) == (DECISION, {})
    slow = measured(DECISION, everything(SLOW, 2.0))
    assert online.observe(slow) == other.observe(slow)


def test_a_slow_rank_gets_a_new_order_once_it_has_lasted() -> None:
    online = OnlinePlanner(PROBLEM, DECISION, patience=3)
    slow = everything(SLOW, 2.0)
    seen = [online.observe(measured(DECISION, slow)) for _ in range(3)]
    assert seen[:2] == [None, None]
    found = seen[2]
    assert found is not None
    assert found.factors[SLOW, "encode"] == pytest.approx(2.0)
    assert found.factors[FAST, "F"] == pytest.approx(1.0)
    assert found.before_s == pytest.approx(measured(DECISION, slow).makespan_s)
    assert found.after_s == pytest.approx(measured(found.decision, slow).makespan_s)
    assert found.after_s < 0.99 * found.before_s
    slots = found.decision.encoders[0].slots
    assert slots.count(1) < DECISION.encoders[0].slots.count(1)
    kept = {"slots": ()}
    assert found.decision.stages == DECISION.stages
    assert found.decision.encoders[0].model_copy(update=kept) == (
        DECISION.encoders[0].model_copy(update=kept)
    )
    # The new prices hold: what was drift is none any more.
    again = [online.observe(measured(found.decision, slow)) for _ in range(4)]
    assert again == [None] * 4


def test_a_rank_that_recovers_gets_its_share_back() -> None:
    online = OnlinePlanner(PROBLEM, DECISION, patience=2)
    slow = everything(SLOW, 2.0)
    for _ in range(2):
        online.observe(measured(DECISION, slow))
    assert online.decision.orders != DECISION.orders
    found = [online.observe(measured(online.decision, {})) for _ in range(2)][-1]
    assert found is not None
    assert all(factor == pytest.approx(1.0) for factor in found.factors.values())
    assert found.after_s == pytest.approx(measured(DECISION, {}).makespan_s, rel=1e-2)


def test_what_an_exchange_takes_beside_computation_is_no_drift() -> None:
    tier = {"group": ["all"], "scope": "host", "latency_s": 1e-7, "bandwidth_bytes_per_s": 1e9,
            "compute_share": 1.0, "source": "a test"}  # fmt: skip
    document = PROBLEM.cluster.model_dump(mode="json", exclude_none=True) | {"tiers": [tier]}
    cluster = validate(Cluster, document, "cluster")
    workload = PROBLEM.workload.model_copy(update={"encoder_stages": (1,)})  # a replica on each
    costs = CostBook([SlowLink()])
    problem = replace(PROBLEM, cluster=cluster, workload=workload, costs=costs)
    decision = PLANNER.decide(problem).decision
    schedule = PLANNER.schedule(problem, decision)
    planned = simulate(schedule, problem.costs)
    # As a run has it: ``beside`` takes no time, the units do that a gather or reduction runs
    # beside, the first ones of a rank (but for the first gather) and its last ones.
    length = planned.end_s - planned.start_s
    ops = np.array(schedule.ops)[schedule.op]
    beside = ops == "beside"
    assert beside.any()
    for rank in range(schedule.ranks):
        mine = schedule.rank == rank
        for op, kind in (("encode", "all_gather"), ("encode_backward", "reduce_scatter")):
            units, exchange = (
                found[np.argsort(planned.start_s[found])]
                for found in (np.flatnonzero(mine & (ops == name)) for name in (op, kind))
            )
            count = len(exchange) - 1
            units = units[:count] if op == "encode" else units[-count:]
            exchange = exchange[1:] if op == "encode" else exchange[:-1]
            length[units] += EXCHANGE_S
            length[exchange] = length[units]
    length[beside] = 0.0
    run = Simulator(schedule).run(length)
    priced = simulate(schedule, problem.costs).total_s("encode_backward")
    assert (run.total_s("encode_backward") > 1.1 * priced).all(), "too short to count as drift"
    online = OnlinePlanner(problem, decision, patience=2)
    assert [online.observe(run) for _ in range(4)] == [None] * 4
    assert online.factors == {}


def test_one_bad_step_or_small_drift_changes_nothing() -> None:
    online = OnlinePlanner(PROBLEM, DECISION, threshold=0.1, patience=2)
    for factor in (1.0, 3.0, 1.0, 3.0, 1.05, 1.05, 1.05):
        assert online.observe(measured(DECISION, everything(SLOW, factor))) is None
    assert online.factors == {}


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0.5, 3.0), min_size=4, max_size=4))
def test_a_new_order_is_never_slower_at_the_prices_measured(values: list[float]) -> None:
    kinds = [(device, op) for device in (SLOW, FAST) for op in ("F", "encode")]
    factors: dict[Kind, float] = dict(zip(kinds, values, strict=True))
    online = OnlinePlanner(PROBLEM, DECISION, patience=1)
    found = online.observe(measured(DECISION, factors))
    if found is not None:
        assert found.after_s <= found.before_s * (1 - 0.01)
        assert measured(found.decision, factors).makespan_s == pytest.approx(found.after_s)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"threshold": 0.0}, "threshold: got 0.0"), ({"patience": 0}, "patience: got 0"),
     ({"gain": 1.0}, "gain: got 1.0")],
)  # fmt: skip
def test_limits_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        OnlinePlanner(PROBLEM, DECISION, **options)


def test_encoders_of_the_first_stage_have_no_other_order() -> None:
    first = PLANNER.baselines(PROBLEM)["encoders on the first stage"]
    assert isinstance(first, BubblesDecision)
    with pytest.raises(SpecError, match="colocated on all ranks"):
        OnlinePlanner(PROBLEM, first)


def test_what_is_computed_again_stays_said() -> None:
    open_ = PROBLEM.workload.model_copy(update={"recompute": "auto"})
    problem = replace(PROBLEM, workload=open_)
    decision = PLANNER.decide(problem).decision
    assert decision.recompute is not None
    online = OnlinePlanner(problem, decision, patience=1)
    book = ScaledBook(PROBLEM.costs, everything(SLOW, 2.0))
    found = online.observe(simulate(PLANNER.schedule(problem, decision), book))
    assert found is not None
    assert found.decision.recompute == decision.recompute
    assert PLANNER.schedule(problem, found.decision)
