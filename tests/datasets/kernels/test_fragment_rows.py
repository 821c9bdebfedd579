"""Products of tens of rows from a packed weight: how they are cut, and what comes out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.kernels.registry import ROWS_A_CALL, linear_kernel
from foreplan.datasets.kernels.row_shapes import (
    MOST_ROWS,
    row_seconds,
    row_shape,
    takes_blocks,
)
from foreplan.datasets.program import Variant

#: Shared memory that a block may have (CUDA programming guide, compute capability 9.0).
_SHARED_BYTES = 227 << 10

bits = st.sampled_from([4, 8])
rows = st.integers(ROWS_A_CALL + 1, MOST_ROWS)
features, groups = st.integers(1, 2048).map(lambda n: 16 * n), st.integers(1, 512)


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif(not hopper(), reason="needs a GPU of compute capability 9.0")


@given(bits=bits, rows=rows, n=features, groups=groups)
def test_blocks_fit_a_multiprocessor(bits: int, rows: int, n: int, groups: int) -> None:
    shape = row_shape(bits, rows, n, 64 * groups)
    assert shape.shared_bytes(bits) <= _SHARED_BYTES
    assert 128 * shape.feature_groups * shape.input_groups <= 1024


@given(bits=bits, rows=rows, n=features, groups=groups, units=st.integers(4, 144))
def test_more_work_is_never_faster(bits: int, rows: int, n: int, groups: int, units: int) -> None:
    took = row_seconds(bits, rows, n, 64 * groups, units)
    assert row_seconds(bits, rows, n, 64 * groups, max(1, units // 2)) >= took
    whole = row_seconds(bits, rows, n, 64 * groups, 132)
    assert row_seconds(bits, rows + 64, n, 64 * groups, 132) >= whole
    assert row_seconds(bits, rows, 2 * n, 64 * groups, 132) >= whole
    assert row_seconds(bits, rows, n, 128 * groups, 132) >= whole


def test_other_gpus_and_many_rows_have_no_blocks() -> None:
    assert takes_blocks(MOST_ROWS, "9.0")
    assert not takes_blocks(MOST_ROWS + 1, "9.0")
    assert not any(takes_blocks(64, one) for one in ("8.0", "8.9", "10.0", "12.0", None))


@needs_hopper
@pytest.mark.parametrize("storage", ["int4", "int8"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(33, 48, 320), (64, 2048, 2048), (65, 80, 64), (129, 1040, 192), (200, 256, 2048),
     (384, 8192, 512), (384, 4096, 14336), (256, 22016, 4096)],
)  # fmt: skip
def test_the_product_is_right(storage: str, rows: int, n: int, k: int) -> None:
    random = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(n, k, device="cuda", generator=random) * k**-0.5
    kernel = linear_kernel(Variant.parse(f"{storage}/bf16/foreplan.fragment_linear"), "cuda")
    packed = kernel.pack(weight)
    x = torch.randn(rows, k, device="cuda", generator=random).bfloat16()
    bias = torch.randn(n, device="cuda", generator=random).bfloat16()
    for given_bias in (None, bias):
        expected = x.double() @ kernel.dequantise(packed).double().t()
        if given_bias is not None:
            expected += given_bias.double()
        got = kernel.run(x, packed, given_bias).double()
        assert float((got - expected).norm() / expected.norm()) < 0.004


@needs_hopper
def test_no_row_reads_another() -> None:
    """Rows of nothing but zeros stay zero beside rows that are not numbers."""
    kernel = linear_kernel(Variant.parse("int4/bf16/foreplan.fragment_linear"), "cuda")
    packed = kernel.pack(torch.randn(512, 1024, device="cuda"))
    x = torch.zeros(100, 1024, device="cuda", dtype=torch.bfloat16)
    x[1::2] = torch.nan
    made = kernel.run(x, packed, None)
    assert torch.equal(made[::2], torch.zeros_like(made[::2]))
    assert made[1::2].isnan().all()
