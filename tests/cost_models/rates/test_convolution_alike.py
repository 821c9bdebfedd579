"""Likenesses of convolutions along lines, of volumes and by channel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.rates.convolution_alike import convolution_alike, has_vectors
from foreplan.datasets.device import Device
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def conv(kernel: str = "conv2d", *, dtype: str = "fp32", **more: int) -> Program:
    sizes = {"batch": 2, "groups": 1, "cin": 32, "cout": 64, "taps": 9, "inputs": 900,
             "outputs": 900}  # fmt: skip
    return program("conv", Variant(dtype, dtype, f"torch.{kernel}"), **(sizes | more))


@given(
    taps=st.sampled_from([2, 3, 5, 7, 8, 10, 27, 125, 343]), inputs=st.integers(300, 50000),
    stride=st.sampled_from([1, 2]), sides=st.sampled_from([1, 3]),
)  # fmt: skip
def test_lines_and_volumes_are_images_of_as_much_work(
    taps: int, inputs: int, stride: int, sides: int
) -> None:
    item = conv(f"conv{sides}d", taps=taps, inputs=inputs, outputs=inputs // stride)
    found, share = convolution_alike(item, CORE, "fp32/fp32")
    assert share == pytest.approx(1.0, rel=0.26)
    assert found.flops * share == pytest.approx(item.flops)


def test_gradients_by_channel_take_what_the_forward_pass_does() -> None:

    def alone(kernel: str = "conv2d") -> tuple[Program, float]:
        return convolution_alike(conv(kernel, groups=32, cout=32), CORE, "fp32/fp32")

    forward, share = alone()
    assert (forward.op, share) == ("conv2d_forward", 1.0)
    for word, expected in ((INPUT_GRADIENT, 1.05), (WEIGHT_GRADIENT, 0.8)):
        assert alone(f"conv2d{word}") == (forward, expected)
        last = alone(f"conv2d_channels_last{word}")
        assert last[0] == forward
        assert last[1] < expected


def test_vectors_are_oneDNNs_of_plain_images() -> None:
    assert has_vectors(conv(), CORE)
    own = conv(batch=1, cin=8)  # torch keeps it
    pixel = conv(taps=1)
    for other in (conv("conv2d_channels_last"), conv(dtype="bf16"), own, pixel):
        assert not has_vectors(other, CORE)
    # A single output takes the time of sixteen.
    one, share = convolution_alike(conv(cout=1), CORE, "fp32/fp32")
    assert (one.dims["filters"], share) == (16, 0.85)
