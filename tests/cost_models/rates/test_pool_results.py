"""What results of adaptive pools and gradients of pools cost on processors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.pool_results import pool_result_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def pool(kernel: str, taps: int, op: str = "pool") -> Program:
    variant = Variant("fp32", "fp32", f"torch.{kernel}")
    return program(op, variant, rows=1000, cols=taps, taps=taps)


def test_adaptive_means_cost_their_ends_unless_they_are_of_whole_images() -> None:
    found = pool_result_s(pool("adaptive_avg_pool2d", 16), CORE, 1e-6)
    assert found == pytest.approx(1e-3 * (1 / 150 + 16 / 3300))
    assert pool_result_s(pool("adaptive_avg_pool2d", 49), CORE, 1e-6) == 0.0
    # Maxima of a whole image go the same way.
    found = pool_result_s(pool("adaptive_max_pool2d", 784), CORE, 1e-6)
    assert found == pytest.approx(1e-3 * (784 / 1800 + math.log(784) / 83))


def test_gradients_of_means_go_through_windows_and_those_of_maxima_do_not() -> None:
    mean = pool_result_s(pool("avg_pool2d_backward", 9, "pool_gradient"), CORE, 1e-6)
    assert mean == pytest.approx(1e-3 * (1 / 230 + 9 / 5900))
    for kernel in ("max_pool1d_backward", "max_pool2d_with_indices_backward"):
        found = pool_result_s(pool(kernel, 9, "pool_gradient"), CORE, 1e-6)
        assert found == pytest.approx(1e-3 / 1900)
    last = pool("avg_pool2d_channels_last_backward", 9, "pool_gradient")
    assert pool_result_s(last, CORE, 1e-6) == pytest.approx(1e-3 / 1800)


def test_cores_share_results_and_gpus_have_none() -> None:
    item, four = pool("fractional_max_pool2d", 4), CORE.model_copy(update={"units": 4})
    assert pool_result_s(item, four, 1e-6) == pytest.approx(1e-3 / 70 / 4)
    assert pool_result_s(item, device_zoo.device("h200"), 1e-6) == 0.0


@pytest.mark.parametrize("call", [
    lambda x: nn.functional.adaptive_avg_pool2d(x, 7),
    lambda x: nn.functional.adaptive_max_pool2d(x, 7),
    lambda x: nn.functional.interpolate(x, scale_factor=0.5, mode="area"),
])  # fmt: skip
def test_a_network_asks_by_the_names_that_are_known(call: Any) -> None:
    class Called(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return call(x)

    (step,) = lower(capture(Called(), [torch.zeros(2, 8, 28, 28)], eager=True))
    assert isinstance(step.work, Program)
    assert pool_result_s(step.work, CORE, 1e-6) > 0


@pytest.mark.parametrize("pooled", [nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1)])
def test_gradients_of_a_network_are_known_too(pooled: nn.Module) -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 1), pooled)
    steps = lower(capture(network, [torch.zeros(2, 4, 28, 28)], eager=True, training=True),
                  "training")  # fmt: skip
    works = [step.work for step in steps if isinstance(step.work, Program)]
    (work,) = [work for work in works if work.op == "pool_gradient"]
    assert pool_result_s(work, CORE, 1e-6) > 0
