"""Linears of layers that are trained: who adds their weights' gradients, and when."""

from __future__ import annotations

import pytest
import torch

from foreplan.planner.bubbles.execution.layers import Linear, WeightGradients


def made(dtype: torch.dtype, *, bias: bool = True) -> Linear:
    torch.manual_seed(0)
    linear = Linear(5, 3, bias=bias).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return linear.to(dtype)


def microbatches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, 4, 5).to(dtype), torch.randn(2, 4, 3).to(dtype)) for _ in range(3)]


def gradients(linear: Linear, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the weight and of the first input, summed in fp32 over micro-batches."""
    weight, inputs = torch.zeros(3, 5), torch.zeros(2, 4, 5)
    for x, g in microbatches(dtype):
        weight += g.float().flatten(0, 1).t() @ x.float().flatten(0, 1)
        inputs += g.float() @ linear.weight.float()
    return weight, inputs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_add_up(dtype: torch.dtype, deferred: bool, bias: bool) -> None:
    """In the sum of another dtype, or as autograd has it; put off or not."""
    linear = made(dtype, bias=bias)
    later = linear.later = WeightGradients() if deferred else None
    if dtype is not torch.float32:
        linear.total = torch.zeros(3, 5)
    backwards = torch.zeros(2, 4, 5)
    for number, (x, g) in enumerate(microbatches(dtype)):
        if later is not None:
            later.collect(number)
        leaf = x.requires_grad_()
        torch.autograd.backward([linear(leaf)], [g])
        assert leaf.grad is not None
        backwards += leaf.grad.float()
        if later is not None:
            later.close()
    found = linear.total if linear.total is not None else linear.weight.grad
    if later is not None:
        assert found is None or not found.any()
        for number in range(3):
            later.finish(number)
        found = linear.total if linear.total is not None else linear.weight.grad
    assert found is not None
    assert not found.requires_grad
    weight, inputs = gradients(linear, dtype)
    rtol, atol = (0.02, 0.1) if dtype is torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(found, weight, rtol=rtol, atol=atol)
    torch.testing.assert_close(backwards, inputs, rtol=rtol, atol=atol)
    assert linear.total is None or linear.weight.grad is None
    if linear.bias is not None:
        assert linear.bias.grad is not None
        summed = torch.stack([g.sum((0, 1)) for _, g in microbatches(dtype)]).sum(0)
        torch.testing.assert_close(linear.bias.grad, summed, rtol=rtol, atol=atol)
