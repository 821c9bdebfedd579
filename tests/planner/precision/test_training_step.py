"""Replay, rows of the solver and saved tensors against each other and against torch."""

import dataclasses

import numpy as np
import pytest
import torch

from foreplan.cost_models.costs import CostBook, Estimate
from foreplan.cost_models.simulator import simulate
from foreplan.datasets.tier import Contention
from foreplan.planner.precision.allocation import MEMORY
from foreplan.planner.precision.execution.modules import apply_variants
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.planner import PrecisionPlanner
from foreplan.planner.precision.pricing import StepTables
from foreplan.planner.precision.saved import SavedBytes
from foreplan.planner.precision.situation import Situation
from foreplan.planner.precision.task import training_task
from foreplan.planner.predict import Forecast
from foreplan.solvers.choice_score import evaluate


class Unit:
    """Every work takes a second."""

    def estimate(self, work, device):
        return Estimate.exact(1.0)


@pytest.fixture(scope="module", params=[0.0, 0.6])
def situation(make_problem, request):
    """Without and with what an all-reduce takes from the backward pass beside it."""
    problem = make_problem()
    tiers = tuple(
        t.model_copy(update={"compute_share": request.param}) for t in problem.cluster.tiers
    )
    cluster = problem.cluster.model_copy(update={"tiers": tiers})
    return Situation(dataclasses.replace(problem, cluster=cluster))


def test_a_backward_pass_loses_to_the_all_reduces_beside_it(situation):
    share = situation.problem.cluster.taken_beside("all_reduce", (0, 1))
    replay = situation.replay
    assert len(replay.all_reduce_s) > 2
    assert replay.beside_s[:, 0] == pytest.approx(0)  # the first part has none beside it
    lost = replay.beside_s[0, 1:]
    assert (lost > 0).all() == (share > 0)
    bytes_of = np.array(replay.buckets.bytes[:-1])
    assert (np.diff(lost[np.argsort(bytes_of)]) >= 0).all()


def random_names(situation, rng, kind):
    tables = situation.devices[kind].tables
    return {
        tables.graph.operators[i].module: str(rng.choice([p.name for p in tables.options[i]]))
        for i in tables.graph.adjustable
    }


def random_plans(situation, count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield [
            device.tables.choice(random_names(situation, rng, k))
            for k, device in enumerate(situation.devices)
        ]


def unit_omega(situation):
    return {
        o.module: {p.name: 1.0 for p in situation.devices[0].tables.options[i]}
        for i, o in enumerate(situation.graph.operators)
        if o.module
    }


def contended_cluster(cluster, kind):
    """With what ranks of a host lose to each other."""
    if not kind:
        return cluster
    known = Contention(kind=kind, factors={2: 1.7, 3: 2.4})
    return cluster.model_copy(update={"contention": (known,)})


@pytest.mark.parametrize("kind", ["", "training", "memory"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("devices", ["1xt4", "1xl4,1xt4", "2xt4,1xa100-80g"])
def test_replay_is_the_simulation_of_the_schedule(make_problem, devices, steps, kind):
    """Of all its steps: ranks of unlike speed begin the later ones one after another."""
    problem = make_problem(devices, steps=steps)
    cluster = contended_cluster(problem.cluster, kind)
    problem = dataclasses.replace(problem, cluster=cluster)
    situation, planner = Situation(problem), PrecisionPlanner()
    omega = {
        o.module: {p.name: 0.0 for d in situation.devices for p in d.tables.options[i]}
        for i, o in enumerate(situation.graph.operators)
        if o.module
    }
    for plan in random_plans(situation, 3):
        replayed = situation.replay.run(situation.each(plan))
        judged = Forecast(planner, problem, situation.decision(plan, omega, 1.0))
        assert replayed.iteration_s == pytest.approx(judged.metrics["iteration_s"], rel=1e-9)
        peaks = [sum(peak.values()) for peak in judged.timeline.peak_memory()]
        assert list(replayed.saved_bytes) == peaks


@pytest.mark.parametrize("steps", [1, 4])
def test_rows_refuse_no_plan_that_the_replay_agrees_to(make_problem, steps):
    situation = Situation(make_problem("1xl4,1xt4,1xa100-80g", steps=steps))
    allocations = situation.allocations(unit_omega(situation))
    for plan in random_plans(situation, 8):
        taken_s = situation.replay.run(situation.each(plan)).iteration_s
        tightest = 0.0
        for allocation, choice, ranks in zip(allocations, plan, situation.kinds, strict=True):
            update_s = situation.replay.update_s[ranks[0]]
            problem = allocation.problem(taken_s * (1 + 1e-9), update_s, np.inf)
            found = evaluate(problem, [int(c) for c in choice])
            assert found.feasible
            tightest = max(tightest, float((found.usage / problem.limits)[:-1].max()))
        assert tightest > 0.98


def test_a_plan_meets_all_rows_if_and_only_if_its_replay_meets_the_target(situation):
    """The queue of all-reduces unrolled into rows is exact, whatever the plan."""
    allocations = situation.allocations(unit_omega(situation))
    plans = list(random_plans(situation, 12))
    times = [situation.replay.run(situation.each(plan)).iteration_s for plan in plans]
    seen = set()
    for plan, time_s in zip(plans, times, strict=True):
        for target_s in (*(t * (1 - 1e-6) for t in times), time_s * (1 + 1e-6)):
            met = all(
                evaluate(
                    allocation.problem(target_s, situation.replay.update_s[ranks[0]], np.inf),
                    [int(c) for c in choice],
                ).feasible
                for allocation, choice, ranks in zip(
                    allocations, plan, situation.kinds, strict=True
                )
            )
            assert met == (time_s <= target_s)
            seen.add(met)
    assert seen == {True, False}


def test_cascade_of_the_solver_is_that_of_the_tables(situation):
    for plan in random_plans(situation, 5):
        for allocation, choice in zip(
            situation.allocations(unit_omega(situation)), plan, strict=True
        ):
            problem = allocation.problem(np.inf, 0.0, np.inf)
            assert problem.complete([int(c) for c in choice]) == tuple(choice.tolist())


def test_memory_row_is_a_lower_bound_and_exact_for_uniform_plans(situation):
    allocation, device = situation.allocations(unit_omega(situation))[0], situation.devices[0]
    problem = allocation.problem(np.inf, 0.0, np.inf)
    row = problem.row(MEMORY)
    for plan in random_plans(situation, 8):
        held = device.saved.held_bytes(plan[0]).sum()
        used = evaluate(problem, [int(c) for c in plan[0]]).usage[row]
        assert used <= held * (1 + 1e-12)
    for precision in ("fp32", "bf16"):
        choice = situation.uniform(0, precision)
        used = evaluate(problem, [int(c) for c in choice]).usage[row]
        assert used == pytest.approx(device.saved.held_bytes(choice).sum(), rel=1e-12)


def saved_by_torch(task, names):
    """Bytes that autograd keeps, parameters and buffers aside, each storage once."""
    module = apply_variants(task.module().train(), names)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    inputs, target = task.batch(0, 0)
    own.add(target.untyped_storage().data_ptr())
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = task.loss(module(*inputs).float(), target)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("network", ["byte_lm", "digits_mlp", "digits_cnn"])
def test_saved_bytes_are_those_that_autograd_keeps(make_problem, network):
    options = {} if network != "byte_lm" else {"context": 16, "width": 32, "layers": 2, "heads": 2}
    problem = make_problem(batch=8, network=network, network_options=options)
    task = training_task(None, problem.workload, 0)
    tables = StepTables(
        TrainingGraph.of(task), CostBook([Unit()]), "device", "cpu", problem.workload.precisions
    )
    saved, rng = SavedBytes(tables), np.random.default_rng(3)
    options = {o.module: [p.name for p in tables.options[i]]
               for i, o in enumerate(tables.graph.operators) if o.module}  # fmt: skip
    plans = [{m: texts[min(k, len(texts) - 1)] for m, texts in options.items()} for k in range(4)]
    plans += [{m: str(rng.choice(texts)) for m, texts in options.items()} for _ in range(3)]
    for names in plans:
        predicted = int(saved.held_bytes(tables.choice(names)).sum())
        assert predicted == pytest.approx(saved_by_torch(task, names), rel=0.01)


def test_buckets_cut_the_backward_pass(situation):
    buckets = situation.buckets
    assert len(buckets.names) > 3
    assert sum(buckets.bytes) == 4 * sum(situation.graph.parameters.values())
    # Autograd walks the operators from the last to the first.
    assert list(buckets.part) == sorted(buckets.part, reverse=True)
    first = {}
    for i, o in enumerate(situation.graph.operators):
        for name in o.node.parameters:
            first.setdefault(name, i)
    for q, names in enumerate(buckets.names):
        assert all(buckets.part[first[name]] <= q for name in names)


def test_steps_follow_each_other(situation):
    plan = next(random_plans(situation, 1))
    choices = situation.each(plan)
    one = simulate(situation.replay.schedule(choices), situation.problem.costs).makespan_s
    three = simulate(situation.replay.schedule(choices, 3), situation.problem.costs).makespan_s
    assert 2 * one < three <= 3 * one * (1 + 1e-9)
