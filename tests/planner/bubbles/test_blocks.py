"""Lanes and replicas of a rank that are unlike devices: the slowest of them stands for the rank."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.simulator import simulate
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.errors import InfeasibleError, MissingDataError
from foreplan.planner.api import plan
from foreplan.planner.bubbles.assumptions import unlike_blocks
from foreplan.planner.bubbles.backbone import bare_decision
from foreplan.planner.bubbles.baselines import three_phase
from foreplan.planner.bubbles.ledger import ledgers
from foreplan.planner.bubbles.online import OnlinePlanner
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.shared_work import dealt_s
from foreplan.planner.bubbles.spec import BackbonePlan, TransformerDims
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.testing import check_planner

PLANNER = BubblesPlanner()


def asked(layers=8, **rest):
    """Sizes of which devices of the zoo have a price."""
    sizes = TransformerDims(layers=layers, hidden=1024, heads=16, vocab=32000)
    made = workload(encoder(layers=8, forward_s=None, backward_s=None), chunks=1, **rest)
    return made.model_copy(update={"backbone": sizes, "sequence_length": 1024})


def total_s(devices, **layout):
    return plan("bubbles", None, devices, asked(**layout), costs="roofline").predicted.total_s


def step_on(devices, **layout):
    posed = problem(asked(**layout), devices)
    return TrainingStep(posed, posed.workload.plan), posed


@pytest.mark.parametrize("layout", [{"pp": 1, "tp": 2}, {"pp": 1, "dp": 2}])
def test_a_block_takes_what_its_slowest_device_takes_however_they_are_listed(layout):
    found = [total_s(devices, **layout) for devices in ("1xh200,1xl4", "1xl4,1xh200")]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(total_s("2xl4", **layout), rel=0.05)  # links may be slower
    assert found[0] > 3 * total_s("2xh200", **layout)


def test_blocks_of_several_ranks_and_what_a_plan_says_of_them():
    devices = "1xh200,1xl4,2xh200"
    made = plan("bubbles", None, devices, asked(pp=2, tp=2), costs="roofline")
    assert {rank.device for rank in made.predicted.ranks} == {"localhost/l4", "localhost/h200#1"}
    (said,) = [note for note in made.assumptions if "unlike devices" in note]
    assert said.endswith("priced as: localhost/l4 of localhost/h200#0, localhost/l4")
    step, _ = step_on("4xh200", pp=2, tp=2)
    assert unlike_blocks(step) == ()


def test_links_are_those_of_the_true_ranks():
    step, _ = step_on("1xh200,1xl4,2xh200", pp=2, tp=2)
    assert step.devices == ("localhost/l4", "localhost/h200#1")
    assert step.lane_group(0) == (0, 1)
    assert step.replica_group((0, 1)) == (0, 2)
    assert [step.cluster_rank(rank) for rank in range(2)] == [0, 2]


class Unasked(CostBook):
    """Prices that nobody may ask for."""

    def cost(self, work, device):
        raise AssertionError(f"{work} on {device} was priced")


def test_alike_devices_are_not_priced_to_find_the_slowest():
    _, posed = step_on("4xh200", pp=2, dp=2)
    step = TrainingStep(replace(posed, costs=Unasked(())), posed.workload.plan)
    assert step.devices == ("localhost/h200#0", "localhost/h200#2")


def test_without_any_price_the_first_stands_for_all_and_one_that_lacks_is_said():
    _, posed = step_on("1xh200,1xl4", pp=1, tp=2)
    layout = posed.workload.plan
    assert TrainingStep(replace(posed, costs=CostBook(())), layout).devices == ("localhost/h200",)
    # Prices of the first device alone: the other is no faster for that.
    alone = cost_book(parse_devices("1xh200"), Profiles(), "roofline")
    posed = replace(posed, costs=alone)
    assert TrainingStep(posed, layout).devices == ("localhost/l4",)
    with pytest.raises(MissingDataError, match="on localhost/l4"):
        PLANNER.decide(posed)


def test_the_memory_that_counts_is_that_of_the_smallest_device():
    step, posed = step_on("1xh200,1xt4,1xl4", pp=1, dp=3)
    (ledger,) = ledgers(posed, step, bare_decision(step, "1f1b", 8))
    smallest = posed.cluster.ranks()[1]
    assert (ledger.device, ledger.capacity_bytes) == ("localhost/t4", smallest.memory_bytes)


@pytest.mark.parametrize(
    ("layout", "labels"),
    [
        ({"pp": 1, "tp": 2}, ("localhost/h200", "localhost/l4")),
        ({"pp": 1, "dp": 2}, ("localhost/h200",)),
    ],
)
def test_in_a_real_run_each_lane_is_its_own_device(layout, labels):
    _, posed = step_on("1xh200,1xl4", **layout)
    decision = PLANNER.decide(posed).decision
    assert PLANNER.schedule(posed, decision).devices == ("localhost/l4",)
    schedule, members = PLANNER.real(posed, decision)
    assert schedule.devices == labels
    assert members == tuple(range(len(labels)))


@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_plans_on_unlike_blocks_keep_what_a_planner_promises(layout):
    check_planner(PLANNER, step_on("1xh200,1xl4,2xh200", **layout)[1])


def test_lanes_that_wait_say_nothing_of_the_device_that_they_wait_for():
    step, posed = step_on("1xh200,1xl4", pp=1, tp=2)
    bare = bare_decision(step, "1f1b", 8)
    decision = three_phase(step, bare, 1)
    online = OnlinePlanner(posed, decision, patience=1)
    # By its own prices the faster lane is done long before.
    schedule, _ = PLANNER.real(posed, decision)
    assert schedule.devices == ("localhost/h200", "localhost/l4")
    found = online._deviations(simulate(schedule, posed.costs))
    assert {device for device, _ in found} == {"localhost/l4"}
    assert list(found.values()) == pytest.approx([1.0] * len(found))


def test_what_finds_no_layout_in_one_pipeline_names_the_replicas_that_suit():
    free = asked(layers=1).model_copy(update={"plan": None})
    with pytest.raises(InfeasibleError, match="no layout of 8 devices in one pipeline") as caught:
        plan("bubbles", None, "8xl4", free, costs="roofline")
    assert "state global_batch instead of microbatches" in str(caught.value)
    assert "plan: {dp: 2, tp: 4}" in str(caught.value)
    stated = free.model_copy(update={"plan": BackbonePlan(dp=2, tp=4)})
    assert plan("bubbles", None, "8xl4", stated, costs="roofline").decision["plan"]["dp"] == 2
    batch = free.model_copy(update={"microbatches": None, "global_batch": 8})
    assert plan("bubbles", None, "8xl4", batch, costs="roofline").decision["plan"]["dp"] > 1
    # Where no number of replicas would do, there is no such advice.
    huge = free.model_copy(update={"sequence_length": 1 << 21})
    with pytest.raises(InfeasibleError) as caught:
        plan("bubbles", None, "8xl4", huge, costs="roofline")
    assert "global_batch" not in str(caught.value)


@given(
    st.lists(st.sampled_from([0.5, 1.0, 3.0, 10.0]), min_size=1, max_size=6),
    st.integers(1, 4), st.integers(0, 40),
)  # fmt: skip
def test_layers_are_dealt_so_that_the_longest_rank_is_shortest(seconds, least, more):
    count = least * len(seconds) + more
    busy = dealt_s(seconds, count, least)
    pieces = [b / each for b, each in zip(busy, seconds, strict=True)]
    assert sum(pieces) == pytest.approx(count)
    assert min(pieces) >= least * (1 - 1e-9)
    # Who has more than the least takes as long as all others that have; nobody longer does.
    level = [b for b, n in zip(busy, pieces, strict=True) if n > least * (1 + 1e-9)]
    assert level == pytest.approx([max(level, default=0.0)] * len(level))


@pytest.mark.parametrize("devices", ["3xl4,1xh200", "1xh200,3xl4"])
def test_a_wider_search_over_unlike_devices_is_no_worse(devices):
    sizes = TransformerDims(
        layers=24, hidden=2048, heads=16, kv_heads=4, ffn=5504, gated=True, vocab=32000
    )
    tower = encoder("vit").model_copy(
        update={"dims": TransformerDims(layers=12, hidden=1024, heads=16), "tokens": 576}
    )
    free = asked().model_copy(update={"plan": None, "backbone": sizes, "encoders": (tower,)})
    wider = free.model_copy(update={"microbatches": None, "global_batch": 8})
    one, every = (
        plan("bubbles", None, devices, each, costs="predicted").predicted.total_s
        for each in (free, wider)
    )
    assert every <= one * (1 + 1e-9)
