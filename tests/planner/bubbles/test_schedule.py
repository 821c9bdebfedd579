"""Orders become schedules: whole, simulated as planned, and refused where something is off."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.cost_models.simulator import simulate
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import parse_order, write_order
from foreplan.planner.bubbles.backbone import BackboneTimeline, bare_decision
from foreplan.planner.bubbles.baselines import balanced, first_stage, three_phase
from foreplan.planner.bubbles.cuts import min_max_cuts
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.verify.rank_program import rank_programs


def setting(asked, name="interleaved-1f1b"):
    made = problem(asked)
    step = TrainingStep(made, asked.plan)
    return made, step, bare_decision(step, name, asked.microbatches)


def filled(asked, stages=1, unit=0.5, mode="fine", **rest):
    made = problem(asked)
    step = TrainingStep(made, asked.plan)
    backbone = BackboneTimeline.of(step, made.costs, asked.schedule, asked.microbatches)
    return made, step, fill(Filling(backbone, stages, unit, mode, **rest))


def count(schedule, op):
    return int((schedule.op == schedule.ops.index(op)).sum()) if op in schedule.ops else 0


@pytest.mark.parametrize(("pp", "stages"), [(4, 1), (4, 2), (4, 4), (2, 1)])
def test_every_unit_and_transfer_is_there_once(pp, stages):
    asked = workload(pp=pp)
    _, step, found = filled(asked, stages)
    schedule = StepSchedule(step, found.decision).build()
    units = 8 * 2 * 4  # micro-batches, halves, layers
    assert count(schedule, "encode") == count(schedule, "encode_backward") == units
    assert count(schedule, "F") == count(schedule, "B") == 8 * pp * 2
    assert count(schedule, "send") == count(schedule, "recv")
    within = (2 * pp - 1) * 2 * 8 + (stages - 1) * 2 * 8  # between stages, both directions
    slots = found.decision.encoders[0].slots
    away = sum(found.decision.encoders[0].ranks[j][-1] != 0 for j in slots)
    assert count(schedule, "send") == within + 2 * away
    assert len(rank_programs(schedule)) == pp  # the runtime takes it
    # without lanes or replicas there is nothing to gather, but replicas of the encoder to sum
    assert count(schedule, "tensor") == 0
    shared = "reduce_scatter" if pp > stages else "nothing"
    assert (count(schedule, shared) > 0) == (pp > stages)


def test_simulation_is_what_the_solver_says():
    for asked, stages in (
        (workload(), 1), (workload(), 2),
        (workload(transfer_s=0.01), 2), (workload(transfer_s=0.01), 4),
        (workload(encoder(), encoder("sound", layers=8)), 2),
        (workload(encoder(frozen=True), encoder("sound")), 1),
        (workload(tp=2, tensor_s=0.005), 2), (workload(chunks=1, schedule="zb-h1"), 2),
        (workload(chunks=1, schedule="zb-h2"), 1), (workload(chunks=1, schedule="gpipe"), 4),
    ):  # fmt: skip
        made, step, found = filled(asked, stages)
        timeline = simulate(StepSchedule(step, found.decision).build(), made.costs)
        # An order can only be carried out sooner than planned, never later.
        assert timeline.makespan_s <= found.solution.objective * (1 + 1e-9)
        assert timeline.makespan_s == pytest.approx(found.solution.objective, rel=0.02)
        assert timeline.makespan_s >= found.filling.timeline.total_s * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 3, 4]), chunks=st.sampled_from([1, 2]), groups=st.integers(1, 3),
    tp=st.sampled_from([1, 2]), unit=st.sampled_from([0.5, 1.0, 2.0, None]),
    mode=st.sampled_from(["fine", "coarse"]), forward_s=st.floats(0.001, 0.2),
    ratio=st.floats(0.5, 3.0), transfer_s=st.floats(0.0, 0.05), tensor_s=st.floats(0.0, 0.05),
    frozen=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_filling_is_carried_out_no_later_than_planned(
    pp, chunks, groups, tp, unit, mode, forward_s, ratio, transfer_s, tensor_s, frozen, data
):
    asked = workload(
        encoder(forward_s=forward_s, backward_s=ratio * forward_s, frozen=frozen), pp=pp,
        chunks=chunks, tp=tp, layers=pp * chunks, microbatches=pp * groups, transfer_s=transfer_s,
        tensor_s=tensor_s,
    )  # fmt: skip
    stages = data.draw(st.sampled_from([k for k in (1, 2, 4) if pp % k == 0]))
    made, step, found = filled(asked, stages, unit, mode)
    schedule = StepSchedule(step, found.decision).build()
    timeline = simulate(schedule, made.costs)
    assert timeline.makespan_s <= found.solution.objective * (1 + 1e-6)
    assert timeline.makespan_s >= found.filling.timeline.total_s * (1 - 1e-9)
    assert found.solution.lower_bound <= found.solution.objective
    assert write_order(parse_order(found.decision.orders[0])) == found.decision.orders[0]


def test_units_run_inside_tensor_collectives():
    asked = workload(tp=2, tensor_s=0.05, pp=2, layers=8)
    made, step, found = filled(asked)
    schedule = StepSchedule(step, found.decision).build()
    timeline = simulate(schedule, made.costs)
    encoding = np.isin(schedule.op, [schedule.ops.index(x) for x in ("encode", "encode_backward")])
    links = (schedule.op == schedule.ops.index("tensor")) & (schedule.stage < len(
        found.decision.stages
    ))  # fmt: skip
    beside = 0.0
    for rank in range(2):
        for i in np.flatnonzero(encoding & (schedule.rank == rank)):
            mine = links & (schedule.rank == rank)
            lap = np.minimum(timeline.end_s[mine], timeline.end_s[i]) - np.maximum(
                timeline.start_s[mine], timeline.start_s[i]
            )
            beside += float(np.clip(lap, 0, None).sum())
    assert beside > 0.1
    # compute and link of a rank each do one thing at a time
    for resource in ("compute", "tensor"):
        members = [
            k for k, s in enumerate(schedule.resource_sets)
            if schedule.resources.index(resource) in s
        ]  # fmt: skip
        for rank in range(2):
            mine = np.isin(schedule.resource_set, members) & (schedule.rank == rank)
            order = np.argsort(timeline.start_s[mine], kind="stable")
            start, end = timeline.start_s[mine][order], timeline.end_s[mine][order]
            assert (start[1:] >= end[:-1] - 1e-9).all()


def test_larger_units_and_coarse_filling_are_never_better():
    asked = workload(encoder(layers=8))
    objective = {}
    for unit in (0.5, 1.0, 4.0):
        objective[unit] = filled(asked, 1, unit)[2].solution.objective
    coarse = filled(asked, 1, None, "coarse")[2].solution.objective
    assert objective[0.5] <= objective[1.0] * 1.001 <= objective[4.0] * 1.002
    assert objective[0.5] <= coarse * 1.001


def test_a_cap_on_live_micro_batches_holds_in_the_simulation():
    asked = workload(encoder(layers=4), microbatches=8, pp=2)
    made, step, free = filled(asked, 1)
    _, _, capped = filled(asked, 1, max_live=4)
    each = step.unit_bytes(0, 1, 0, 8)

    def most(found):
        timeline = simulate(StepSchedule(step, found.decision).build(), made.costs)
        return max(p.get("encoder_activations", 0) for p in timeline.peak_memory())

    room = step.feature_bytes(0) * 8
    assert most(capped) <= 5 * each + room  # one more is being encoded
    assert most(free) >= most(capped)


def test_first_microbatches_are_encoded_as_in_kimi_k3():
    # T5, forwards: 3 ranks, 6 micro-batches, an encoder as long as a stage's forward pass: rank r
    # encodes one up front and r more in its opening bubble.
    asked = workload(
        encoder(frozen=True, layers=1, forward_s=1.0, backward_s=1.0), pp=3, chunks=1, layers=3,
        microbatches=6, forward_s=1.0, backward_s=2.0,
    )  # fmt: skip
    _, _, found = filled(asked, 1, None, "coarse")
    assert found.head_s == pytest.approx(1.0, abs=1e-3)
    slots = found.decision.encoders[0].slots
    assert sorted(np.bincount(slots, minlength=3)) == [1, 2, 3]
    assert sorted(slots[:3]) == [0, 1, 2]
    assert np.bincount(slots, minlength=3)[0] == 1


# Baselines ------------------------------------------------------------------------------------


def test_baselines_run_everything_and_rank_as_expected():
    asked = workload(encoder(layers=8, forward_s=0.05, backward_s=0.1))
    made, step, bare = setting(asked)
    decisions = {
        "first": first_stage(step, bare),
        "balanced": balanced(step, made.costs, asked.schedule, 8, 2),
        "three": three_phase(step, bare, 1),
        "fine": filled(asked)[2].decision,
    }
    total = {}
    for name, decision in decisions.items():
        schedule = StepSchedule(TrainingStep(made, decision.plan), decision).build()
        assert count(schedule, "encode") >= 8
        total[name] = simulate(schedule, made.costs).makespan_s
    assert total["fine"] < total["three"] < total["first"]
    assert total["balanced"] < total["first"]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_a_chain_may_leave_the_first_rank_without_backbone(name):
    asked = workload(encoder(layers=8, forward_s=0.1, backward_s=0.2), pp=2, chunks=1, layers=8)
    made, step, _ = setting(asked, name)
    decision = balanced(step, made.costs, name, 8, 1)
    assert [stage.rank for stage in decision.stages] == [1]
    schedule = StepSchedule(step, decision).build()
    assert count(schedule, "I") == count(schedule, "W") == 8
    assert count(schedule, "encode_backward") == 8 * 8
    assert simulate(schedule, made.costs).makespan_s > 0.0


def test_min_max_cuts_are_optimal():
    rng = np.random.default_rng(0)
    for _ in range(30):
        times = rng.random(9)
        cuts = min_max_cuts(times, 3)
        assert cuts[0] == 0
        assert cuts[-1] == 9
        assert sorted(set(cuts)) == cuts
        best = min(
            max(times[:a].sum(), times[a:b].sum(), times[b:].sum())
            for a in range(1, 8) for b in range(a + 1, 9)
        )  # fmt: skip
        mine = max(times[a:b].sum() for a, b in itertools.pairwise(cuts))
        assert mine == pytest.approx(best)
    assert min_max_cuts([1.0] * 12, 4) == [0, 3, 6, 9, 12]
    with pytest.raises(SpecError, match="at least the 4 stages"):
        min_max_cuts([1.0] * 3, 4)


# Mutations ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    return filled(workload(), 2)


def changed(decision, rank, change):
    steps = parse_order(decision.orders[rank])
    orders = list(decision.orders)
    orders[rank] = write_order(change(list(steps)))
    return decision.model_copy(update={"orders": tuple(orders)})


def build(plan, rank, change):
    made, step, found = plan
    schedule = StepSchedule(step, changed(found.decision, rank, change)).build()
    return simulate(schedule, made.costs)


def test_dropped_and_doubled_work_is_refused(plan):
    with pytest.raises(SpecError, match="no F of micro-batch"):
        build(plan, 1, lambda s: [x for x in s if x.encoder >= 0 or x.op != "F" or x.microbatch])
    with pytest.raises(SpecError, match="in order"):
        build(plan, 0, lambda s: [x for x in s if x.encoder < 0 or x.unit])
    with pytest.raises(SpecError, match="in order"):
        build(plan, 2, lambda s: [*s, s[0]])


def test_work_of_another_rank_is_refused(plan):
    _, _, found = plan
    foreign = parse_order(found.decision.orders[1])[-1]
    with pytest.raises(SpecError, match="expected it on rank 1"):
        build(plan, 0, lambda s: [*s, foreign])


def test_swapped_actions_deadlock_or_are_refused(plan):
    def backward_first(steps):
        i = next(k for k, x in enumerate(steps) if x.op == "B" and x.encoder < 0)
        twin = next(k for k, x in enumerate(steps) if x == steps[i]._replace(op="F"))
        steps[i], steps[twin] = steps[twin], steps[i]
        return steps

    def unit_after_its_successor(steps):
        i = next(k for k, x in enumerate(steps) if x.encoder >= 0 and x.op == "F")
        steps[i], steps[i + 1] = steps[i + 1], steps[i]
        return steps

    for rank in range(4):
        with pytest.raises(SpecError, match="deadlock"):
            build(plan, rank, backward_first)
    with pytest.raises(SpecError, match="in order"):
        build(plan, 0, unit_after_its_successor)


def test_a_dropped_transfer_is_seen_before_anything_runs(plan):
    from foreplan.cost_models.schedule_builder import ScheduleBuilder

    _, step, found = plan
    schedule = StepSchedule(step, found.decision).build()
    sends = np.flatnonzero(schedule.op == schedule.ops.index("send"))
    builder, place = ScheduleBuilder(schedule.devices), {}
    for i in range(len(schedule)):
        if i != sends[0]:
            place[i] = len(place)
    for i, a in enumerate(schedule):
        if i in place:
            builder.add(
                a.op, a.rank, a.work, stage=a.stage, microbatch=a.microbatch, step=a.step,
                peer=a.peer, dependencies=[place[d] for d in a.dependencies if d in place],
                resources=a.resources, rendezvous=a.rendezvous,
            )  # fmt: skip
    with pytest.raises(SpecError, match="one send for it"):
        rank_programs(builder.build())


def test_words_beyond_the_decision_are_refused(plan):
    _, step, found = plan
    for word, expected in (
        ("99F0", "virtual stages below"), ("0F99", "a micro-batch"), ("e3.0F0", "an encoder"),
        ("e0.99F0", "units below"),
    ):  # fmt: skip
        orders = (f"{found.decision.orders[0]} {word}", *found.decision.orders[1:])
        with pytest.raises(SpecError, match=expected):
            StepSchedule(step, found.decision.model_copy(update={"orders": orders}))


def test_collectives_take_what_was_measured_from_the_computation_beside_them():
    asked = workload(pp=2, microbatches=4)
    # Exchanged at a price of the link, not at one that the workload states.
    times = asked.times.model_copy(
        update={"encoder_all_gather_s": None, "encoder_reduce_scatter_s": None}
    )
    asked = asked.model_copy(update={"times": times})
    made = problem(asked)
    found, spans, kinds = {}, {}, {}
    for share in (0.0, 0.5, 1.0):
        link = {"compute_share": share, "latency_s": 0.0}  # several buckets of few bytes
        tiers = [tier.model_copy(update=link) for tier in made.cluster.tiers]
        cluster = made.cluster.model_copy(update={"tiers": tuple(tiers)})
        step = TrainingStep(dataclasses.replace(made, cluster=cluster), asked.plan)
        backbone = BackboneTimeline.of(step, made.costs, asked.schedule, asked.microbatches)
        schedule = StepSchedule(step, fill(Filling(backbone, 1, 0.5)).decision).build()
        spans[share] = simulate(schedule, made.costs)
        exchanges = count(schedule, "all_gather") + count(schedule, "reduce_scatter")
        kinds[share] = count(schedule, "beside"), exchanges
        assert len(rank_programs(schedule)) == 2
        found[share] = schedule
    assert kinds[0.0][0] == 0
    assert kinds[0.5] == kinds[1.0]
    assert kinds[1.0][0] == kinds[1.0][1] > 0
    both, half = spans[1.0].total_s("beside"), spans[0.5].total_s("beside")
    assert (0.5 * both <= half).all()
    assert (half < both).all()
    gathered = spans[1.0].total_s("all_gather") + spans[1.0].total_s("reduce_scatter")
    assert both == pytest.approx(gathered, rel=1e-9)
    assert spans[1.0].makespan_s > spans[0.5].makespan_s > spans[0.0].makespan_s
    # A reduction takes its share behind the unit that it waits for.
    mine = [found[1.0][i] for i in found[1.0].of_rank(0) if found[1.0][i].resources == ("compute",)]
    behind = [b.step for a, b in itertools.pairwise(mine) if b.op == "beside" and a.op != "beside"]
    assert behind == sorted(behind, reverse=True)
    assert behind[-1] == 0
