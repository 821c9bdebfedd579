"""Work of operators in seconds at full rate: what a convolution's weight adds to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.rates.operator_rates import TERMS, rate_terms
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program

FP32 = Variant("fp32", "fp32", "torch.conv2d")
CPU = Device(
    name="cpu:threads=1", chip="x", vendor="x", kind="cpu", peak_flops={"fp32/vector": 1e11},
    memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def convolution(op: str, channels: int, window: int, groups: int, size: int = 8) -> Program:
    return program(
        op, FP32, batch=1, channels=channels, height=size, width=size, filters=channels,
        kernel_height=window, kernel_width=window, out_height=size, out_width=size, stride=1,
        groups=groups,
    )  # fmt: skip


def unpacking_s(item: Program, device: Device = CPU) -> float:
    return float(rate_terms([item], device)[0, TERMS.index("unpack")])


@given(
    channels=st.sampled_from([16, 64]), window=st.sampled_from([1, 3]), alone=st.booleans(),
    size=st.sampled_from([4, 28]),
)  # fmt: skip
def test_a_convolution_lays_its_weight_out_at_every_call(
    channels: int, window: int, alone: bool, size: int
) -> None:
    groups = channels if alone else 1
    weights = channels * channels * window**2 / groups
    forward = convolution("conv2d_forward", channels, window, groups, size)
    # One microsecond, the call of this host, for 1024 of them, whatever the image.
    assert unpacking_s(forward) == pytest.approx(1e-6 * weights / 1024)
    assert unpacking_s(convolution("conv2d_backward", channels, window, groups, size)) == (
        pytest.approx(2 * unpacking_s(forward))
    )
    traced = program(
        "conv", FP32, batch=1, groups=groups, cin=channels, cout=channels, taps=window**2,
        inputs=size**2, outputs=size**2,
    )  # fmt: skip
    assert unpacking_s(traced) == pytest.approx(unpacking_s(forward))


def test_neither_gpus_nor_products_do() -> None:
    gpu = CPU.model_copy(update={"kind": "cuda"})
    assert unpacking_s(convolution("conv2d_forward", 64, 3, 1), gpu) == 0.0
    linear = program("linear", Variant("fp32", "fp32", "torch.linear"), rows=4, n=64, k=64)
    assert unpacking_s(linear) == 0.0
