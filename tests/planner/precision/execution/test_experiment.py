"""Real processes: against torch's DDP, against one process, and when one of them fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import SpecError, VerificationError
from foreplan.planner.precision.execution.decisions import uniform_decision
from foreplan.planner.precision.execution.experiment import simulate_training, train
from foreplan.planner.precision.execution.reference import relative_error, single_process_training
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task

Make = Callable[..., PrecisionWorkload]

ONE_CORE = DeviceName.parse("cpu:threads=1")
PLANS = ["bf16", "int8-all"]


@pytest.mark.serial  # the slow rank is told by its times
def test_gradients_are_those_of_ddp_and_slow_ranks_keep_low_precision(
    workload: Make, tmp_path: Path
) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, PLANS)
    expected = single_process_training(task, work, decision, mode="fast", steps=1)["gradients"]
    processes = []
    for rank in range(2):
        order = {"rank": rank, "plans": PLANS, "store": str(tmp_path / "store"),
                 "workload": work.model_dump(mode="json")}  # fmt: skip
        script = str(Path(__file__).with_name("ddp_rank.py"))
        processes.append(
            subprocess.Popen(
                [sys.executable, script, json.dumps(order)], text=True, stdout=subprocess.PIPE,
                env=worker_environment(ONE_CORE),
            )
        )  # fmt: skip
    said = [process.communicate(timeout=180)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [json.loads(lines[0]) for lines in said] == [expected, expected]
    (fast, seen), (slow, also_seen) = (json.loads(lines[1]) for lines in said)
    assert set(fast.values()) == {"fp32/fp32/torch.linear"}, "the fast rank got precision back"
    assert set(slow.values()) == {"fp32/bf16/torch.linear"}
    # Both saw the same times, in which the wait for the slow rank is not the fast rank's.
    assert [row[:2] for row in seen] == [row[:2] for row in also_seen]
    assert all(mine < other for _, (mine, other), _ in seen)


def test_real_ranks_compute_what_one_process_computes(workload: Make) -> None:
    work = workload(optimizer="adamw", learning_rate=1e-3)
    task = training_task(None, work, 3)
    decision = uniform_decision(task, work, PLANS)
    run = train(work, decision, [ONE_CORE, ONE_CORE], steps=4, seed=3, validation_batches=2)
    alone = simulate_training(work, decision, steps=4, seed=3, validation_batches=2)
    assert (run.kind, alone.kind) == ("real", "simulated")
    assert run.validation_loss == alone.validation_loss
    for mine, theirs in zip(run.ranks, alone.ranks, strict=True):
        assert mine.losses == theirs.losses
        assert mine.saved_bytes == theirs.saved_bytes > 0
        assert len(mine.step_s) == len(mine.compute_s) == 4
        assert all(whole > 0 for whole in mine.step_s)
        assert mine.peak_bytes > 0
        assert theirs.step_s == ()
    assert run.ranks[0].saved_bytes > run.ranks[1].saved_bytes, "8 bits take less than 16"


def test_a_rank_without_vnni_agrees_up_to_rounding(workload: Make) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, PLANS)
    poor = DeviceName.parse("cpu:threads=1,isa=avx2")
    run = train(work, decision, [ONE_CORE, poor], steps=3)
    alone = simulate_training(work, decision, steps=3)
    assert run.ranks[1].facts["capability"] == "AVX2"
    for mine, theirs in zip(run.ranks, alone.ranks, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=0.01)
    assert run.validation_loss == pytest.approx(alone.validation_loss, rel=0.01)


def test_a_failing_rank_is_named_with_its_reason(workload: Make) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["bf16", {"head": "fp32/tf32/torch.linear"}])
    with pytest.raises(VerificationError, match=r"rank 1 \(cpu:threads=1\).*head.*expected cuda"):
        train(work, decision, [ONE_CORE, ONE_CORE], steps=1, timeout_s=60.0)
    with pytest.raises(SpecError, match="one a rank of the plan"):
        train(work, decision, [ONE_CORE], steps=1)


def test_relative_error_of_unlike_parameters_is_infinite() -> None:
    assert relative_error({"a": [1.0, 1.0]}, {"b": [1.0, 1.0]}) == float("inf")
    assert relative_error({"a": [1.0, 1.1]}, {"a": [1.0, 1.0]}) == pytest.approx(0.1)
