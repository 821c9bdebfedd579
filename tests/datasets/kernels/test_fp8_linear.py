"""Linears of fp8 by few, some and many rows: the sums of the rounded values, scaled."""

from __future__ import annotations

import pytest
import torch

from foreplan.datasets.kernels import _fp8_linear
from foreplan.datasets.kernels._fp8_rows import fp8_rows
from foreplan.datasets.kernels.registry import linear_kernel
from foreplan.datasets.program import Variant

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU of compute capability 8.9",
)
ROWS = (0, 1, 8, 9, 16, 17, 100, 256, 400)


@needs_fp8
@pytest.mark.parametrize("shape", [(512, 256), (16, 128), (48, 144), (4112, 384), (32784, 128)])
@pytest.mark.parametrize("rows", ROWS)
def test_every_way_gives_the_scaled_sums(rows: int, shape: tuple[int, int]) -> None:
    n, k = shape
    draw = torch.Generator("cuda").manual_seed(rows)
    packed = linear_kernel(Variant.parse("fp8/fp8/torch.scaled_mm"), "cuda").pack(
        torch.randn(n, k, device="cuda", generator=draw) * 0.02
    )
    # Rows and features of unlike size: a scale that is left out or taken twice shows.
    x = torch.randn(rows, k, device="cuda", generator=draw)
    x = (x * torch.logspace(-2, 2, rows, device="cuda")[:, None]).bfloat16()
    bias = torch.randn(n, device="cuda", generator=draw).bfloat16()
    values, scale = fp8_rows(x)
    weight = packed.tensors["weight"].float() * packed.tensors["scale"][:, None]
    expected = (values.float() * scale) @ weight.t()
    for added in (None, bias):
        out = _fp8_linear.run(x, packed, added)
        assert (out.dtype, out.shape) == (torch.bfloat16, (rows, n))
        whole = expected if added is None else expected + added.float()
        error = (out.float() - whole).norm(dim=1) / whole.norm(dim=1)
        assert bool((error < 0.006).all())


@needs_fp8
@pytest.mark.parametrize("rows", [3, 64, 300])
def test_what_is_no_number_stays_in_its_row(rows: int) -> None:
    packed = linear_kernel(Variant.parse("fp8/fp8/torch.scaled_mm"), "cuda").pack(
        torch.randn(64, 128, device="cuda")
    )
    x = torch.randn(rows, 128, device="cuda").bfloat16()
    x[1, 5] = torch.nan
    out = _fp8_linear.run(x, packed, None)
    assert not bool(out[1].isfinite().any())
    out[1] = 0.0
    assert bool(out.isfinite().all())
