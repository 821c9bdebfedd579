"""Depthwise convolutions by windows that have no kernel on processors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.wide_windows import wide_window_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def by_channel(
    window: int, channels: int, batch: int, side: int, dimensions: int = 2, word: str = "_bias",
    **more: int,
) -> Program:  # fmt: skip
    sizes = {"batch": batch, "groups": channels, "cin": channels, "cout": channels,
             "taps": window**dimensions, "inputs": side**dimensions,
             "outputs": side**dimensions}  # fmt: skip
    variant = Variant("fp32", "fp32", f"torch.conv{dimensions}d{word}")
    return program("conv", variant, **(sizes | more))


@pytest.mark.parametrize(("case", "measured_s"), [
    # One core of an EPYC (Zen 5), 2026-11-28, torch 2.13, quickest of five calls.
    ((21, 128, 4, 428, 1), 2.75e-3), ((31, 384, 4, 472, 1), 16.19e-3),
    ((17, 96, 1, 264, 1), 0.31e-3),
    ((15, 128, 1, 38, 2), 19.64e-3), ((31, 64, 2, 19, 2), 15.54e-3), ((41, 96, 1, 33, 2), 66.15e-3),
])  # fmt: skip
def test_what_was_measured(case: tuple[int, ...], measured_s: float) -> None:
    found = wide_window_s(by_channel(*case), CORE, 1e-6)
    assert found == pytest.approx(measured_s, rel=0.35)
    (priced,) = KnownRates.load().seconds([by_channel(*case)], CORE)
    assert priced == pytest.approx(found)


def test_all_other_work_has_another_price() -> None:
    others = (
        by_channel(13, 64, 1, 40), by_channel(13, 64, 1, 400, 1),
        by_channel(15, 64, 1, 40, groups=8),
        by_channel(15, 64, 1, 40, word="_input_gradient"),
        by_channel(15, 64, 1, 40, word="_weight_gradient"),
    )  # fmt: skip
    assert all(wide_window_s(item, CORE, 1e-6) is None for item in others)
    assert wide_window_s(by_channel(15, 64, 1, 40), device_zoo.device("h200"), 1e-6) is None


def test_a_network_asks_for_one() -> None:
    module = nn.Conv1d(32, 32, 31, padding=15, groups=32)
    (step,) = lower(capture(module, [torch.zeros(2, 32, 100)], eager=True))
    assert isinstance(step.work, Program)
    assert step.work == by_channel(31, 32, 2, 100, 1)
    assert wide_window_s(step.work, CORE, 1e-6) is not None
