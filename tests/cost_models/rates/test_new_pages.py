"""Results so large that a processor's system maps them anew in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import foreplan
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.rates.new_pages import ALWAYS_MAPPED, new_pages_s, result_bytes
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip
IMAGES, ROWS = torch.zeros(2, 4, 8, 8), torch.zeros(6, 16)


def steps_of(module: nn.Module, x: Any) -> list[Step]:
    return lower(capture(module, [x], eager=True))


@pytest.mark.parametrize(("module", "x"), [
    (nn.Linear(16, 40), ROWS), (nn.ReLU(), ROWS), (nn.Softmax(-1), ROWS), (nn.LayerNorm(16), ROWS),
    (nn.Conv2d(4, 6, 3), IMAGES), (nn.ConvTranspose2d(4, 6, 2, 2), IMAGES),
    (nn.MaxPool2d(2), IMAGES), (nn.BatchNorm2d(4), IMAGES),
    (nn.Embedding(9, 5), torch.zeros(3, 7, dtype=torch.int64)),
])  # fmt: skip
def test_bytes_are_those_of_the_result(module: nn.Module, x: torch.Tensor) -> None:
    (step,) = steps_of(module.eval(), x)
    assert isinstance(step.work, Program)
    assert result_bytes(step.work) == module(x).nbytes


def test_large_results_alone_are_mapped_and_none_in_place_or_on_gpus() -> None:
    size = ALWAYS_MAPPED // 4
    (small,) = steps_of(nn.ReLU(), torch.empty(size - 1, device="meta"))
    (large,) = steps_of(nn.ReLU(), torch.empty(size, device="meta"))
    (placed,) = steps_of(nn.ReLU(inplace=True), torch.empty(size, device="meta"))
    assert new_pages_s(small, CORE) == new_pages_s(placed, CORE) == 0.0
    assert new_pages_s(large, device_zoo.device("h200")) == 0.0
    # 8,192 pages; a copy of 40 MB took 19.6 ms for 2 without them.
    assert new_pages_s(large, CORE) == pytest.approx(8192 * 1.8e-6)


def test_a_pass_takes_longer_by_them() -> None:
    def latency(elements: int, *, inplace: bool = False) -> float:
        module = nn.ReLU(inplace=inplace)
        return foreplan.predict_latency(
            module, CORE, inputs=[torch.empty(elements, device="meta")]
        ).latency_s

    size = ALWAYS_MAPPED // 4
    assert latency(size) - latency(size - 1) == pytest.approx(8192 * 1.8e-6, rel=0.01)
    assert latency(size, inplace=True) == pytest.approx(latency(size - 1), rel=0.01)


def test_an_operator_between_underscores_writes_a_new_result() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (x > 0) & (x < 1)

    steps = steps_of(Both(), ROWS)
    assert len(steps) == 3
    assert not any(step.in_place for step in steps)
