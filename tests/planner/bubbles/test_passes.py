"""Passes as what runs: dtypes, work, and that a profile measures every program of every plan."""

import re
from dataclasses import replace

import numpy as np
import pytest

from foreplan.cost_models.costs import Collective, Copy, CostBook, Estimate, Lag, Segment
from foreplan.cost_models.schedule import COMPUTE
from foreplan.cost_models.sources.link_costs import LinkSource
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.arithmetic import Arithmetic
from foreplan.planner.bubbles.execution.entry import rank_kernels
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.shapes import bubbles_pass, bubbles_programs
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.contention import compute_share, contention
from foreplan.planner.predict import Forecast

CPU = DeviceName.parse("cpu:threads=1")
FP32 = Variant("fp32", "fp32", "torch.linear")


def asked(**rest):
    document = {
        "backbone": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64},
        "encoders": [
            {"name": "vit", "tokens": 8, "images": 2, "projected_tokens": 4, "patch_features": 12,
             "projector": "mlp", "dims": {"layers": 4, "hidden": 16, "heads": 2}},
        ],
        "sequence_length": 16, "microbatches": 4, "plan": {"pp": 2},
    } | rest  # fmt: skip
    return validate(BubblesWorkload, document, "workload")


def on(name, workload, costs=None):
    devices = [{"name": name, "count": 2, "memory_bytes": 1 << 30}]
    if name.startswith("cuda"):
        devices = [{"name": f"cuda:{i}", "memory_bytes": 1 << 30} for i in range(2)]
    cluster = validate(Cluster, {"devices": devices}, "cluster")
    return Problem(None, cluster, workload, costs or CostBook(()))


class Only:
    """Prices the programs that a profile would hold, and what moves memory."""

    def __init__(self, programs):
        self.programs = set(programs)

    def estimate(self, work, device):
        if isinstance(work, Collective):
            return Estimate.exact(1e-6)
        if isinstance(work, Copy):
            return Estimate.exact(work.bytes * 1e-10, "measured")
        known = isinstance(work, Program) and work in self.programs
        if isinstance(work, Program) and work.op == "optimizer_step":
            # Its size depends on the decision; it is interpolated between those measured.
            sizes = [p.sizes[0] for p in self.programs if p.op == "optimizer_step"]
            known = min(sizes) / 2 <= work.sizes[0] <= 2 * max(sizes)
        return Estimate.exact(1e-6 + work.flops * 1e-10, "measured") if known else None


def flops(work, op):
    if isinstance(work, Segment):
        return sum(flops(part, op) * count for part, count in work.parts)
    return work.flops if isinstance(work, Program) and work.op.startswith(op) else 0.0


GATED = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "gated": True}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"schedule": "zb-h1"},
        {"plan": {"pp": 2, "chunks": 2}, "recompute": "full"},
        {"backbone": GATED},
        {"plan": None, "microbatches": None, "global_batch": 4},
    ],
    ids=str,
)
def test_a_profile_holds_every_program_of_a_plan_and_its_baselines(change):
    workload = asked(**change)
    costs = CostBook([Only(bubbles_programs(None, workload, CPU, devices=2))])
    where, planner = on("cpu:threads=1", workload, costs), BubblesPlanner()
    made = [planner.decide(where).decision, *planner.baselines(where).values()]
    decisions = [decision for decision in made if not isinstance(decision, str)]
    assert len(decisions) > 2
    for decision in decisions:
        schedule = planner.schedule(where, decision)
        for action in schedule:
            assert costs.can_price(action.work, schedule.devices[action.rank])


@pytest.mark.parametrize("gated", [False, True])
def test_every_program_can_be_timed_here(gated):
    workload = asked(schedule="zb-h1", **({"backbone": GATED} if gated else {}))
    programs = bubbles_programs(None, workload, CPU, devices=2)
    assert {p.op for p in programs} > {"linear_backward", "attention_forward", "norm_backward"}
    for item in programs:
        training_call(item, "cpu")()


def test_a_dtype_is_that_of_the_run():
    for name, dtype, measurable in (
        ("cpu:threads=1", "fp32", True), ("cuda", "bf16", True), ("h200", "bf16", False)
    ):  # fmt: skip
        where = on(name, asked())
        found = Arithmetic.of(where.cluster)
        assert (found.dtype, found.measurable) == (dtype, measurable)
        step = TrainingStep(where, BackbonePlan(pp=2))
        elements = 16 * 32
        assert step.hidden_bytes == elements * (4 if dtype == "fp32" else 2)
        assert step.feature_bytes(0) == 4 * 32 * (4 if dtype == "fp32" else 2)
    programs = bubbles_programs(None, asked(), DeviceName.parse("cuda:0"), devices=2)
    computed = {p.variant.compute for p in programs if p.op.startswith("linear")}
    assert computed == {"bf16"}


def test_passes_do_the_work_of_their_products():
    step = TrainingStep(on("cpu:threads=1", asked()), BackbonePlan(pp=2))
    linears = 2 * 16 * (12 * 32 * 32)  # a layer's: 4 h^2 and 8 h^2 weights
    for start, end, ends in ((1, 2, 0), (0, 4, 2 * 16 * 32 * 64)):
        forward = flops(step.passes(start, end, "F"), "linear")
        assert forward == (end - start) * linears + ends
        backward = flops(step.passes(start, end, "B"), "linear")
        assert backward == 2 * forward
        halves = [flops(step.passes(start, end, op), "linear") for op in ("I", "W")]
        assert halves == [forward, forward]
    # Two images of 8 positions; a sample's features are 4 averages, which alone are projected.
    vit = 4 * 2 * 16 * (12 * 16 * 16)
    entry, projector = 2 * 16 * 16 * 12, 2 * 4 * (32 * 16 + 32 * 32)
    assert flops(step.unit(0, 1, 0, 8, "F", bare=False), "linear") == vit + entry + projector
    backward = flops(step.unit(0, 1, 0, 8, "B", bare=False), "linear")
    assert backward == 2 * (vit + projector) + entry  # patches need no gradient


def test_recomputation_adds_a_forward_pass():
    plain = TrainingStep(on("cpu:threads=1", asked()), BackbonePlan(pp=2))
    again = TrainingStep(on("cpu:threads=1", asked(recompute="full")), BackbonePlan(pp=2))
    more = flops(again.passes(1, 2, "B"), "") - flops(plain.passes(1, 2, "B"), "")
    assert more == flops(plain.passes(1, 2, "F"), "")


def test_model_states_are_what_the_kernels_hold():
    workload = asked(microbatches=2)
    costs = CostBook([Only(bubbles_programs(None, workload, CPU, devices=2))])
    where, planner = on("cpu:threads=1", workload, costs), BubblesPlanner()
    decision = planner.baselines(where)["encoders on the first stage"]
    for rank, ledger in enumerate(planner.memory(where, decision)):
        held = rank_kernels(where, decision, rank, mode="fast").memory_bytes()
        for item in ("weights", "gradients", "optimizer"):
            # Norms, biases and positions are left out of the ledger; here they are a tenth.
            assert ledger.items[item] == pytest.approx(held[item], rel=0.15)


def test_zoo_devices_keep_their_forward_programs():
    where = on("h200", asked())
    found = TrainingStep(where, BackbonePlan(pp=2)).passes(0, 4, "B")
    assert flops(found, "linear") > 0
    assert not flops(found, "linear_")


def test_numbers_of_neighbours_between_those_measured_are_interpolated():
    measured = [{"kind": "memory", "factors": {2: 1.2, 5: 1.5}}]
    devices = [{"name": "cpu:threads=1", "count": 8, "memory_bytes": 1 << 30}]
    cluster = validate(Cluster, {"devices": devices, "contention": measured}, "cluster")
    found = contention(cluster, tuple(range(8)))
    assert found is not None
    assert found.slowdown == pytest.approx((1.0, 1.2, 1.3, 1.4, 1.5))
    assert contention(cluster, (0,)) is None


def test_processes_that_a_rank_stands_for_count_as_neighbours():
    measured = [{"kind": "memory", "factors": {2: 1.2, 8: 1.8}}]
    devices = [
        {"name": "cpu:threads=1", "count": 4, "memory_bytes": 1 << 30, "host": host}
        for host in ("a", "b")
    ]
    cluster = validate(Cluster, {"devices": devices, "contention": measured}, "cluster")
    lanes = contention(cluster, (0, 2, 4, 6), tuple(range(8)))
    assert lanes is not None
    assert lanes.host == (0, 0, 1, 1)
    assert lanes.processes == (2, 2, 2, 2)
    assert lanes.slowdown[-1] == 1.8
    replicas = contention(cluster, (0, 1), tuple(range(8)))  # two lanes, replicas elsewhere too
    assert replicas is not None
    assert replicas.processes == (1, 3)


def test_all_lanes_of_a_host_slow_each_other_down():
    workload = asked(sharded_optimizer=False, plan={"pp": 2, "tp": 2})
    costs = CostBook([Only(bubbles_programs(None, workload, CPU, devices=4))])
    totals = []
    for factors in ({2: 1.2, 4: 1.2}, {2: 1.2, 4: 1.6}):
        measured = [{"kind": "memory", "factors": factors}]
        devices = [{"name": "cpu:threads=1", "count": 4, "memory_bytes": 1 << 30}]
        cluster = validate(Cluster, {"devices": devices, "contention": measured}, "cluster")
        where = Problem(None, cluster, workload, costs)
        planner = BubblesPlanner()
        decision = planner.baselines(where)["three phases"]
        totals.append(Forecast(planner, where, decision).total_s)
        assert BubbleSearch(where).replay(decision).total_s == pytest.approx(totals[-1])
    assert totals[0] < totals[1]


def test_neighbours_slow_down_what_memory_bounds_and_the_search_knows():
    workload = asked()
    costs = CostBook([Only(bubbles_programs(None, workload, CPU, devices=2))])
    where, planner = on("cpu:threads=1", workload, costs), BubblesPlanner()
    decision, totals = planner.decide(where).decision, []
    for factor in (None, 1.5, 2.0):
        cluster = where.cluster
        if factor is not None:
            measured = [{"kind": "memory", "factors": {2: factor}}]
            document = cluster.model_dump(mode="json") | {"contention": measured}
            cluster = validate(Cluster, document, "cluster")
        beside = replace(where, cluster=cluster)
        schedule = planner.schedule(beside, decision)
        assert bool(schedule.pressure.any()) == (factor is not None)
        totals.append(Forecast(planner, beside, decision).total_s)
        assert BubbleSearch(beside).replay(decision).total_s == pytest.approx(totals[-1])
    assert totals[0] < totals[1] < totals[2] < 2 * totals[0]


def lanes(share, alpha_s=1e-3, *, faster=1.0, lag=None):
    """A step of two lanes whose sums are measured, ``faster`` on the spot, and its prices."""
    fit = {"kind": "all_reduce", "ranks": 2, "alpha_s": alpha_s, "beta_s_per_byte": 1e-6,
           "residual": 0.0, "samples": 3, "compute_share": share}  # fmt: skip
    spot = fit | {"alpha_s": alpha_s / faster, "beta_s_per_byte": 1e-6 / faster, "lag_share": lag}
    tier = {"group": ["all"], "scope": "host", "latency_s": 0.0, "bandwidth_bytes_per_s": 1e9,
            "collectives": [fit], "waited": [spot], "source": "t"}  # fmt: skip
    devices = [{"name": "cpu:threads=1", "count": 4, "memory_bytes": 1 << 30}]
    cluster = validate(Cluster, {"devices": devices, "tiers": [tier]}, "cluster")
    costs = CostBook([LinkSource(cluster)])
    where = Problem(None, cluster, asked(sharded_optimizer=False), costs)
    return TrainingStep(where, BackbonePlan(pp=2, tp=2)), costs


class EveryProgram:
    """Prices each program by its arithmetic."""

    def estimate(self, work, device):
        return Estimate.exact(1e-9 * work.flops) if isinstance(work, Program) else None


def sums_s(costs, *works):
    parts = [part for work in works if isinstance(work, Segment) for part in work.parts]
    sums = [(part, count) for part, count in parts if isinstance(part, Collective)]
    return sum(count * costs.cost(part, "cpu:threads=1").mean_s for part, count in sums)


@pytest.mark.parametrize("alpha_s", [0.0, 1e-3, 1.0])  # as long as a sum of 0, 1 KB and 1 MB
def test_lanes_sum_once_a_half_however_a_pass_is_cut(alpha_s):
    step, costs = lanes(0.2, alpha_s)
    once = alpha_s + 1e-6 * 16 * 32 * 4  # 16 positions of width 32 in fp32
    for op in "FB":
        assert sums_s(costs, step.passes(0, 2, op)) == pytest.approx(4 * once)
        apart = [sums_s(costs, step.collective(0, 2, op, p)) for p in range(step.pieces(0, 2) + 1)]
        assert apart == pytest.approx([0.0, once, once, once, once])
    encoder_once = alpha_s + 1e-6 * 2 * 8 * 16 * 4
    whole = step.unit(0, 2, 0, 8, "F", bare=False)
    assert sums_s(costs, whole) == pytest.approx(8 * encoder_once)


def test_sums_of_whole_passes_cost_what_they_take_on_the_spot():
    step, costs = lanes(0.2, faster=5.0)
    apart = sums_s(costs, *(step.collective(0, 2, "F", p) for p in range(step.pieces(0, 2) + 1)))
    for whole in (step.passes(0, 2, "F"), step.unit(0, 2, 0, 4, "F", bare=False)):
        parts = [part for part, _ in whole.parts if isinstance(part, Collective)]
        assert parts
        assert all(part.waited for part in parts)
    assert sums_s(costs, step.passes(0, 2, "F")) == pytest.approx(apart / 5)


def test_whole_passes_wait_for_the_slower_lane():
    def prices(lag, tp=2):
        step, costs = lanes(0.2, lag=lag)
        step = TrainingStep(
            Problem(None, step._cluster, step.workload, costs), BackbonePlan(pp=2, tp=tp)
        )
        book = CostBook([*costs.sources, EveryProgram()])
        works = [step.passes(0, 2, op) for op in "FB"]
        works += [step.unit(0, tp, 0, 4, op, bare=False) for op in "FB"]
        pieces = [step.piece(0, 2, "F", 0), step.unit(0, tp, 0, 1, "F", bare=True)]
        total = [book.cost(work, "cpu:threads=1").mean_s for work in works]
        return np.array(total), [sums_s(book, work) for work in works], pieces

    alike, sums, pieces = prices(None)
    never, _, _ = prices(0.0)
    some, same, unchanged = prices(0.1)
    more, _, _ = prices(0.3)
    assert never == pytest.approx(alike)
    assert some - alike == pytest.approx(0.1 * (alike - sums)), "of what is computed, not of sums"
    assert more - alike == pytest.approx(0.3 * (alike - sums))
    assert same == sums
    assert unchanged == pieces, "what is computed beside sums hides the wait"
    assert prices(0.3, tp=1)[0] == pytest.approx(prices(None, tp=1)[0]), "a lane waits for none"


def test_units_stay_out_of_passes_whose_sums_leave_nothing():
    assert lanes(0.2)[0].divisible
    assert not lanes(0.9)[0].divisible
    # What a sum beside takes is more than one on the spot would.
    assert not lanes(0.2, faster=5.0)[0].divisible
    halves = {"plan": BackbonePlan(pp=2, tp=2), "unit_layers": (0.5,)}
    for share in (0.2, 0.9):
        step, costs = lanes(share)
        workload = step.workload.model_copy(update=halves)
        programs = Only(bubbles_programs(None, workload, CPU, devices=4))
        where = Problem(None, step._cluster, workload, CostBook([*costs.sources, programs]))
        found = [" ".join(f.decision.orders) for f in BubbleSearch(where).candidates()]
        assert found
        # Sums of units as words of their own are there to be computed beside.
        assert any(re.search(r"e0\.\S+f", orders) for orders in found) is (share < 0.5)


def test_what_is_computed_beside_sums_takes_longer_by_their_share_of_it():
    def book(share):
        step, costs = lanes(share, alpha_s=0.0)
        costs = CostBook([*costs.sources, EveryProgram()])
        return TrainingStep(Problem(None, step._cluster, step.workload, costs), step.plan), costs

    for share in (0.0, 0.4):
        step, costs = book(share)
        sums, unit = step.collective(0, 2, "F", 1), step.unit(0, 2, 0, 1, "F", bare=True)
        (whole_s, unit_s) = (costs.cost(work, "cpu:threads=1").mean_s for work in (sums, unit))
        for count in (1, 2, 1000):
            found = step.slowed(0, unit, sums, [unit] * count)
            took = costs.cost(found, "cpu:threads=1").mean_s
            lost_s = share * min(whole_s, count * unit_s)
            assert took - unit_s == pytest.approx(lost_s, abs=1e-6), "but for a byte"
            assert found.name == unit.name
        assert step.slowed(0, unit, step.collective(0, 2, "F", 0), [unit]) == unit, "no sums"


def test_units_between_a_sum_and_what_waits_for_it_lose_time_to_it():
    def planned(share):
        step, costs = lanes(share, alpha_s=0.0)
        halves = {"plan": BackbonePlan(pp=2, tp=2), "unit_layers": (0.5,)}
        costs = CostBook([*costs.sources, EveryProgram()])
        workload = step.workload.model_copy(update=halves)
        return Problem(None, step._cluster, workload, costs)

    where = planned(0.2)
    decision = next(
        f.decision for f in BubbleSearch(where).candidates()
        if re.search(r"e0\.\S+f", " ".join(f.decision.orders))
    )  # fmt: skip
    computed, sums, totals = [], [], []
    for share in (0.0, 0.2, 0.4):
        timeline = BubbleSearch(planned(share)).replay(decision).timeline
        schedule, length = timeline.schedule, timeline.end_s - timeline.start_s
        is_sum = schedule.op == schedule.ops.index("tensor")
        computed.append(length[timeline.is_compute].sum())
        sums.append(length[is_sum].sum())
        totals.append(timeline.makespan_s)
    assert sums == pytest.approx([sums[0]] * 3), "sums themselves take what they took"
    lost = np.diff(computed)
    assert 0.0 < lost[0] <= 0.2 * sums[0]
    assert lost[1] == pytest.approx(lost[0], rel=0.01)
    assert totals == sorted(totals)


def test_passes_timed_together_price_every_pass_alone_and_beside_others():
    """All that is computed takes 0.8 of its price alone, and 1.5 times as long beside another."""
    workload = asked()
    costs = CostBook([Only(bubbles_programs(None, workload, CPU, devices=2))])
    where, planner = on("cpu:threads=1", workload, costs), BubblesPlanner()
    decision = planner.baselines(where)["three phases"]
    passes = [
        {"kind": "training", "factors": {1: 0.8, 2: 1.2}},
        {"kind": "memory", "factors": {2: 9}},
    ]
    document = where.cluster.model_dump(mode="json") | {"contention": passes}
    beside = replace(where, cluster=validate(Cluster, document, "cluster"))
    found = contention(beside.cluster, (0, 1), (), planner.contends(beside))
    assert found.slowdown == pytest.approx((1.0, 1.5))
    schedule = planner.schedule(beside, decision)
    computed = {a.op: a.pressure for a in schedule if COMPUTE in a.resources}
    assert computed["F"] == computed["B"] == computed["optimizer"] == 1.0
    alone, together = (Forecast(planner, p, decision).total_s for p in (where, beside))
    assert 1.2 * alone < together <= 1.5 * alone
    assert BubbleSearch(beside).replay(decision).total_s == pytest.approx(together)


def test_what_lanes_send_each_other_is_no_computing():
    item = program("linear_forward", FP32, rows=8, n=64, k=64)
    summed = Collective("all_reduce", 1 << 20, (0, 1), "fp32", waited=True)
    costs = CostBook((), given={item: 1.0, summed: 2.0, Lag(item, 0.1): 1.0})
    work = Segment("F", ((item, 3), (summed, 2), (Lag(item, 0.1), 1)))
    assert compute_share(costs, "a", work) == pytest.approx(4 / 8)
    assert compute_share(costs, "a", item) == 1.0
    assert compute_share(costs, "a", summed) == 0.0
    assert compute_share(CostBook(()), "a", work) == 0.0


def test_a_pass_holds_what_a_rank_computes_for_a_micro_batch():
    workload = asked(plan={"pp": 2})
    every = bubbles_programs(None, workload, CPU, devices=2)
    found = bubbles_pass(None, workload, CPU, devices=2)
    assert set(found) <= set(every)
    layers = max(n for p, n in found.items() if p.op == "attention_forward")
    assert layers == workload.backbone.layers // 2
    frozen = asked(plan={"pp": 2}, encoders=[workload.encoders[0].model_dump() | {"frozen": True}])
    fewer = bubbles_pass(None, frozen, CPU, devices=2)
    assert sum(fewer.values()) < sum(found.values())
