"""Convolutions of one pixel a window: which are products of each image, and what these cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.pixel_products import is_pixel_product, narrow_s, pixel_product
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6, units=1,
)  # fmt: skip


def conv(kernel: str = "torch.conv2d", **sizes: int) -> Program:
    d = {"batch": 2, "groups": 1, "cin": 64, "cout": 96, "taps": 1, "inputs": 49, "outputs": 49}
    return program("conv", Variant("fp32", "fp32", kernel), **(d | sizes))


def test_which_convolutions_are_products() -> None:
    assert is_pixel_product(conv(), CORE)
    for other in (
        conv(taps=9), conv(outputs=16), conv(groups=2), conv(batch=16), conv(groups=64, cout=64),
    ):  # fmt: skip
        assert not is_pixel_product(other, CORE)
    assert not is_pixel_product(conv(), CORE.model_copy(update={"units": 2}))
    assert not is_pixel_product(conv(), device_zoo.device("h200"))


@given(
    batch=st.integers(1, 15), pixels=st.integers(1, 400), cin=st.integers(1, 512),
    cout=st.integers(1, 512),
)  # fmt: skip
def test_a_product_does_the_convolutions_work(batch: int, pixels: int, cin: int, cout: int) -> None:
    size = {"batch": batch, "inputs": pixels, "outputs": pixels, "cin": cin, "cout": cout}
    for of in ("", INPUT_GRADIENT, WEIGHT_GRADIENT):
        item = conv(f"torch.conv2d{of}", **size)
        product, often = pixel_product(item)
        few = of == "" and pixels >= 16 and min(cin, cout) <= 32
        assert product.flops * often == pytest.approx(item.flops * (0.7 if few else 1.0))
        assert product.variant == Variant("fp32", "fp32", "torch.linear")


def test_few_pixels_are_dear() -> None:
    # Two images through 64 x 96 weights of 1 us / 1,200 each, whatever the pixels.
    few = [conv(inputs=pixels, outputs=pixels) for pixels in (2, 4, 9, 15)]
    for item in few:
        assert narrow_s(item, CORE, 1e-6) == pytest.approx(2 * 64 * 96 / 1200 * 1e-6)
    gradient = conv(f"torch.conv2d{WEIGHT_GRADIENT}", inputs=4, outputs=4)
    last = conv("torch.conv2d_channels_last", inputs=4, outputs=4)
    for other in (conv(inputs=1, outputs=1), conv(inputs=16, outputs=16), gradient, last):
        assert narrow_s(other, CORE, 1e-6) == 0.0
    four, sixteen = KnownRates.load().seconds(
        [conv(inputs=n, outputs=n, cin=512, cout=512) for n in (4, 16)], CORE
    )
    assert four > sixteen
