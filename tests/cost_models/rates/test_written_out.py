"""Convolutions without a kernel: which are written out, and what they take."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.written_out import is_own, is_own_volume, written_out_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1.055e11}, memory_bandwidth=4e10, launch_overhead_s=0.86e-6,
)  # fmt: skip


def conv(
    batch: int, cin: int, cout: int, groups: int, sides: tuple[int, ...], window: int,
    word: str = "", stride: int = 1, **more: int,
) -> Program:  # fmt: skip
    out = [(side - 1) // stride + 1 for side in sides]
    sizes = {"batch": batch, "groups": groups, "cin": cin, "cout": cout,
             "taps": window ** len(sides), "inputs": math.prod(sides),
             "outputs": math.prod(out)}  # fmt: skip
    variant = Variant("fp32", "fp32", f"torch.conv{len(sides)}d{word}")
    return program("conv", variant, **(sizes | more))


@pytest.mark.parametrize(("item", "measured_s"), [
    # One core of an EPYC (Zen 5, 0.86 us a call), 2026-11-28, torch 2.13; convolution_figures.py.
    # torch's own volumes, the last of more than the allocator keeps.
    (conv(1, 3, 24, 1, (4, 33, 33), 3), 0.36e-3), (conv(1, 8, 8, 1, (13, 46, 46), 3), 5.7e-3),
    (conv(1, 8, 8, 1, (13, 46, 46), 3, INPUT_GRADIENT), 9.6e-3),
    (conv(1, 8, 8, 1, (13, 46, 46), 3, WEIGHT_GRADIENT), 5.3e-3),
    (conv(1, 32, 12, 1, (6, 56, 56), 3), 43.4e-3),
    # Groups of 38 to 7 channels, and of 92 to 16 by filters.
    (conv(1, 608, 112, 16, (59, 59), 3), 11.8e-3),
    (conv(1, 608, 112, 16, (59, 59), 3, WEIGHT_GRADIENT), 12.1e-3),
    (conv(1, 184, 32, 2, (42, 42), 5, WEIGHT_GRADIENT), 9.0e-3),
    # Volumes by channel, of twelve channels by filters; a line by windows of 128.
    (conv(1, 104, 104, 104, (13, 26, 26), 5, INPUT_GRADIENT), 64.8e-3),
    (conv(1, 104, 104, 104, (13, 26, 26), 5, WEIGHT_GRADIENT), 49.4e-3),
    (conv(8, 12, 16, 1, (11, 17, 17), 5, WEIGHT_GRADIENT), 30.6e-3),
    (conv(1, 768, 768, 16, (49,), 128), 4.5e-3),
])  # fmt: skip
def test_what_was_measured(item: Program, measured_s: float) -> None:
    found = written_out_s(item, CORE, 0.86e-6)
    assert found == pytest.approx(measured_s, rel=0.5)
    (priced,) = KnownRates.load().seconds([item], CORE)
    assert priced == pytest.approx(found)


def test_all_other_work_has_another_price() -> None:
    others = (
        # oneDNN's kernels: of two images, of wide images, of groups of 4, of 14 elements.
        conv(2, 8, 8, 1, (13, 46, 46), 3), conv(1, 64, 8, 1, (13, 46, 46), 3),
        conv(1, 32, 64, 8, (30, 30), 3), conv(2, 64, 48, 1, (400,), 14),
        conv(2, 64, 48, 1, (40, 40), 13, WEIGHT_GRADIENT),
        conv(2, 16, 48, 1, (8, 20, 20), 3, WEIGHT_GRADIENT),
        conv(2, 48, 48, 48, (400,), 9), conv(2, 48, 48, 48, (8, 20, 20), 3),
        # Products, images that torch keeps, patches, channels last.
        conv(2, 4, 8, 1, (8, 20, 20), 1, WEIGHT_GRADIENT), conv(1, 8, 8, 1, (40, 40), 3),
        conv(1, 3, 64, 1, (64, 64), 16, WEIGHT_GRADIENT, 16),
        conv(1, 42, 42, 6, (30, 30), 3, "_channels_last"),
    )  # fmt: skip
    for other in others:
        assert written_out_s(other, CORE, 1e-6) is None
    own = conv(1, 8, 8, 1, (13, 46, 46), 3)
    assert written_out_s(own, device_zoo.device("h200"), 1e-6) is None
    assert written_out_s(own, CORE.model_copy(update={"isa": ("neon",)}), 1e-6) is None
    half = program("conv", Variant("bf16", "bf16", "torch.conv3d"), **own.dims)
    assert written_out_s(half, CORE, 1e-6) is None


def test_what_torch_keeps() -> None:
    assert is_own(conv(1, 8, 8, 1, (50, 50), 3))
    assert is_own(conv(1, 8, 8, 1, (2000,), 25))
    for other in (
        conv(2, 8, 8, 1, (50, 50), 3), conv(1, 8, 8, 2, (50, 50), 3), conv(1, 8, 8, 1, (50, 50), 5),
        conv(1, 9, 8, 1, (50, 50), 3),
    ):  # fmt: skip
        assert not is_own(other)
    # A product of each position, unless some are left out.
    assert not is_own_volume(conv(1, 8, 8, 1, (8, 20, 20), 1))
    assert is_own_volume(conv(1, 8, 8, 1, (8, 20, 20), 1, stride=2))


@pytest.mark.parametrize(("cin", "cout", "window", "sides", "stride", "own"), [
    # One core of an EPYC (Zen 5), ms of torch 2.13: 3.2 and 29.5 of nearly as many operations.
    (32, 16, (3, 3, 3), (24, 32, 32), 1, False), (16, 16, (3, 3, 3), (24, 32, 32), 1, True),
    # 17.5 and 8.0, by torch's own, as 64 x 8 x 32 are few and windows of (3, 1, 1) are lines.
    (64, 144, (1, 3, 3), (8, 32, 32), 1, True), (144, 64, (3, 1, 1), (8, 32, 32), 1, True),
    (144, 64, (3, 1, 1), (8, 32, 32), 2, False),
])  # fmt: skip
def test_volumes_go_to_the_library_by_their_first_extents(
    cin: int, cout: int, window: tuple[int, ...], sides: tuple[int, ...], stride: int, own: bool
) -> None:
    padding = tuple(size // 2 for size in window)
    module = nn.Conv3d(cin, cout, window, stride, padding)
    (step,) = lower(capture(module, [torch.zeros(1, cin, *sides)], eager=True))
    assert isinstance(step.work, Program)
    assert is_own_volume(step.work) == own


def test_a_network_asks_for_one() -> None:
    module = nn.Conv3d(3, 16, 3, padding=1)
    (step,) = lower(capture(module, [torch.zeros(1, 3, 8, 56, 56)], eager=True))
    assert isinstance(step.work, Program)
    # 2.2 ms were measured.
    assert written_out_s(step.work, CORE, 0.86e-6) == pytest.approx(2.2e-3, rel=0.3)
