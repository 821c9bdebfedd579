"""Forward and backward pass of one linear in every precision of training that a CPU has.

``pytest tests/benchmarks/test_training_linear.py --benchmark-enable``; one thread.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreplan.datasets.kernels.quantise import quantise
from foreplan.datasets.kernels.training_linear import linear
from foreplan.datasets.kernels.training_recipe import recipe

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, K, N = 512, 768, 3072


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "text",
    [
        "fp32/fp32/torch.linear",
        "fp32/bf16/torch.linear",
        "fp32/int8/torch.int_mm+bf16",
        "fp32/int8/torch.int_mm+int8",
    ],
)
def test_linear_forward_and_backward(benchmark: Any, text: str) -> None:
    found = recipe(text)
    x, w = drawn(ROWS, K).requires_grad_(), drawn(N, K).requires_grad_()
    g = drawn(ROWS, N).to({"fp32": torch.float32, "bf16": torch.bfloat16}[found.output])

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(linear(x, w, None, found), (x, w), g)

    gx, gw = benchmark(step)
    assert gx.shape == x.shape
    assert gw.dtype is torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_quantise_rows(benchmark: Any, fused: bool) -> None:
    x = drawn(ROWS, N)

    def eager() -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True) / 127
        return (x / scale).round_().to(torch.int8)

    values = benchmark((lambda: quantise(x, "int8", limit=127).values) if fused else eager)
    assert int(values.abs().max()) == 127
