"""What an index costs on processors, and a loss that picks one value of each row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.picked_losses import picked_loss_s
from foreplan.cost_models.rates.picked_rows import picked_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def picked(cols: int, dtype: str = "fp32", kernel: str = "index") -> Program:
    variant = Variant(dtype, dtype, f"torch.{kernel}")
    return program("embedding", variant, rows=10_000, cols=cols)


@pytest.mark.parametrize(("dtype", "elements"), [
    ("fp32", 4300), ("bf16", 3400), ("int8", 2700), ("int64", 2200),
])  # fmt: skip
def test_an_index_goes_through_every_element(dtype: str, elements: float) -> None:
    found = picked_s(picked(64, dtype), CORE, 1e-6)
    assert found == pytest.approx(1e-6 * (10_000 / 330 + 640_000 / elements))
    single = picked_s(picked(1, dtype), CORE, 1e-6)
    assert single == pytest.approx(1e-6 * 10_000 / 550)


def test_rows_of_a_table_are_copied_at_once() -> None:
    assert picked_s(picked(64, kernel="embedding"), CORE, 1e-6) == 0.0
    assert picked_s(picked(64), device_zoo.device("h200"), 1e-6) == 0.0
    four = CORE.model_copy(update={"units": 4})
    assert picked_s(picked(64), four, 1e-6) == pytest.approx(picked_s(picked(64), CORE, 1e-6) / 4)


def test_a_loss_that_picks_costs_a_few_calls_whatever_the_width() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.nll_loss(x, y)

    example = [torch.zeros(64, 5000), torch.zeros(64, dtype=torch.int64)]
    (step,) = lower(capture(Loss(), example, eager=True))
    assert isinstance(step.work, Program)
    assert picked_loss_s(step.work, CORE, 1e-6) == pytest.approx(3e-6)
    assert KnownRates.load().seconds([step.work], CORE)[0] == pytest.approx(3e-6)
    assert picked_loss_s(step.work, device_zoo.device("h200"), 1e-6) is None
    mean = program("reduction", Variant("fp32", "fp32", "torch.mse_loss"), rows=1, cols=320_000)
    assert picked_loss_s(mean, CORE, 1e-6) is None
