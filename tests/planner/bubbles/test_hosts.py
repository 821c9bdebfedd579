"""Hosts in bubble plans: filling that they are too slow for is not planned."""

import dataclasses

import pytest
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.cost_models.costs import CostBook
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.replays import simulated
from foreplan.planner.bubbles.robustness import jittered_s
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.predict import Forecast

PLANNER = BubblesPlanner()


@pytest.fixture(scope="module")
def asked():
    """Two lanes, whose sums leave idle time inside passes."""
    encoders = encoder(layers=4, forward_s=0.02, backward_s=0.04)
    return workload(encoders, pp=2, tp=2, chunks=1, layers=4, microbatches=4, tensor_s=0.02)


def with_hosts(where, extra_s):
    """The same problem with hosts: units and pieces of passes take them so long, nothing else."""
    step = TrainingStep(where, where.workload.plan)
    layers, halves = step.backbone.layers, 2 * step.encoders[0].layers
    works = {
        work
        for op in "FB"
        for work in (
            *(step.piece(0, layers, op, piece) for piece in range(2 * layers)),
            *(step.unit(0, 2, half, half + 1, op, bare=True) for half in range(halves)),
        )
    }
    costs = where.costs
    book = CostBook(costs.sources, given=costs.given, issued=dict.fromkeys(works, extra_s))
    return dataclasses.replace(where, costs=book)


def test_fine_filling_is_left_where_its_host_is_too_slow(asked):
    where = problem(asked)
    fine = PLANNER.decide(where).decision
    assert fine.fill == "fine"
    assert any(".0f0" in order for order in fine.orders)  # halves with their sums apart
    for extra_s, left in ((1e-6, False), (0.2, True)):
        hosted = with_hosts(where, extra_s)
        choice = PLANNER.decide(hosted)
        total = simulated(hosted, choice.decision).makespan_s
        assert (choice.decision != fine) is left
        assert (total < 0.9 * simulated(hosted, fine).makespan_s) is left
        assert choice.bound.lower_s <= total
        for other in PLANNER.baselines(hosted).values():
            assert isinstance(other, str) or simulated(hosted, other).makespan_s >= total - 1e-9


def test_every_prediction_knows_hosts(asked):
    where = problem(asked)
    hosted = with_hosts(where, 0.2)
    fine = PLANNER.decide(where).decision
    timeline = simulated(hosted, fine)
    assert timeline.makespan_s > 1.1 * simulated(where, fine).makespan_s
    forecast = Forecast(PLANNER, hosted, fine)
    assert forecast.total_s == pytest.approx(timeline.makespan_s)
    assert forecast.timeline.schedule.ops == Forecast(PLANNER, where, fine).schedule.ops
    still = jittered_s(timeline, hosted.costs, 0.0, draws=1, seed=0)
    assert still[0] == pytest.approx(timeline.makespan_s)
