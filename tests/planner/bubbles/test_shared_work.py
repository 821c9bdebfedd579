"""The bound of a step on unlike ranks: valid, and as close as a fractional schedule allows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.shared_work import shared_work_s
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload, Encoder, TransformerDims

TIMES = st.lists(
    st.lists(st.floats(0.01, 10.0), min_size=2, max_size=2), min_size=1, max_size=4
)  # fmt: skip


def fractional_s(seconds, counts):
    """The linear program: pieces of each kind on each rank, the longest rank's time least."""
    ranks, kinds = seconds.shape
    within = np.zeros((ranks, ranks * kinds + 1))
    for r in range(ranks):
        within[r, r * kinds : (r + 1) * kinds], within[r, -1] = seconds[r], -1.0
    everything = np.hstack([np.tile(np.eye(kinds), ranks), np.zeros((kinds, 1))])
    goal = np.zeros(ranks * kinds + 1)
    goal[-1] = 1.0
    return linprog(goal, within, np.zeros(ranks), everything, counts).fun


@given(TIMES, st.lists(st.integers(0, 50), min_size=2, max_size=2))
@settings(deadline=None, max_examples=60)
def test_no_way_to_deal_out_work_is_shorter(times, counts):
    seconds = np.array(times)
    bound, best = shared_work_s(times, counts), fractional_s(seconds, counts)
    assert bound <= best * (1 + 1e-7) + 1e-9
    if sum(counts):
        # No rank would take longer than it does with all of the work.
        assert bound >= best / (seconds.max() / seconds.min()) - 1e-9


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_one_kind_of_work_is_bounded_exactly(times, count):
    exact = count / sum(1.0 / t for t in times)
    assert shared_work_s([[t] for t in times], [count]) == pytest.approx(exact)


def asked(layers, microbatches, plan, **rest):
    """Ends of the towers (vocabulary, patches) take several times as long as a layer."""
    tower = TransformerDims(layers=4, hidden=512, heads=8)
    return BubblesWorkload(
        encoders=(Encoder(name="image", dims=tower, tokens=256, patch_features=4096, **rest),),
        backbone=TransformerDims(layers=layers, hidden=1024, heads=16, vocab=64000),
        sequence_length=512, microbatches=microbatches, plan=plan,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "layers", "plan"),
    [
        ("1xh200,1xa100-80g", 8, BackbonePlan(pp=2)),
        ("1xt4,1xh200", 2, BackbonePlan(pp=2)),
        ("2xh200,2xt4", 8, BackbonePlan(pp=4)),
        ("1xh200,3xa100-80g", 8, BackbonePlan(pp=4)),
        ("2xh200,2xa100-80g", 8, BackbonePlan(pp=2, tp=2)),
        ("2xh200", 2, BackbonePlan(pp=2)),
        ("1xh200", 2, BackbonePlan(pp=1)),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_that_was_simulated_is_shorter(devices, layers, plan, frozen):
    where = problem(asked(layers, 8, plan, frozen=frozen), devices)
    planner, search = BubblesPlanner(), BubbleSearch(where)
    found = [replay.total_s for replay in search.best(search.candidates())]
    for other in planner.baselines(where).values():
        if not isinstance(other, str):
            found.append(search.replay(other).total_s)
    assert found
    assert 0 < search.lower_s <= min(found) * (1 + 1e-9)
    assert search.lower_s > 0.05 * min(found)  # a T4 may be left with nothing to do


def test_alike_ranks_are_bounded_by_the_average_work():
    where = problem(workload(encoder(layers=4, forward_s=0.01, backward_s=0.02), pp=4, layers=8))
    work = 8 * (8 * (0.1 + 0.2) + 4 * (0.01 + 0.02))
    assert BubbleSearch(where).lower_s == pytest.approx(work / 4, rel=1e-4)
