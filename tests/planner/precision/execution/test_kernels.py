from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.costs import CostBook, HostLaunch
from foreplan.cost_models.schedule import Action
from foreplan.errors import SpecError
from foreplan.planner.precision.execution.decisions import uniform_decision
from foreplan.planner.precision.execution.kernels import TrainingKernels
from foreplan.planner.precision.execution.reference import (
    LocalRanks,
    compare_training,
    single_process_training,
)
from foreplan.planner.precision.pricing import StepTables, Unpriced
from foreplan.planner.precision.saved import SavedBytes
from foreplan.planner.precision.situation import Situation
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task

Make = Callable[..., PrecisionWorkload]


def act(op: str, step: int = -1) -> Action:
    return Action(op, 0, HostLaunch(), step=step)


@pytest.mark.parametrize("network", ["byte_lm", "digits_mlp", "digits_cnn"])
def test_the_mean_gradient_of_unlike_ranks_is_that_of_plain_torch(
    network: str, workload: Make
) -> None:
    """Each rank alone with its plan, by an ordinary ``backward()``, gives the same mean."""
    work = workload(network)
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["fp32", "bf16"])
    assert len(decision.buckets) >= 2
    local = LocalRanks(task, work, decision)
    local._run("forward")
    for q in range(len(decision.buckets)):
        local._run("backward", q)
    payloads = [[rank.payload(act("all_reduce", q)).clone() for q in range(len(decision.buckets))]
                for rank in local.ranks]  # fmt: skip
    local.close()
    from foreplan.planner.precision.execution.modules import apply_precision

    for rank, mine in enumerate(payloads):
        model = apply_precision(task.module(), decision, rank)
        inputs, target = task.batch(0, rank)
        task.loss(model(*inputs), target).backward()
        named = dict(model.named_parameters())
        for names, flat in zip(decision.buckets, mine, strict=True):
            expected = torch.cat([named[n].grad.flatten() / 2 for n in names])  # type: ignore[union-attr]
            assert torch.equal(flat, expected)


def test_control_comes_back_whenever_a_bucket_is_ready(workload: Make) -> None:
    """Later layers' gradients are there, earlier ones' are not, and the pass has not ended."""
    work = workload("digits_mlp", network_options={"width": 64, "layers": 6})
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["bf16"])
    kernels = TrainingKernels(task, work, decision, 0)
    kernels.run(act("forward"))
    zero = [bool(flat.eq(0).all()) for flat in kernels._buckets.flat]
    assert all(zero)
    for q in range(len(zero)):
        kernels.run(act("backward", q))
        filled = [not bool(flat.eq(0).all()) for flat in kernels._buckets.flat]
        assert filled[: q + 1] == [True] * (q + 1)
        # A bucket may hold the first gradients of a layer whose second ends the bucket before it.
        assert not any(filled[q + 2 :])
    kernels.run(act("optimizer"))
    kernels.close()


def test_a_run_can_be_repeated_and_left(workload: Make) -> None:
    threads = threading.active_count()
    work = workload(optimizer="adamw")
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["int8-all", "bf16"])
    local = LocalRanks(task, work, decision)
    for _ in range(2):
        local.step()
    first = local.result()
    local._run("forward")
    local._run("backward", 0)  # left in the middle of a backward pass
    for rank in local.ranks:
        rank.reset()
    for _ in range(2):
        local.step()
    assert local.result() == first
    assert local.ranks[0].memory_bytes().keys() == {"weights", "gradients", "optimizer"}
    local.close()
    assert threading.active_count() == threads


def test_runs_share_a_thread(workload: Make) -> None:
    """Libraries keep by thread what takes long to make: cuDNN its plans of attention."""
    work = workload()
    task = training_task(None, work, 0)
    kernels = TrainingKernels(task, work, uniform_decision(task, work, ["bf16"]), 0)
    seen: list[int] = []
    kernels.module.register_forward_hook(lambda *_: seen.append(threading.get_ident()))
    for _ in range(3):
        kernels.reset()
        kernels.run(act("forward"))
        kernels.run(act("backward", 0))
    kernels.close()
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()


def test_batches_of_a_run_are_drawn_before_it(
    workload: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(steps=2)
    task = training_task(None, work, 0)
    kernels = TrainingKernels(task, work, uniform_decision(task, work, ["fp32"]), 0)
    draw, drawn = task.batch, list[int]()

    def counted(step: int, rank: int) -> Any:
        drawn.append(step)
        return draw(step, rank)

    monkeypatch.setattr(task, "batch", counted)
    kernels.reset()
    assert drawn == [0, 1]
    for _ in range(3):  # one more than the workload has
        kernels.run(act("forward"))
        kernels.run(act("backward", 1 << 20))
        kernels.run(act("optimizer"))
    kernels.close()
    assert drawn == [0, 1, 2]


def test_modes_agree_as_far_as_they_should(workload: Make) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["fp32", "bf16"])
    fast, exact = (
        single_process_training(task, work, decision, mode=mode, steps=2)
        for mode in ("fast", "reference")
    )
    assert len(fast["losses_0"]) == len(fast["losses_1"]) == 2
    assert compare_training(fast, fast, mode="reference").exact
    rounded = compare_training(fast, exact, mode="fast")
    assert rounded.passed
    assert not rounded.exact
    assert float(rounded.details["gradient_error"]) > 0
    assert not compare_training(fast, exact, mode="reference").passed
    other = single_process_training(
        training_task(None, work, 1), work, decision, mode="fast", steps=2
    )
    assert not compare_training(other, exact, mode="fast").passed


def test_fp32_may_round_otherwise_on_unlike_processors_and_nothing_else(workload: Make) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["fp32", "fp32"])
    exact = single_process_training(task, work, decision, mode="reference", steps=2)

    def changed(factor: float) -> dict[str, Any]:
        """All gradients and the second rank's losses, multiplied."""
        return {
            "losses_0": exact["losses_0"],
            "losses_1": [factor * loss for loss in exact["losses_1"]],
            **{
                which: {n: [factor * g for g in row] for n, row in exact[which].items()}
                for which in ("gradients", "first_gradients")
            },
        }

    rounded = compare_training(changed(1 + 2.0**-22), exact, mode="reference")
    assert rounded.passed
    assert not rounded.exact
    for factor in (1 + 2.0**-9, math.nan):  # one rounding to bf16; an overflow
        assert not compare_training(changed(factor), exact, mode="reference").passed
    assert not compare_training(changed(math.nan), exact, mode="fast").passed
    # An optimizer may have made the weights of later steps unlike; those of the first are alike.
    later = {**exact, "gradients": changed(1 + 2.0**-9)["gradients"]}
    assert compare_training(later, exact, mode="reference").passed
    first = {**exact, "first_gradients": changed(1 + 2.0**-9)["first_gradients"]}
    assert not compare_training(first, exact, mode="reference").passed
    short = {**exact, "losses_1": exact["losses_1"][:1]}
    assert not compare_training(short, exact, mode="fast").passed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_ledger_tells_a_steps_peak(
    precision: str, workload: Make, make_problem: Callable[..., Any]
) -> None:
    """Held items exactly, saved tensors within 1 %; the workspace is an upper bound."""
    options = {"width": 128, "layers": 2, "heads": 4, "context": 32}
    problem = make_problem("1xt4", batch=8, network="byte_lm", network_options=options)
    situation, work = Situation(problem), problem.workload
    tables = StepTables(
        situation.graph, CostBook([Unpriced()]), "device", "cpu", problem.workload.precisions
    )
    names = {}
    for i in situation.graph.adjustable:
        words = {p.name.split("/")[1]: p.name for p in tables.options[i]}
        names[situation.graph.operators[i].module] = words.get(precision, words["fp32"])
    decision = uniform_decision(situation.task, work, [names])
    kernels = TrainingKernels(situation.task, work, decision, 0, count_memory=True)
    assert "activations" not in kernels.memory_bytes()  # nothing ran yet
    for _ in range(2):
        for action in (act("forward"), *(act("backward", q) for q in range(len(decision.buckets)))):
            kernels.run(action)
        kernels.run(act("optimizer"))
    kernels.close()
    saved = SavedBytes(tables)
    held, ledger = kernels.memory_bytes(), situation.static_bytes(0)
    ledger["activations"] = int(saved.held_bytes(tables.choice(names)).sum())
    ledger["workspace"] = saved.workspace_bytes()
    for item in ("weights", "gradients", "optimizer"):
        assert held[item] == ledger[item]
    assert held["activations"] == pytest.approx(ledger["activations"], rel=0.01)
    assert 0 < held["workspace"] <= ledger["workspace"]
    # The smaller the network, the more the bound of the workspace is of the whole.
    assert sum(ledger.values()) <= 1.2 * sum(held.values())


def test_training_learns(workload: Make) -> None:
    work = workload("digits_mlp", batch=32, learning_rate=0.02)
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["bf16", "int8-all"])
    result = single_process_training(task, work, decision, mode="fast", steps=40)
    for rank in (0, 1):
        losses = result[f"losses_{rank}"]
        assert sum(losses[-5:]) < 0.35 * sum(losses[:5])


class Branching(nn.Module):
    """A parameter that is used twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.shared(self.shared(x.flatten(1)[:, :8])))
        return made


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a broken network")


def swapped(task: Any, network: type[nn.Module]) -> Any:
    def module() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return network()

    task.module = module
    return task


def test_shared_and_unused_parameters(workload: Make) -> None:
    work = workload("digits_mlp", first_bucket_bytes=1, bucket_bytes=1)
    task = swapped(training_task(None, work, 0), Branching)
    decision = uniform_decision(task, work, ["fp32"])
    assert len(decision.buckets) == 6
    local = LocalRanks(task, work, decision)
    local.step()
    (inputs, target), model = task.batch(0, 0), task.module()
    task.loss(model(*inputs), target).backward()
    for q, names in enumerate(decision.buckets):
        (name,) = names
        expected = model.get_parameter(name).grad
        flat = local.ranks[0].payload(act("all_reduce", q))
        assert torch.equal(flat, torch.zeros_like(flat) if expected is None else expected.flatten())
    local.close()


def test_errors_of_the_network_come_out(workload: Make) -> None:
    work = workload("digits_mlp")
    task = swapped(training_task(None, work, 0), Broken)
    kernels = TrainingKernels(task, work, uniform_decision(task, work, ["fp32"]), 0)
    with pytest.raises(RuntimeError, match="a broken network"):
        kernels.run(act("forward"))
    kernels.close()


def test_what_makes_no_sense_is_refused(workload: Make) -> None:
    work = workload("digits_mlp")
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["fp32"])
    with pytest.raises(SpecError, match="mode"):
        TrainingKernels(task, work, decision, 0, mode="forced")
    with pytest.raises(SpecError, match="rank"):
        TrainingKernels(task, work, decision, 1)
    kernels = TrainingKernels(task, work, decision, 0)
    for call in (kernels.run, kernels.payload, kernels.buffer):
        with pytest.raises(SpecError, match="action"):
            call(act("recv"))
    odd = decision.model_copy(update={"buckets": decision.buckets[1:]})
    with pytest.raises(SpecError, match="every parameter in one bucket"):
        TrainingKernels(task, work, odd, 0)
