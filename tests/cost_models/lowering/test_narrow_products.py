"""Products of operands of 8 bits are priced as products, not as a walk over their tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foreplan
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program

FP8 = torch.float8_e4m3fn


class _Integers(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch._int_mm(x, y.t())


class _Scaled(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = x.new_ones((), dtype=torch.float32)
        return torch._scaled_mm(x, y.t(), scale, scale, out_dtype=torch.bfloat16)


class _Plain(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.t()


@pytest.mark.parametrize(("module", "dtype", "name"), [
    (_Integers(), torch.int8, "int8"), (_Scaled(), FP8, "fp8"),
])  # fmt: skip
def test_the_program_is_a_product_in_the_operands_dtype(
    module: nn.Module, dtype: torch.dtype, name: str
) -> None:
    x, y = (torch.empty(rows, 64, dtype=dtype, device="meta") for rows in (32, 48))
    work = lower(capture(module, [x, y], eager=True))[-1].work
    assert isinstance(work, Program)
    assert (work.op, dict(work.dims)) == ("linear", {"rows": 32, "n": 48, "k": 64})
    assert (work.variant.storage, work.variant.compute) == (name, name)


@pytest.mark.parametrize(("module", "dtype"), [(_Integers(), torch.int8), (_Scaled(), FP8)])
def test_a_large_one_takes_half_of_sixteen_bits_not_its_bytes(
    module: nn.Module, dtype: torch.dtype
) -> None:
    def product_s(module: nn.Module, dtype: torch.dtype) -> float:
        x = torch.empty(8192, 8192, dtype=dtype, device="meta")
        found = foreplan.predict_latency(module, "h200", inputs=(x, x))
        assert not found.unsupported()
        return float(found.to_frame()["latency_s"].iloc[-1])

    half = product_s(module, dtype) / product_s(_Plain(), torch.bfloat16)
    assert 0.35 < half < 0.9
