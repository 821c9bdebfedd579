"""Rows rounded to fp8 in one launch: scales, rounding, odd layouts; on a GPU that has fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foreplan.datasets.kernels import _fp8_rows
from foreplan.datasets.kernels._fp8_rows import fp8_rows

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU of compute capability 8.9",
)


@needs_fp8
@pytest.mark.parametrize(
    "shape", [(1, 8), (3, 16), (17, 264), (5, 8192), (2, 20480), (3, 73728), (0, 64)]
)
def test_rows_are_scaled_to_their_largest_and_rounded_to_nearest(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda").mul_(3.0).bfloat16()
    values, scale = fp8_rows(x)
    assert values.dtype is torch.float8_e4m3fn
    assert (values.shape, scale.shape) == (x.shape, (shape[0], 1))
    torch.testing.assert_close(scale, x.float().abs().amax(1, keepdim=True) / 448)
    nearest = (x.float() * (1.0 / scale)).to(torch.float8_e4m3fn)
    assert torch.equal(values.float(), nearest.float())


@needs_fp8
def test_layouts_zeros_small_rows_and_what_is_no_number() -> None:
    wide = torch.randn(6, 80, device="cuda").bfloat16()
    for view in (wide[:, 8:72], wide[::2, :64], wide[:, 3:67], wide.t()[:48].t()):
        whole, scale = fp8_rows(view)
        expected, same = fp8_rows(view.contiguous().clone())
        assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, same)
    x = torch.zeros(4, 64, device="cuda", dtype=torch.bfloat16)
    x[1, 5], x[2, 7], x[3, 9] = 1e-38, torch.nan, torch.inf
    values, scale = fp8_rows(x)
    assert scale[:2].flatten().tolist() == pytest.approx([1e-12, 1e-12])
    assert bool((values[:2].float() == 0.0).all())
    assert bool(scale[2:].isinf().all())
    assert not bool((values[2:].float() * scale[2:]).isfinite().any())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs NVRTC")
@pytest.mark.parametrize("kept", [4, 8])
@pytest.mark.parametrize("architecture", ["89", "90", "100"])
def test_it_compiles_for_every_gpu_with_fp8(architecture: str, kept: int) -> None:
    from torch.cuda._utils import _nvrtc_compile

    source = f"#define KEPT {kept}\n#define NAME fp8_rows\n"
    source += Path(_fp8_rows.__file__).with_suffix(".cu").read_text()
    made, _ = _nvrtc_compile(source, "fp8_rows", compute_capability=architecture)
    assert made
