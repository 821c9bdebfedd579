"""Replicas whose stages have several devices: their worth, their schedule, and a real run."""

import dataclasses

import numpy as np
import pytest
from tests.planner.conftest import Processors, Wired

import foreplan
from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.memory import MemoryLedger
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.export import export_plan
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.cases import solve_cases
from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.planner import serving_model
from foreplan.planner.serving.pricing import Pricing
from foreplan.planner.serving.quality import plan_quality
from foreplan.planner.serving.replica_spec import (
    ReplicaDecision,
    ReplicasDecision,
    ReplicasWorkload,
    batch_sizes,
    replica_workload,
)
from foreplan.planner.serving.replica_worth import ReplicaWorth
from foreplan.planner.serving.replicas import ReplicasPlanner
from foreplan.planner.serving.spec import StageDecision
from foreplan.planner.serving.time_limits import time_limits
from foreplan.planner.verify.rank_program import rank_programs

PLANNER = ReplicasPlanner()


@pytest.fixture
def make_replicas(make_problem):
    def make(*memory_mib, isas="native", **workload):
        fields = {"batch": 4, "prompt_tokens": 16, "new_tokens": 8, "bits": [16, 8]} | workload
        return dataclasses.replace(
            make_problem(*memory_mib, isas=isas),
            workload=validate(ReplicasWorkload, fields, "workload"),
            costs=CostBook([Wired(), Processors()]),
        )

    return make


def chains(problem, batch, devices):
    """The problems of one pipeline over some of the devices, as the serving planner makes them."""
    model = serving_model(problem)
    cluster = problem.cluster.model_copy(update={"devices": problem.cluster.devices[:devices]})
    quality = plan_quality(model, problem.workload, 0)
    pricing = Pricing(model, replica_workload(problem.workload, batch), problem.costs)
    room = tuple(rank.capacity for rank in cluster.ranks())
    return ServingChains(pricing, cluster, room, quality.omega, quality.max_omega)


@pytest.mark.parametrize("degree", ["auto", 2])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_group_is_worth_what_the_serving_planner_finds(make_replicas, devices, degree):
    problem = make_replicas(64, 64, 64, 64, tensor_parallel=degree)
    model, workload = serving_model(problem), problem.workload
    worth = ReplicaWorth(
        model, problem.cluster, workload, problem.costs, plan_quality(model, workload, 0)
    )
    limits = time_limits(workload)
    best = max(
        batch * workload.new_tokens
        / solve_cases(chains(problem, batch, devices), limits, gap=1e-6, within=0.0).best_s
        for batch in batch_sizes(workload)
    )  # fmt: skip
    group = np.array([devices])
    found = worth.worth(group, 0)
    assert found.value == pytest.approx(best, rel=2e-3)
    assert found.value <= found.bound * (1 + 1e-9)
    assert best <= found.bound * (1 + 1e-6)
    assert found.bound <= worth.tighter(group) * (1 + 1e-9)
    assert worth.tighter(group) <= worth.optimistic(group[None, :])[0] * (1 + 1e-9)


def test_a_free_choice_is_never_worse_than_one_device_a_stage(make_replicas):
    """Too little memory for a replica on one device: two share its layers, or split them."""
    rates = {}
    for degree in ("auto", 1, 2):
        problem = make_replicas(14, 14, 14, 14, tensor_parallel=degree)
        choice = PLANNER.decide(problem)
        figures = Forecast(PLANNER, problem, choice.decision).metrics
        rates[degree] = figures["throughput_tokens_per_s"]
        assert choice.bound.gap <= 2e-3
        assert len(PLANNER.occupied(problem, choice.decision)) == 4
        for ledger in PLANNER.memory(problem, choice.decision):
            assert isinstance(ledger, MemoryLedger)
            assert ledger.free_bytes >= 0
        degrees = {s.degree for r in choice.decision.replicas for s in r.stages}
        assert degree == "auto" or degrees == {degree}
    assert rates["auto"] >= max(rates.values()) * 0.98


def test_a_real_run_sums_on_its_own_and_waits_on_its_own_ranks(make_replicas):
    problem = make_replicas(64, 64, tensor_parallel=2, batch=2, requests=4)
    decision = PLANNER.decide(problem).decision
    assert [r.rounds for r in decision.replicas] == [4 // decision.replicas[0].batch]
    drawn = PLANNER.schedule(problem, decision)
    real, members = PLANNER.real(problem, decision)
    assert members == (0, 1)
    assert PLANNER.processes(problem, decision) == real.ranks == drawn.ranks == 2
    for schedule in (drawn, real):
        for action in schedule:
            if action.op == "prefill":
                assert all(schedule[i].rank == action.rank for i in action.dependencies)


def test_degrees_that_nothing_has_are_refused(make_replicas):
    with pytest.raises(SpecError, match="at most 2"):
        PLANNER.decide(make_replicas(64, 64, tensor_parallel=4))
    with pytest.raises(InfeasibleError, match="no group of up to 1 devices"):
        PLANNER.decide(make_replicas(64, 64, tensor_parallel=2, replica_devices=1))


def test_groups_of_replicas_are_exported(tmp_path):
    plan = foreplan.plan(
        "replicas", "tiny-llama-random", "4xa100-80g",
        {"batch": 4, "prompt_tokens": 16, "new_tokens": 8, "bits": 16, "tensor_parallel": 2},
        costs="roofline",
    )  # fmt: skip
    assert len(plan.decision["replicas"]) == 2
    written = export_plan(plan, "vllm", tmp_path)
    scripts = [text for name, text in written.files.items() if name.endswith(".sh")]
    assert len(scripts) == 2
    assert all("--tensor-parallel-size 2" in text for text in scripts)


def test_two_processes_are_one_replica(two_processors):
    """Two batches, one after the other, on two processors that share every layer."""
    workload = {
        "batch": 2, "prompt_tokens": 8, "new_tokens": 3, "bits": 16, "tensor_parallel": 2,
        "requests": 4,
    }  # fmt: skip
    made = foreplan.plan(
        "replicas", "tiny-llama-random", two_processors, workload, costs="measured"
    )
    assert [s["peers"] for r in made.decision["replicas"] for s in r["stages"]] == [[1]]
    run = foreplan.verify(made, rounds=1, only=())
    assert [each.mode for each in run.document.agreement] == ["reference", "forced"]
    assert all(each.exact for each in run.document.agreement)
    assert (run.timeline.total_s("all_reduce") > 0).all()


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_rounds_of_unlike_stages_can_be_run(make_replicas, degrees):
    """No rank waits for another one that does not send to it."""
    problem = make_replicas(64, 64, 64, 64, batch=2, tensor_parallel="auto")
    kernels = {f"{phase}/attention": "bf16/bf16/torch.sdpa" for phase in ("prefill", "decode")}
    kernels |= {f"{phase}/{what}": "bf16/bf16/torch.linear" for phase in ("prefill", "decode")
                for what in ("head", "linear/16")}  # fmt: skip
    stages, rank = [], 0
    for k, degree in enumerate(degrees):
        peers = tuple(range(rank + 1, rank + degree))
        stages.append({
            "rank": rank, "device": problem.cluster.ranks()[rank].label, "peers": peers,
            "start": 2 * k, "end": 2 * k + 2, "bits": (16, 16), "kernels": kernels,
        })  # fmt: skip
        rank += degree
    model = serving_model(problem)
    model = model.model_copy(update={"layers": 4})
    problem = dataclasses.replace(problem, model=model)
    replica = ReplicaDecision(
        stages=tuple(StageDecision(**stage) for stage in stages), prefill_microbatch=1,
        decode_microbatch=2, average_bits=16.0, omega=0.0, batch=2, rounds=3,
    )  # fmt: skip
    real, members = PLANNER.real(problem, ReplicasDecision.of((replica,)))
    assert len(rank_programs(real, ordered=True)) == len(members) == sum(degrees)
