"""What only a GPU can show; skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Action
from foreplan.datasets.device_name import DeviceName
from foreplan.planner.precision.execution.decisions import uniform_decision
from foreplan.planner.precision.execution.kernels import TrainingKernels
from foreplan.planner.precision.execution.modules import apply_precision
from foreplan.planner.precision.execution.reference import LocalRanks
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task

Make = Callable[..., PrecisionWorkload]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

WIDE = {"width": 128, "layers": 2, "heads": 2, "context": 64}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "int8", "int8-all", "fp8"])
def test_a_language_model_trains_in_every_precision(precision: str, workload: Make) -> None:
    work = workload(network_options=WIDE, batch=16, optimizer="adamw", learning_rate=2e-3)
    task = training_task(None, work, 0)
    local = LocalRanks(task, work, uniform_decision(task, work, [precision, "bf16"]), device="cuda")
    for _ in range(40):
        local.step()
    losses = local.result()["losses_0"]
    local.close()
    assert sum(losses[-4:]) / 4 < 4.0 < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_buckets_on_a_gpu_hold_what_plain_torch_computes(precision: str, workload: Make) -> None:
    work = workload(network_options=WIDE)
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, [precision])
    kernels = TrainingKernels(task, work, decision, 0, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # the runtime's stream, not the thread's own
        kernels.run(Action("forward", 0, HostLaunch()))
        for q in range(len(decision.buckets)):
            kernels.run(Action("backward", 0, HostLaunch(), step=q))
    stream.synchronize()
    model = apply_precision(task.module().cuda(), decision, 0)
    inputs, target = task.batch(0, 0)
    task.loss(model(*(x.cuda() for x in inputs)), target.cuda()).backward()
    for q, names in enumerate(decision.buckets):
        flat = kernels.payload(Action("all_reduce", 0, HostLaunch(), step=q))
        expected = torch.cat([model.get_parameter(n).grad.flatten() for n in names])  # type: ignore[union-attr]
        torch.testing.assert_close(flat, expected, rtol=1e-3, atol=1e-6)
    kernels.close()


def test_the_backward_pass_stays_in_a_slice(workload: Make) -> None:
    """On fewer multiprocessors a pass takes longer, backward as much as forward."""
    from foreplan.planner.verify.placement import take_seat

    work = workload(network_options={"width": 2048, "layers": 1, "context": 256}, batch=8)
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["fp32"])

    def seconds(device: str) -> tuple[float, float]:
        seat = take_seat(DeviceName.parse(device), ())
        with seat.computing():
            kernels = TrainingKernels(task, work, decision, 0, device=seat.device)
            best = [float("inf")] * 2
            for _ in range(4):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                torch.cuda.synchronize()
                marks[0].record()
                kernels.run(Action("forward", 0, HostLaunch()))
                marks[1].record()
                kernels.run(Action("backward", 0, HostLaunch(), step=len(decision.buckets) - 1))
                marks[2].record()
                torch.cuda.synchronize()
                best = [min(b, marks[i].elapsed_time(marks[i + 1])) for i, b in enumerate(best)]
                kernels.run(Action("optimizer", 0, HostLaunch()))
            kernels.close()
        return best[0], best[1]

    # A slice stays current in the thread that took it, even when it is gone.
    with ThreadPoolExecutor() as threads:
        whole, slice_ = (threads.submit(seconds, d).result() for d in ("cuda:0", "cuda:0/sms=16"))
    assert slice_[0] > 2.5 * whole[0]
    assert slice_[1] > 2.5 * whole[1]
