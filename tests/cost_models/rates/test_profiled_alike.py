"""Likenesses of traced operators: the same work, in words that profiles time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.rates.profiled_alike import profiled_alike
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program

SIZE = st.integers(1, 512)
#: On several cores no convolution is a product of pixels.
CORES = Device(
    name="cpu:threads=4", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 4e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6, units=4,
)  # fmt: skip


@given(rows=SIZE, n=SIZE, k=SIZE, dtype=st.sampled_from(["fp32", "bf16"]))
def test_a_product_is_the_same_product(rows: int, n: int, k: int, dtype: str) -> None:
    traced = program("linear", Variant(dtype, dtype, "torch.addmm"), rows=rows, n=n, k=k)
    found = profiled_alike(traced, CORES)
    assert found is not None
    assert (found[0].flops, found[0].bytes, found[1]) == (traced.flops, traced.bytes, 1.0)
    assert found[0].variant == Variant(dtype, dtype, "torch.linear")


@given(batch=SIZE, m=SIZE, n=SIZE, k=SIZE)
def test_a_product_of_activations_is_a_linear_of_all_rows(
    batch: int, m: int, n: int, k: int
) -> None:
    for kernel in ("torch.matmul", "torch.bmm_input_gradient", "torch.einsum_weight_gradient"):
        traced = program("matmul", Variant("fp32", "fp32", kernel), batch=batch, m=m, n=n, k=k)
        found = profiled_alike(traced, CORES)
        assert found is not None
        assert (found[0].op, found[0].flops, found[1]) == ("linear", traced.flops, 1.0)
        assert found[0].variant == Variant("fp32", "fp32", "torch.linear")


@given(
    rows=st.integers(32, 4096),
    cols=SIZE,
    inputs=st.integers(1, 3),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_maps_and_norms_move_as_many_values(rows: int, cols: int, inputs: int, dtype: str) -> None:
    map_sizes = {"rows": rows, "cols": cols, "inputs": inputs}
    for traced, op in (
        (program("elementwise", Variant(dtype, dtype, "torch.mul"), **map_sizes), "add"),
        (program("elementwise", Variant(dtype, dtype, "torch.gelu"), **map_sizes), "activation"),
        (program("norm", Variant(dtype, dtype, "torch.layer_norm"), rows=rows, cols=cols), "norm"),
        (program("batch_norm", Variant(dtype, dtype, "torch.batch_norm"), rows=rows, cols=cols,
                 channels=8), "norm"),
        (program("norm_gradient", Variant(dtype, dtype, "torch.backward"), rows=rows, cols=cols,
                 channels=1, results=2), "norm"),
    ):  # fmt: skip
        found = profiled_alike(traced, CORES)
        assert found is not None
        assert found[0].op == op
        # A value of fp32 is not converted; of channels mean and variance are known.
        values = traced.bytes / 4 * 0.6 if dtype == "fp32" else traced.bytes / 2
        values *= 0.5 if traced.dims.get("channels", 1) > 1 else 1.0
        assert found[0].bytes / 2 == pytest.approx(values, rel=0.2)


@given(
    batch=st.integers(1, 8),
    size=st.sampled_from([7, 14, 28]),
    window=st.sampled_from([1, 3]),
    channels=st.sampled_from([16, 64]),
    alone=st.booleans(),
    stride=st.sampled_from([1, 2]),
)
def test_a_convolution_is_the_same_convolution(
    batch: int, size: int, window: int, channels: int, alone: bool, stride: int
) -> None:
    out = -(-size // stride)
    for kernel, share in (("torch.conv2d", 1.0), ("torch.conv2d_input_gradient", 0.5)):
        traced = program(
            "conv", Variant("fp32", "fp32", kernel), batch=batch, groups=channels if alone else 1,
            cin=channels, cout=channels, taps=window**2, inputs=size**2, outputs=out**2,
        )  # fmt: skip
        found = profiled_alike(traced, CORES)
        assert found is not None
        # A backward pass is twice the forward one, of which a gradient is half; by channel it
        # takes what the forward one does and a little more.
        share = 1.05 if alone and share < 1.0 else share
        assert found[0].flops * found[1] == pytest.approx(traced.flops * max(1.0, share))
        assert found[1] == share
        assert found[0].dims["stride"] == stride


@pytest.mark.parametrize(
    "item",
    [
        program("linear", Variant("int4", "bf16", "torch.addmm"), rows=1, n=8, k=8),
        program("linear", Variant("bf16", "bf16", "torch.unheard_of"), rows=1, n=8, k=8),
        program("argmax", Variant("bf16", "bf16", "torch.argmax"), rows=1, cols=8),
    ],
)
def test_other_work_has_no_likeness(item: Program) -> None:
    assert profiled_alike(item, CORES) is None


def test_products_in_fp16_are_converted_value_by_value_where_there_is_no_arithmetic() -> None:
    half = Variant("fp16", "fp16", "torch.linear")
    few, many = (program("linear", half, rows=rows, n=64, k=64) for rows in (8, 4096))
    found, more = profiled_alike(few, CORES), profiled_alike(many, CORES)
    assert found is not None
    assert more is not None
    assert found[0].variant == Variant("fp32", "fp32", "torch.linear")
    assert (found[1], more[1]) == (pytest.approx(2.0), pytest.approx(4.0, rel=0.01))
    vectors = CORES.model_copy(update={"isa": ("avx512", "avx512_fp16")})
    quick = profiled_alike(many, vectors)
    assert quick == (replace(many, variant=Variant("bf16", "bf16", "torch.linear")), 1.0)
    norm = program("norm", Variant("fp16", "fp16", "torch.layer_norm"), rows=64, cols=64)
    assert profiled_alike(norm, CORES) == profiled_alike(norm, vectors)


def test_doubles_take_twice_as_long_as_singles() -> None:
    for op, times in (("linear", 1.9), ("matmul", 1.9)):
        sizes = (
            {"rows": 9, "n": 8, "k": 7} if op == "linear" else {"batch": 2, "m": 9, "n": 8, "k": 7}
        )
        double, single = (
            profiled_alike(program(op, Variant(dtype, dtype, f"torch.{op}"), **sizes), CORES)
            for dtype in ("fp64", "fp32")
        )
        assert double is not None
        assert single is not None
        assert double == (single[0], times)
    relu, half = (
        profiled_alike(
            program(
                "elementwise", Variant(dtype, dtype, "torch.relu"), rows=rows, cols=8, inputs=1
            ),
            CORES,
        )
        for dtype, rows in (("fp32", 120), ("fp64", 60))
    )
    assert relu == half  # as many bytes


def test_a_sum_of_all_elements_is_no_longer_than_one_of_rows() -> None:
    everything, rows = (
        profiled_alike(
            program("reduction", Variant("fp32", "fp32", "torch.sum"), rows=rows, cols=cols), CORES
        )
        for rows, cols in ((1, 512_000), (1000, 512))
    )
    assert everything is not None
    assert rows is not None
    assert everything[0].bytes == pytest.approx(rows[0].bytes, rel=0.01)
