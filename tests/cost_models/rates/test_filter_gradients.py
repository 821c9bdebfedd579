"""Gradients of filters of one channel: which have a kernel, and what the others cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.filter_gradients import filter_gradient_s
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip
PLAIN, LAST = (f"torch.conv2d{of}_bias_weight_gradient" for of in ("", "_channels_last"))


def gradient(
    window: int = 7, side: int = 8, stride: int = 1, kernel: str = PLAIN, channels: int = 100,
    dtype: str = "fp32", **more: int,
) -> Program:  # fmt: skip
    sizes = {"batch": 2, "groups": channels, "cin": channels, "cout": channels,
             "taps": window**2, "inputs": side**2, "outputs": (side // stride) ** 2}  # fmt: skip
    return program("conv", Variant(dtype, dtype, kernel), **(sizes | more))


def test_windows_of_three_within_the_image_have_a_kernel() -> None:
    def has_own(*sizes: int) -> bool:
        return filter_gradient_s(gradient(*sizes), CORE, 1e-6) is None

    assert all(has_own(3, side) for side in (3, 4, 8, 32))
    assert not has_own(3, 2)
    assert not any(has_own(window, side) for window in (5, 7) for side in (4, 16))
    # A stride of two leaves an odd row over: four rows hold three and one more.
    assert has_own(3, 4, 2)
    assert not has_own(5, 4, 2)


def test_all_other_work_has_another_price() -> None:
    others = (
        gradient(kernel="torch.conv2d_input_gradient"), gradient(kernel="torch.conv2d"),
        gradient(groups=10), gradient(dtype="fp16"), gradient(taps=7),
    )  # fmt: skip
    for other in others:
        assert filter_gradient_s(other, CORE, 1e-6) is None
    assert filter_gradient_s(gradient(), device_zoo.device("h200"), 1e-6) is None


def test_plain_images_are_written_out_window_by_window() -> None:
    # A call's 48, 0.27 for each of 200 images of a channel, and 200 x 64 windows of 49 elements.
    expected = 1e-6 * (48 + 0.27 * 200 + 200 * 64 * 49 / 1350)
    assert filter_gradient_s(gradient(), CORE, 1e-6) == pytest.approx(expected)
    (seconds,) = KnownRates.load().seconds([gradient()], CORE)
    assert seconds == pytest.approx(expected)
    assert filter_gradient_s(gradient(dtype="bf16"), CORE, 1e-6) == pytest.approx(expected)


def test_where_channels_lie_last_a_filter_is_a_block_of_lanes() -> None:
    def seconds(device: Device = CORE, **sizes: int) -> float:
        found = filter_gradient_s(gradient(kernel=LAST, **sizes), device, 1e-6)
        assert found is not None
        return found

    expected = 1e-6 * (16 + 4900 * 256 / 4400 + 200 * 64 * 49 / 3700)
    assert seconds() == pytest.approx(expected)
    avx2 = CORE.model_copy(update={"isa": ("avx2",)})
    assert seconds(avx2, side=2) < 0.5 * seconds(side=2)
    cores = CORE.model_copy(update={"units": 2})
    assert 0.5 * expected < seconds(cores) < expected
    # 668 filters of 49 are 32 MiB of blocks; one more is had from the system at every call.
    sizes = [seconds(channels=channels, side=2) for channels in (667, 668, 669, 670)]
    steps = [b - a for a, b in itertools.pairwise(sizes)]
    assert steps[1] == pytest.approx(8192 * 1.8e-6, rel=0.01)
    assert max(steps[0], steps[2]) < 30e-6


def test_a_network_that_convolves_by_channel_asks_for_it() -> None:
    network = nn.Conv2d(100, 100, 7, padding=3, groups=100)
    image = torch.zeros(2, 100, 8, 8, requires_grad=True)
    works = [step.work for step in lower(capture(network, [image], eager=True), "training")]
    found = [filter_gradient_s(work, CORE, 1e-6) for work in works if isinstance(work, Program)]
    own = [seconds for seconds in found if seconds is not None]
    assert own == [filter_gradient_s(gradient(), CORE, 1e-6)]
