"""Channels that fill no vector: how wide they are taken to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.rates.channel_lanes import (
    dimensions,
    few_lanes_s,
    filled_up,
    group_lanes,
    lanes,
)
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip
NARROW = CORE.model_copy(update={"isa": ("avx2",)})


def conv(cin: int, cout: int, word: str = "", groups: int = 1) -> Program:
    return program(
        "conv", Variant("fp32", "fp32", f"torch.conv2d{word}"), batch=2, groups=groups, cin=cin,
        cout=cout, taps=9, inputs=400, outputs=400,
    )  # fmt: skip


def test_vectors_by_instruction_set() -> None:
    arm = CORE.model_copy(update={"isa": ("neon",)})
    assert [lanes(device) for device in (CORE, NARROW, arm)] == [16, 8, 0]
    assert lanes(device_zoo.device("h200")) == 0
    assert filled_up(conv(64, 1), arm) == (conv(64, 1), 1.0)


def test_dimensions_by_the_name_of_the_kernel() -> None:
    for sides in (1, 2, 3):
        kernel = f"torch.conv{sides}d_bias"
        item = program("conv", Variant("fp32", "fp32", kernel), **conv(8, 8).dims)
        assert dimensions(item) == sides


@pytest.mark.parametrize(("item", "full"), [
    (conv(64, 1), (64, 16)), (conv(20, 24), (32, 32)), (conv(3, 64), (3, 64)),
    (conv(3, 64, INPUT_GRADIENT), (16, 64)), (conv(64, 1, INPUT_GRADIENT), (64, 16)),
    (conv(3, 24, WEIGHT_GRADIENT), (3, 32)), (conv(4, 24, WEIGHT_GRADIENT), (16, 32)),
])  # fmt: skip
def test_what_fills_no_vector_takes_as_long_as_if_it_did(
    item: Program, full: tuple[int, int]
) -> None:
    found, share = filled_up(item, CORE)
    assert (found.dims["cin"], found.dims["cout"]) == full
    assert share == (1.0 if found == item else max(0.85, item.flops / found.flops))
    assert filled_up(conv(64, 1), NARROW)[0].dims["cout"] == 8


@given(cin=st.integers(1, 600), cout=st.integers(1, 600))
def test_no_convolution_takes_less_than_its_channels(cin: int, cout: int) -> None:
    for word in ("", INPUT_GRADIENT, WEIGHT_GRADIENT):
        item = conv(cin, cout, word)
        found, share = filled_up(item, CORE)
        assert found.flops * share >= item.flops * (1.0 - 1e-9)


def test_groups_are_as_wide_as_what_divides_them() -> None:
    widths = {(48, 64): 16, (24, 16): 8, (12, 64): 4, (92, 16): 4, (6, 4): 2, (7, 8): 1}
    for (cin, cout), wide in widths.items():
        item = conv(2 * cin, 2 * cout, groups=2)
        assert group_lanes(item) == wide
        assert filled_up(item, CORE) == (item, 0.8)
        # At twice the peak of 1e11 a second, as often again as lanes are missing; fewer than four
        # have no kernel.
        beside = (16 / wide - 1) * item.flops / 2e11 if wide >= 4 else 0.0
        assert few_lanes_s(item, CORE, 1e-6) == pytest.approx(beside)
    whole, half = KnownRates.load().seconds(
        [conv(2 * cin, 2 * cin, groups=2) for cin in (48, 24)], CORE
    )
    assert half > 0.5 * whole  # a quarter of the work


def test_all_other_work_has_all_lanes() -> None:
    others = (
        conv(24, 24), conv(24, 24, groups=24), conv(48, 48, "_channels_last", groups=2),
        program("conv", conv(8, 8).variant, **conv(48, 48, groups=2).dims | {"taps": 1}),
    )  # fmt: skip
    assert all(few_lanes_s(item, CORE, 1e-6) == 0.0 for item in others)
    assert few_lanes_s(conv(48, 48, groups=2), device_zoo.device("h200"), 1e-6) == 0.0
