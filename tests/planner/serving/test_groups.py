"""Stages of several devices: the search over groupings, its bound, the schedule and documents."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.conftest import Processors, Wired

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner, chain
from foreplan.planner.serving.cases import solve_cases
from foreplan.planner.serving.groups import Kind, grouping_count, groupings
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload
from foreplan.planner.serving.time_limits import time_limits
from foreplan.planner.what_if import what_if
from foreplan.solvers.chain_partition import solve

PLANNER = ServingPlanner()
FOUR = (64.0,) * 4
SIZES = {"prefill_microbatch": 2, "decode_microbatch": 2}


def chains_of(problem):
    return PLANNER._chains(problem)


@given(
    sizes=st.lists(st.sets(st.integers(1, 4), min_size=1), min_size=1, max_size=2),
    devices=st.lists(st.integers(0, 7), min_size=2, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_groupings_are_all_that_cannot_be_added_to(sizes, devices):
    devices = devices[: len(sizes)]
    kinds = [Kind(t, d, ()) for t, each in enumerate(sizes) for d in sorted(each)]
    found = {tuple(int(n) for n in row) for row in groupings(kinds, devices)}
    every = [range(devices[kind.type] // kind.degree + 1) for kind in kinds]

    def used(way, t):
        return sum(n * kind.degree for n, kind in zip(way, kinds, strict=True) if kind.type == t)

    fitting = {
        way
        for way in itertools.product(*every)
        if all(used(way, t) <= count for t, count in enumerate(devices))
    }
    assert found <= fitting
    for way in fitting:  # whatever fits is part of one of them
        assert any(all(a <= b for a, b in zip(way, full, strict=True)) for full in found)
    for way in found:
        more = [tuple(n + (i == k) for i, n in enumerate(way)) for k in range(len(kinds))]
        assert not fitting.intersection(more)
    assert len(found) == grouping_count(kinds, devices)
    # Where there are too many, some of them, with every kind that there is room for.
    thin = {tuple(int(n) for n in row) for row in groupings(kinds, devices, most=1)}
    assert thin <= found
    for k in range(len(kinds)):
        assert any(way[k] for way in thin) == any(way[k] for way in found)


def test_hundreds_of_alike_devices_have_few_groupings():
    kinds = [Kind(t, d, ()) for t in (0, 1) for d in (1, 2, 4, 8, 16, 32, 64)]
    one, two = kinds[:7], kinds
    assert grouping_count(one, [300]) > 100_000
    thin = groupings(one, [300], most=4096)
    assert 100 < len(thin) <= 4096
    assert any((way[3], way[4]) == (27, 5) for way in thin)  # two sizes in any numbers
    assert (thin @ [kind.degree for kind in one] == 300).all()
    assert len(groupings(two, [150, 150], most=4096)) <= 7**4


@pytest.mark.parametrize("memory", [FOUR, (24.0,) * 3])
def test_a_search_of_some_groupings_claims_no_more_than_holds_of_all(
    make_problem, memory, monkeypatch
):
    problem = make_problem(*memory, bits=[16, 8], tensor_parallel="auto")
    full = solve_cases(chains_of(problem), time_limits(problem.workload), gap=1e-6, within=0.02)
    monkeypatch.setattr(chain, "MOST_WAYS", 1)
    chains = PLANNER._made_chains(problem)
    assert not chains.complete
    found = solve_cases(chains, time_limits(problem.workload), gap=1e-6, within=0.02)
    assert found.lower_s <= full.best_s * (1 + 1e-6)
    assert full.best_s * (1 - 1e-6) <= found.best_s < math.inf


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("memory", "isas"), [(FOUR, "native"), ((24.0,) * 3, "native"), (FOUR, "avx2 native")]
)
def test_the_search_finds_the_best_of_all_groupings(make_problem, memory, isas, fast):
    """Against the solver run on every grouping and every pair of micro-batch sizes."""
    problem = make_problem(*memory, isas=isas, bits=[16, 8], tensor_parallel="auto")
    if fast:
        costs = CostBook([Wired(), Processors()])
        problem = dataclasses.replace(problem, costs=costs)
    chains = chains_of(problem)
    ways = chains.groupings()
    assert len(ways) > 1
    best = min(
        solve(dataclasses.replace(chains.problem(sizes), counts=way), gap=1e-6).objective
        for sizes in chains.sizes()
        for way in ways
    )
    found = solve_cases(chains, time_limits(problem.workload), gap=1e-6, within=0.02)
    assert found.proven
    assert found.best_s == pytest.approx(best, rel=2e-6)
    assert found.lower_s <= best * (1 + 1e-9)
    assert found.lower_s >= best * (1 - 1e-5)
    _, sizes, answer = min(found.found, key=lambda each: each[0])
    degrees = {stage.degree for stage in chains.decision(sizes, answer).stages}
    assert (degrees != {1}) == fast


@pytest.mark.parametrize("memory", [FOUR, (14.0, 14.0)])
def test_a_free_choice_is_never_worse_than_any_degree(make_problem, memory):
    def bound(degree):
        made = make_problem(*memory, isas="native", bits=[8], tensor_parallel=degree, **SIZES)
        choice = PLANNER.decide(made)
        return choice.bound.lower_s, Forecast(PLANNER, made, choice.decision).total_s

    free = bound("auto")
    for degree in (1, 2):
        assert free[0] <= bound(degree)[1] * 1.02
        assert free[1] <= bound(degree)[1] * 1.02


def test_where_no_grouping_fits_the_nearest_is_named(make_problem):
    problem = make_problem(8, 8, isas="native", bits=[8], tensor_parallel="auto", **SIZES)
    with pytest.raises(InfeasibleError, match=r"fits: layers .* need .* MiB of"):
        PLANNER.decide(problem)


def test_one_device_a_stage_gives_the_same_document_as_ever(make_problem):
    said, unsaid = make_problem(*FOUR, tensor_parallel=1, **SIZES), make_problem(*FOUR, **SIZES)
    decisions = [PLANNER.decide(p).decision for p in (said, unsaid)]
    assert decisions[0] == decisions[1]
    for record in (said.workload, *decisions):
        text = record.model_dump_json()
        assert "peers" not in text
        assert "tensor_parallel" not in text
        assert type(record).model_validate_json(text) == record


@pytest.mark.parametrize(("degree", "said"), [(1, False), (2, True)])
def test_plans_of_processors_that_share_layers_say_what_sums_may_take(make_problem, degree, said):
    problem = make_problem(*FOUR, isas="native", bits=[8], tensor_parallel=degree, **SIZES)
    notes = PLANNER.decide(problem).assumptions
    assert any("sums between processors" in note for note in notes) == said


def test_a_stage_of_several_devices_survives_its_document(make_problem):
    problem = make_problem(*FOUR, isas="native", tensor_parallel=2, **SIZES)
    decision = PLANNER.decide(problem).decision
    assert all(stage.degree == 2 for stage in decision.stages)
    document = json.loads(decision.model_dump_json())
    assert all(len(stage["peers"]) == 1 for stage in document["stages"])
    assert ServingDecision.model_validate_json(json.dumps(document)) == decision
    workload = ServingWorkload.model_validate_json(problem.workload.model_dump_json())
    assert workload.tensor_parallel == 2


def test_simulator_agrees_with_the_law_and_memory_is_shared(make_problem):
    problem = make_problem(
        *FOUR, isas="native", bits=[16], tensor_parallel=2, new_tokens=16, **SIZES
    )
    choice = PLANNER.decide(problem)
    forecast = Forecast(PLANNER, problem, choice.decision)
    assert forecast.total_s == pytest.approx(choice.bound.lower_s, rel=0.05)
    alone = choice.decision.model_copy(
        update={"stages": tuple(s.model_copy(update={"peers": ()}) for s in choice.decision.stages)}
    )
    whole = PLANNER.memory(problem, alone)
    parts = PLANNER.memory(problem, choice.decision)
    assert len(parts) == 2 * len(whole)
    for k, ledger in enumerate(whole):
        for part in parts[2 * k : 2 * k + 2]:
            assert part.items["kv_cache"] == ledger.items["kv_cache"] / 2
            assert ledger.items["weights"] / 2 < part.items["weights"]
            assert part.items["weights"] < 0.51 * ledger.items["weights"]


def test_real_runs_sum_twice_a_layer_and_simulated_ones_as_long(make_problem):
    problem = make_problem(*FOUR[:2], isas="native", bits=[16], tensor_parallel=2, **SIZES)
    decision = PLANNER.decide(problem).decision
    drawn = PLANNER.schedule(problem, decision)
    real, members = PLANNER.real(problem, decision)
    assert members == decision.ranks == PLANNER.ranks(problem, decision)
    assert real.ranks == drawn.ranks == PLANNER.processes(problem, decision) == 2
    passes = 2 + 7 * 2
    layers = problem.model.layers
    ops = [action.op for action in real]
    assert ops.count("all_reduce") == 2 * passes * (2 * layers + 1)
    assert ops.count("all_gather") == 2 * passes
    sums = [a.work for a in drawn if a.op == "all_reduce" and a.rank == 0]
    assert sum(n for work in sums for _, n in work.parts) == passes * (2 * layers + 2)
    for rank in range(2):
        seconds = sum(
            problem.costs.cost(a.work, real.devices[rank]).mean_s
            for a in real
            if a.rank == rank and a.op in ("all_reduce", "all_gather")
        )
        drawn_s = Forecast(PLANNER, problem, decision).timeline.total_s("all_reduce")[rank]
        assert seconds == pytest.approx(drawn_s)


def test_baselines_are_single_devices_and_one_group_of_each_type(make_problem):
    problem = make_problem(*FOUR, isas="native", bits=[8], tensor_parallel="auto", **SIZES)
    made = {k: d for k, d in PLANNER.baselines(problem).items() if not isinstance(d, str)}
    wide = [d for name, d in made.items() if name.startswith("tensor parallelism")]
    assert wide
    for decision in wide:
        assert [stage.degree for stage in decision.stages] == [4]
    alone = [d for name, d in made.items() if not name.startswith("tensor parallelism")]
    assert alone
    assert all(stage.degree == 1 for decision in alone for stage in decision.stages)


@pytest.mark.parametrize(("degree", "words"), [(3, "can be split"), (8, "at most 2")])
def test_impossible_degrees_are_refused(make_problem, degree, words):
    problem = make_problem(64, 64, isas="native", model="demo-llama-random", tensor_parallel=degree)
    with pytest.raises(SpecError, match=words):
        PLANNER.decide(problem)


def test_unequal_devices_share_no_stage(make_problem):
    problem = make_problem(*FOUR[:2], isas="native", tensor_parallel=2, **SIZES)
    decision = PLANNER.decide(problem).decision
    unlike = make_problem(*FOUR[:2], isas="avx2 native", **SIZES)
    with pytest.raises(SpecError, match="equal devices of one host"):
        PLANNER.schedule(unlike, decision)


def test_gpus_listed_one_by_one_are_grouped_only_where_devices_may_share(make_problem):
    problem = make_problem(*FOUR, isas="native", **SIZES)
    assert [len(t) for t in chains_of(problem).types] == [4]
    assert np.array_equal(chains_of(problem).groupings(), [[4]])


@pytest.fixture
def two_gpus(make_problem):
    """Two GPUs of a host, listed one by one as every host's own are."""

    def make(memory_mib, names=("cuda:0", "cuda:1"), **workload):
        tier = {"group": "all", "scope": "host", "latency_s": 1e-6,
                "bandwidth_bytes_per_s": 50e9, "source": "made up"}  # fmt: skip
        devices = [{"name": name, "memory_bytes": memory_mib << 20} for name in names]
        made = make_problem(64, isas="native", model="demo-llama-random", **workload)
        return dataclasses.replace(
            made, costs=CostBook([Wired(), Processors()]),
            cluster=validate(Cluster, {"devices": devices, "tiers": [tier]}, "made-up GPUs"),
        )  # fmt: skip

    return make


def test_gpus_of_a_host_share_a_stage_and_get_more_memory_together(two_gpus):
    problem = two_gpus(160, theta_s=10.0, tensor_parallel=2)
    decision = PLANNER.decide(problem).decision
    assert [stage.ranks for stage in decision.stages] == [(0, 1)]
    forecast = Forecast(PLANNER, problem, decision)  # which checks the decision
    (memory,) = what_if(PLANNER, problem, decision, forecast.prediction(), forecast.total_s)
    assert memory.limit == "memory of cuda:0, cuda:1"
    assert memory.gain > 0.1  # more bits, which theta rewards; more for one alone is of no use
    slices = two_gpus(160, ("cuda:0/sms=66", "cuda:1/sms=66"), tensor_parallel=2)
    with pytest.raises(SpecError, match="equal devices of one host"):
        PLANNER.schedule(slices, decision)


def test_a_group_that_lacks_memory_is_named_with_what_would_help(two_gpus, make_problem):
    with pytest.raises(InfeasibleError) as short:
        PLANNER.decide(two_gpus(135, tensor_parallel=2))
    assert "of each of 2 devices like localhost/cuda:0;" in str(short.value)
    assert "or let tensor_parallel be auto" in str(short.value)
    # A device that no group has a place for counts for nothing.
    problem = make_problem(
        64, 24, 24, isas="avx2 native native", tensor_parallel=2, bits=[16],
        model="demo-llama-random", **SIZES,
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="of 2 devices that tensor_parallel=2 can put"):
        PLANNER.decide(problem)
