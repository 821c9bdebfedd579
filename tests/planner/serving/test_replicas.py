"""Replicas: brute force over all splits, bounds, requests, prices, and a run of real processes."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreplan
from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.joint_schedule import joint_schedule
from foreplan.cost_models.simulator import simulate
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.export import export_plan
from foreplan.planner.export.exporter import exporter
from foreplan.planner.predict import Forecast
from foreplan.planner.report.decision import DecisionView
from foreplan.planner.serving.planner import ServingPlanner, serving_model
from foreplan.planner.serving.quality import plan_quality
from foreplan.planner.serving.replica_spec import ReplicasWorkload, batch_sizes
from foreplan.planner.serving.replica_split import deal_requests, requests_of
from foreplan.planner.serving.replica_worth import ReplicaWorth
from foreplan.planner.serving.replicas import ReplicasPlanner
from foreplan.solvers.assignment import groupings

PLANNER = ReplicasPlanner()
PROFILES = Path(__file__).parents[2] / "benchmarks" / "profiles" / "cluster.yaml"


@pytest.fixture
def make_replicas(make_problem):
    def make(*memory_mib, prices=(), isas="avx2 native", **workload):
        fields = {"batch": 4, "prompt_tokens": 16, "new_tokens": 8} | workload
        problem = make_problem(*memory_mib, isas=isas)
        devices = [
            entry.model_copy(update={"price_per_hour": price})
            for entry, price in zip(
                problem.cluster.devices, prices or [None] * len(memory_mib), strict=True
            )
        ]
        return dataclasses.replace(
            problem,
            cluster=problem.cluster.model_copy(update={"devices": tuple(devices)}),
            workload=validate(ReplicasWorkload, fields, "workload"),
        )

    return make


def oracle(problem):
    model = serving_model(problem)
    quality = plan_quality(model, problem.workload, 0)
    return ReplicaWorth(model, problem.cluster, problem.workload, problem.costs, quality)


def partitions(items):
    """All ways to put all of some items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]


@pytest.mark.parametrize(
    ("memory", "isas"),
    [((9, 14, 9), "avx2 native"), ((9, 9, 24, 9), "avx2 native native avx2"), ((30, 9), "native")],
)
def test_the_split_is_the_best_of_all(make_replicas, memory, isas):
    problem = make_replicas(*memory, isas=isas)
    worth = oracle(problem)
    kinds = [k for k, ranks in enumerate(worth.types) for _ in ranks]
    known = {}

    def value(group):
        counts = tuple(group.count(k) for k in range(len(worth.types)))
        if counts not in known:
            known[counts] = worth.worth(np.array(counts), hash(counts)).value
        return known[counts]

    best = max(
        sum(value([kinds[i] for i in group]) for group in partition)
        for partition in partitions(list(range(len(kinds))))
    )
    decision = PLANNER.decide(problem).decision
    law = sum(value([worth_type(worth, s.rank) for s in r.stages]) for r in decision.replicas)
    assert law == pytest.approx(best, rel=3e-3)


def worth_type(worth, rank):
    return next(k for k, ranks in enumerate(worth.types) if any(r.index == rank for r in ranks))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000))
def test_ceilings_are_never_below_what_a_group_gives(seed):
    rng = np.random.default_rng(seed)
    cluster, _ = foreplan.load_cluster(f"{rng.integers(1, 4)}xt4,{rng.integers(1, 3)}xa10")
    bits = [[16, 8, 4], [16], [8, 4]][int(rng.integers(3))]
    fields = {
        "batch": int(2 ** rng.integers(0, 4)), "prompt_tokens": int(rng.integers(8, 200)),
        "new_tokens": int(rng.integers(1, 20)), "bits": bits,
    }  # fmt: skip
    workload = validate(ReplicasWorkload, fields, "workload")
    model = foreplan.load_model("tiny-llama-random")
    costs = cost_book(cluster, Profiles(), "roofline")
    worth = oracle(Problem(model, cluster, workload, costs))
    groups = groupings(worth.counts, 3)
    rough = worth.optimistic(groups)
    for g in rng.permutation(len(groups))[:3]:
        found = worth.worth(groups[g], int(g))
        sharp = worth.tighter(groups[g])
        assert found.value <= found.bound * (1 + 1e-9)
        assert found.bound <= sharp * (1 + 1e-9)
        assert sharp <= rough[g] * (1 + 1e-9)


def test_replicas_are_judged_by_what_is_simulated(make_replicas):
    problem = make_replicas(24, 24)
    decision = PLANNER.decide(problem).decision
    assert PLANNER.judged(problem, decision) is decision
    forecast = Forecast(PLANNER, problem, decision)
    figures = forecast.metrics
    made = figures["requests"] * problem.workload.new_tokens
    assert figures["run_tokens_per_s"] * forecast.timeline.makespan_s == pytest.approx(made)
    assert figures["run_tokens_per_s"] <= figures["throughput_tokens_per_s"] * (1 + 1e-9)
    for name, low, high in (
        ("min_throughput_tokens_per_s", 0.99, 1.01), ("max_time_to_first_token_s", 1.01, 0.99),
        ("max_time_per_output_token_s", 1.01, 0.99),
    ):  # fmt: skip
        for share, met in ((low, True), (high, False)):
            limit = {name: share * figures[name.partition("_")[2]]}
            assert PLANNER.judged(make_replicas(24, 24, **limit), decision).limits_met == met


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(1, 12),
)
def test_every_request_is_dealt_once(replicas, times):
    batches = [1 << power for _, power in replicas]
    requests = times * max(batches)
    rounds = deal_requests([s for s, _ in replicas], batches, requests)
    assert sum(b * r for b, r in zip(batches, rounds, strict=True)) == requests


def test_every_decision_serves_the_same_requests(make_replicas):
    problem = make_replicas(24, 14, 9)
    decisions = [PLANNER.decide(problem).decision, *PLANNER.baselines(problem).values()]
    for decision in decisions:
        if isinstance(decision, str):
            continue
        assert sum(r.batch * r.rounds for r in decision.replicas) == requests_of(problem)
        schedule = PLANNER.schedule(problem, decision)
        prefilled = sum(
            r.rounds * (r.batch // r.prefill_microbatch) * len(r.stages) for r in decision.replicas
        )
        assert [schedule.ops[o] for o in schedule.op].count("prefill") == prefilled


def test_side_by_side_is_as_long_as_the_longest(make_replicas):
    problem = make_replicas(24, 14)
    serving = ServingPlanner()
    decision = PLANNER.decide(problem).decision
    parts = [PLANNER._alone(problem, replica).build() for replica in decision.replicas]
    joined = joint_schedule([(part, 2) for part in parts])
    together = simulate(joined, problem.costs)
    alone = [simulate(joint_schedule([(part, 2)]), problem.costs) for part in parts]
    assert together.makespan_s == pytest.approx(max(t.makespan_s for t in alone))
    assert len(joined) == 2 * sum(len(part) for part in parts)
    assert serving.kind == "serving"
    assert [joined[i].label for i in range(len(parts[0]))] == [a.label for a in parts[0]]


def test_the_bound_is_never_below_the_rate(make_replicas):
    for memory in ((9, 9), (24, 9, 14), (40, 40)):
        problem = make_replicas(*memory, min_average_bits=8)
        choice = PLANNER.decide(problem)
        assert choice.bound.gap <= 2e-3
        assert choice.bound.lower_s <= Forecast(PLANNER, problem, choice.decision).total_s * 1.002


def test_the_least_price_for_a_rate(make_replicas):
    free = make_replicas(24, 24, 24, prices=(1.0, 4.0, 2.0), isas="avx2 native native")
    full = Forecast(PLANNER, free, PLANNER.decide(free).decision).metrics
    assert full["price_per_hour"] == 7.0
    spent = []
    for share in (0.05, 0.5, 0.97):
        floor = share * full["throughput_tokens_per_s"]
        workload = free.workload.model_copy(
            update={"objective": "price", "min_throughput_tokens_per_s": floor}
        )
        problem = dataclasses.replace(free, workload=workload)
        found = Forecast(PLANNER, problem, PLANNER.decide(problem).decision).metrics
        assert found["throughput_tokens_per_s"] >= floor * 0.999
        spent.append(found["price_per_hour"])
    assert spent == sorted(spent)
    assert spent[0] < 7.0
    workload = free.workload.model_copy(update={"objective": "tokens_per_price"})
    problem = dataclasses.replace(free, workload=workload)
    best = Forecast(PLANNER, problem, PLANNER.decide(problem).decision).metrics
    assert best["tokens_per_price"] >= full["tokens_per_price"] * 0.999


@pytest.mark.parametrize("objective", ["price", "tokens_per_price"])
@pytest.mark.parametrize("prices", [(2.0, 0.5), (0.5, 2.0)])
def test_of_equal_devices_the_cheaper_is_paid_for(make_replicas, objective, prices):
    floor = {"min_throughput_tokens_per_s": 1e-3} if objective == "price" else {}
    problem = make_replicas(24, 24, prices=prices, isas="native", objective=objective, **floor)
    found = Forecast(PLANNER, problem, PLANNER.decide(problem).decision).metrics
    assert found["price_per_hour"] == 0.5


def test_an_equal_device_without_a_price_is_named(make_replicas):
    problem = make_replicas(24, 24, prices=(2.0, None), isas="native", objective="tokens_per_price")
    with pytest.raises(MissingDataError, match=r"price of .*#1 is not known"):
        PLANNER.decide(problem)


@pytest.mark.parametrize("objective", ["throughput", "price"])
@pytest.mark.parametrize("devices", ["t4", "2xa10", "rtx_3090,a10"])
def test_the_rate_that_a_plan_gives_may_be_asked_for(devices, objective):
    """Summed in another order it is another number by the last digit."""
    cluster, _ = foreplan.load_cluster(devices)
    entries = [e.model_copy(update={"price_per_hour": 1.0}) for e in cluster.devices]
    cluster = cluster.model_copy(update={"devices": tuple(entries)})
    fields = {"batch": 4, "prompt_tokens": 200, "new_tokens": 17, "bits": 16}

    def rate(**asked):
        plan = foreplan.plan(
            "replicas", "tiny-llama-random", cluster, fields | asked, costs="roofline"
        )
        return plan.predicted.metrics["throughput_tokens_per_s"]

    free = rate()
    wanted = {"objective": objective, "min_throughput_tokens_per_s": free}
    assert rate(**wanted) == pytest.approx(free, rel=1e-9)


def test_a_pipeline_over_more_devices_than_a_replica_may_have_is_no_lack_of_memory(make_replicas):
    problem = make_replicas(64, 64, 64, replica_devices=2)
    said = PLANNER.baselines(problem)["one pipeline over all devices"]
    assert said == "a replica has at most 2 of the 3 devices (replica_devices)"


def test_concurrency_is_held_within_memory(make_replicas):
    problem = make_replicas(24, 12, objective="concurrency", batch=16)
    decision = PLANNER.decide(problem).decision
    for ledger in PLANNER.memory(problem, decision):
        assert ledger.free_bytes >= 0
    rate = PLANNER.decide(make_replicas(24, 12, batch=16)).decision
    assert sum(r.batch for r in decision.replicas) >= sum(r.batch for r in rate.replicas)


def test_contradictions_are_refused(make_replicas):
    with pytest.raises(MissingDataError, match="is not known"):
        PLANNER.decide(make_replicas(24, 24, objective="tokens_per_price"))
    with pytest.raises(InfeasibleError, match=r"no split gives more than .*at most"):
        PLANNER.decide(make_replicas(24, 24, min_throughput_tokens_per_s=1e9))
    with pytest.raises(InfeasibleError, match="no split gives more than"):
        PLANNER.decide(
            make_replicas(24, prices=(1.0,), objective="price", min_throughput_tokens_per_s=1e9)
        )
    with pytest.raises(InfeasibleError, match="tokens sooner"):
        PLANNER.decide(make_replicas(24, 24, max_time_per_output_token_s=1e-9))
    with pytest.raises(InfeasibleError, match="no group of up to 2 devices holds"):
        PLANNER.decide(make_replicas(1, 1))
    for wrong in (
        {"objective": "price"}, {"objective": "concurrency", "min_throughput_tokens_per_s": 1.0},
        {"requests": 7},
    ):  # fmt: skip
        with pytest.raises(SpecError):
            make_replicas(24, **wrong)


def test_batches_divide_each_other():
    for batch, sizes in ((48, (3, 6, 12, 24, 48)), (7, (7,)), (8, (1, 2, 4, 8))):
        fields = {"batch": batch, "prompt_tokens": 1, "new_tokens": 1}
        assert batch_sizes(validate(ReplicasWorkload, fields, "w")) == sizes


def test_close_splits_take_part_in_the_confidence():
    asked = "batch=16,prompt_tokens=64,new_tokens=16,replica_devices=2,bits=16"
    made = foreplan.plan("replicas", "gpt2", "2xt4,a10", asked, costs="roofline")
    sure = made.confidence
    assert sure.draws > 0
    assert any(name.startswith("without replicas of ") for name in sure.share)
    assert sure.probability_best < 1
    assert sure.measure_next
    assert sure.measure_next[0].probability_best > sure.probability_best
    # Without a kind of replica there is no better split, by the expected prices.
    assert sure.probability_best >= max(sure.share.values())


def test_large_clusters_draw_one_replica_of_each_shape(make_replicas, monkeypatch):
    problem = make_replicas(24, 24, 24, isas="native")
    whole = Forecast(PLANNER, problem, PLANNER.decide(problem).decision).metrics
    monkeypatch.setattr("foreplan.planner.serving.replicas.MOST_DRAWN", 10)
    decision = PLANNER.decide(problem).decision
    drawn = Forecast(PLANNER, problem, decision)
    assert drawn.schedule.ranks < len(PLANNER.occupied(problem, decision))
    assert drawn.metrics["throughput_tokens_per_s"] == pytest.approx(
        whole["throughput_tokens_per_s"], rel=1e-6
    )
    assert math.isfinite(drawn.total_s)


def test_it_is_reported_and_exported(tmp_path):
    plan = foreplan.plan(
        "replicas", "tiny-llama-random", "2xt4,l4",
        {"batch": 4, "prompt_tokens": 16, "new_tokens": 8, "bits": [16, 8]}, costs="roofline",
    )  # fmt: skip
    view = DecisionView.of(plan.decision)
    assert len(view.stages) == len(plan.predicted.ranks)
    for target in ("vllm", "sglang"):
        written = export_plan(plan, target, tmp_path / target)
        scripts = [name for name in written.files if name.endswith(".sh")]
        assert len(scripts) == len(plan.decision["replicas"])
        for number, name in enumerate(sorted(scripts)):
            assert f"--port {8000 + number}" in written.files[name]
        assert exporter(target).read(written.files) == exporter(target).expected(plan)
    with pytest.raises(SpecError, match="for this target"):
        export_plan(plan, "torchtitan", tmp_path / "no")


def test_two_processes_serve_and_agree_with_one():
    """The smallest real run: two replicas of one processor each, two batches in a row."""
    plan = foreplan.plan(
        "replicas", "tiny-llama-random", PROFILES,
        {"batch": 2, "prompt_tokens": 8, "new_tokens": 3, "replica_devices": 1, "requests": 8},
        costs="measured",
    )  # fmt: skip
    assert len(plan.decision["replicas"]) == 2
    run = foreplan.verify(plan, rounds=1, only=()).document
    assert run is not None
    assert run.agreement
    for agreed in run.agreement:
        assert agreed.passed, agreed.details
        assert agreed.mode != "reference" or agreed.exact
    assert run.chosen.measured_s is not None


def unlike(devices="h100_sxm,p4", prices=(3.0, 0.3), **asked):
    """A problem of fast and slow devices, priced by the roofline, at dollars an hour by kind."""
    cluster, _ = foreplan.load_cluster(devices)
    by_kind = dict(zip(("h100_sxm", "p4"), prices, strict=True))
    entries = tuple(
        entry.model_copy(update={"price_per_hour": by_kind[str(entry.name)]})
        for entry in cluster.devices
    )
    cluster = cluster.model_copy(update={"devices": entries})
    fields = {"batch": 8, "prompt_tokens": 512, "new_tokens": 16, "replica_devices": 2}
    workload = validate(ReplicasWorkload, fields | asked, "workload")
    costs = cost_book(cluster, Profiles(), "roofline")
    return Problem(foreplan.load_model("tiny-llama-random"), cluster, workload, costs)


def test_requests_are_held_by_the_quickest_replicas_that_hold_them():
    def figures(**asked):
        problem = unlike(**asked)
        return Forecast(PLANNER, problem, PLANNER.decide(problem).decision).metrics

    held, rate = figures(objective="concurrency"), figures(requests=3200)
    assert held["concurrent_requests"] == rate["concurrent_requests"] == 16
    assert held["throughput_tokens_per_s"] == pytest.approx(rate["throughput_tokens_per_s"], 0.01)


def test_a_wanted_rate_is_met_by_the_replicas_that_are_paid_for():
    priced = unlike(objective="price", min_throughput_tokens_per_s=25_000)
    found = Forecast(PLANNER, priced, PLANNER.decide(priced).decision).metrics
    assert found["throughput_tokens_per_s"] >= 25_000
    assert found["price_per_hour"] == pytest.approx(3.3)
    with pytest.raises(SpecError, match=r"requests: got 8, expected at least 16: a batch of each"):
        PLANNER.decide(unlike(objective="concurrency", requests=8))


def test_an_alternative_that_wants_more_requests_is_no_reason_to_fail():
    """Without the one cheap GPU two slow ones are needed, and a batch of each is 16 requests."""
    problem = unlike(
        "h100_sxm,p4,p4", (0.3, 3.0), replica_devices=1, requests=8, objective="price",
        min_throughput_tokens_per_s=5_000,
    )  # fmt: skip
    choice = PLANNER.decide(problem)
    assert [r.rounds for r in choice.decision.replicas] == [1]
    assert "without replicas of h100_sxm" not in choice.near
    said = PLANNER.baselines(problem)["one device a replica"]
    assert isinstance(said, str) or len(said.replicas) == 1


def test_a_replica_that_a_short_run_leaves_out_is_told():
    short, long = (PLANNER.decide(unlike(requests=count)) for count in (32, 3200))
    assert len(short.decision.replicas) == 1
    assert any("1 of the split's replicas left out" in note for note in short.assumptions)
    assert len(long.decision.replicas) == 2
    assert not any("left out" in note for note in long.assumptions)
