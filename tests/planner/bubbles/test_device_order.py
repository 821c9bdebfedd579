"""Which devices of a mixed cluster the ranks of a pipeline take."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.datasets.inline_cluster import parse_devices
from foreplan.errors import SpecError
from foreplan.planner.api import plan
from foreplan.planner.bubbles.baseline_search import CHAIN, _chains, searched_baselines
from foreplan.planner.bubbles.baselines import balanced
from foreplan.planner.bubbles.device_order import device_orders
from foreplan.planner.bubbles.layouts import CLOSER
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.replays import lacks
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BackbonePlan, TransformerDims
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.export.exporter import export_plan
from foreplan.planner.plan import decision_of
from foreplan.planner.verify.session import problem_of

LISTED = ("3xt4@b,1xa100-80g@a", "1xa100-80g@a,3xt4@b", "2xt4@b,1xa100-80g@a,1xt4@b")


def asked(**rest):
    sizes = TransformerDims(layers=8, hidden=1024, heads=16, vocab=32000)
    made = workload(encoder(layers=8, forward_s=None, backward_s=None), chunks=1, **rest)
    return made.model_copy(update={"backbone": sizes, "sequence_length": 1024})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["t4", "l4", "h200"]), min_size=2, max_size=6))
def test_orders_are_those_that_put_unlike_devices_elsewhere(kinds):
    cluster = parse_devices(",".join(f"1x{kind}" for kind in kinds))
    orders = device_orders(cluster, BackbonePlan(pp=len(kinds)))
    assert orders[0] == tuple(range(len(kinds)))
    assert len(set(orders)) == len(orders)
    seen = [tuple(kinds[block] for block in order) for order in orders]
    assert len(set(seen)) == len(seen)
    different = set(itertools.permutations(kinds))
    assert set(seen) <= different
    assert len(seen) == len(different) or len(different) > 24


def test_devices_of_a_block_stay_together():
    cluster = parse_devices("2xt4,2xh200,2xt4")
    assert device_orders(cluster, BackbonePlan(pp=3, tp=2)) == [(0, 1, 2), (0, 2, 1), (1, 0, 2)]
    assert device_orders(cluster, BackbonePlan(pp=2, dp=3)) == [(0, 1), (1, 0)]
    step = TrainingStep(
        problem(asked(pp=3, tp=2), "2xt4,2xh200,2xt4"),
        BackbonePlan(pp=3, tp=2, device_order=(1, 0, 2)),
    )
    assert [step.cluster_rank(rank) for rank in range(3)] == [2, 0, 4]
    assert step.lane_group(0) == (2, 3)


def test_a_plan_does_not_hang_on_the_order_in_which_devices_are_listed():
    found = [plan("bubbles", None, devices, asked(), costs="predicted") for devices in LISTED]
    totals = [one.predicted.total_s for one in found]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-3)
    placed = {tuple(sorted(one.decision["plan"]["device_order"] or range(4))) for one in found}
    assert placed == {(0, 1, 2, 3)}
    stated = asked().model_copy(update={"plan": BackbonePlan(pp=4, device_order=(0, 1, 2, 3))})
    kept = plan("bubbles", None, LISTED[1], stated, costs="predicted")
    assert kept.predicted.total_s > 1.2 * totals[0], "an order that the workload states is kept"
    assert kept.decision["plan"]["device_order"] == [0, 1, 2, 3]


def test_exports_say_which_device_a_rank_is(tmp_path):
    said = []
    made = plan("bubbles", None, LISTED[1], asked(), costs="predicted")
    for target in ("megatron", "torchtitan"):
        try:
            written = export_plan(made, target, tmp_path / target)
        except SpecError:  # a layout that the target has no words for
            continue
        said += [line for line in written.not_expressed if "take b/t4#0" in line]
    assert said


@pytest.mark.parametrize("order", [(0, 1, 1, 2), (0, 1, 2), (1, 2, 3, 4)])
def test_an_order_names_each_block_once(order):
    with pytest.raises(ValueError, match="each of 4 blocks once"):
        BackbonePlan(pp=4, device_order=order)


def test_the_plan_is_run_where_it_says():
    made = plan("bubbles", None, LISTED[1], asked(), costs="predicted")
    planner = BubblesPlanner()
    ranks = planner.ranks(problem_of(made, planner), decision_of(made))
    labels = [rank.label for rank in made.cluster.ranks()]
    assert [labels[rank] for rank in ranks] == ["b/t4#0", "b/t4#1", "b/t4#2", "a/a100_sxm_80gb"]
    assert planner.occupied(problem_of(made, planner), decision_of(made)) == (0, 1, 2, 3)


def vision(**rest):
    """A vision model whose encoder is half of its work, on layouts that the search chooses."""
    made = asked(**rest).model_copy(update={"plan": None})
    sizes = TransformerDims(layers=24, hidden=1024, heads=16)
    towers = (made.encoders[0].model_copy(update={"dims": sizes, "tokens": 576}),)
    backbone = TransformerDims(layers=16, hidden=2048, heads=16, vocab=32000)
    return made.model_copy(update={"backbone": backbone, "encoders": towers})


@pytest.mark.parametrize("devices", ["2xa100-80g,2xh200", "1xh200,3xl4", "4xl4,4xh200"])
def test_no_layout_that_a_workload_could_state_has_a_quicker_chain(devices):
    """Though it be none of those that are filled, which an estimate of the backbone ranks."""
    posed = problem(vision(), devices)
    search = BubbleSearch(posed)
    found = search.replay(searched_baselines(search)[CHAIN]).total_s
    assert len(search.found) > CLOSER
    for layout in search.found:
        chain = balanced(
            search.step(layout), posed.costs, posed.workload.schedule, layout.microbatches,
            layout.plan.chunks,
        )  # fmt: skip
        replay = search.replay(chain)
        if lacks(posed, replay) is None:
            assert found <= replay.total_s * (1 + 1e-9), layout.plan


def test_on_devices_alike_chains_are_those_of_the_layouts_that_are_filled():
    assert _chains(BubbleSearch(problem(vision(), "4xh200"))) == []
