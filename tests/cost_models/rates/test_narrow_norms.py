"""Norms of images and rows that fill no vector have dear gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.narrow_norms import narrow_norm_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def gradient(pixels: int, kernel: str = "torch.backward", channels: int = 280) -> Program:
    size = {"rows": 4 * 280, "cols": pixels, "channels": channels, "results": 2}
    return program("norm_gradient", Variant("fp32", "fp32", kernel), **size)


def test_images_of_few_pixels_cost_each() -> None:
    # Four images of 280 channels, 28 in the time of a call.
    for pixels in (2, 4, 9, 15):
        assert narrow_norm_s(gradient(pixels), CORE, 1e-6) == pytest.approx(40e-6)
    last = gradient(4, "torch.backward_channels_last")
    for other in (gradient(1), gradient(16), last):
        assert narrow_norm_s(other, CORE, 1e-6) == 0.0
    assert narrow_norm_s(gradient(4), device_zoo.device("h200"), 1e-6) == 0.0
    four = CORE.model_copy(update={"units": 4})
    assert narrow_norm_s(gradient(4), four, 1e-6) == pytest.approx(10e-6)
    small, full = KnownRates.load().seconds([gradient(4), gradient(16)], CORE)
    assert small > full, "a quarter of the bytes"


def test_rows_of_few_elements_cost_each_element() -> None:
    for wide, calls in ((2, 2240 / 108), (7, 7840 / 108), (8, 0.0), (512, 0.0)):
        found = narrow_norm_s(gradient(wide, channels=1), CORE, 1e-6)
        assert found == pytest.approx(1e-6 * calls)
    grouped = gradient(2, "torch.backward_by_group", channels=1)
    assert narrow_norm_s(grouped, CORE, 1e-6) == 0.0


@pytest.mark.parametrize("training", [False, True])
def test_a_network_says_how_many_pixels_its_images_have(*, training: bool) -> None:
    network = nn.Sequential(nn.Conv2d(8, 280, 1), nn.BatchNorm2d(280)).train(training)
    graph = capture(network, [torch.zeros(4, 8, 2, 2)], eager=True, training=training)
    works = [step.work for step in lower(graph, "training")]
    found = [w for w in works if isinstance(w, Program) and w.op == "norm_gradient"]
    assert [narrow_norm_s(work, CORE, 1e-6) for work in found] == [pytest.approx(40e-6)]
