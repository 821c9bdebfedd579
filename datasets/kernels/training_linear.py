"""The linear layer as an autograd function that computes and saves as its `Recipe` says.

With master weight ``W[N, K]``, scales ``s`` a row of ``x[rows, K]`` and ``t`` a row of ``W``, an
8-bit layer keeps ``p = x / s`` and ``q = W / t`` in 8 bits and computes

    y  = s (p q^T) t^T + b                     forward
    gx = (g t^T) q                             the weight's scales ride on grad_output's columns,
    gW = (g s)^T p                             the input's on its rows

so that the backward pass neither quantises ``x`` or ``W`` again nor dequantises them: 8-bit values
are exact in bf16, and in an 8-bit backward pass only ``g t^T`` (by rows) and ``g s`` (by columns)
are quantised, int8 stochastically: the gradient is unbiased given the forward pass. With one scale
a tensor ``g`` is quantised once for both products, to nearest, which is biased: what is small
beside the largest number of the tensor becomes 0. This is the straight-through estimator: the
gradient of the layer at the quantised operands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels.quantise import (
    DTYPES,
    EIGHT_BITS,
    FP8_LIMIT,
    INT8_LIMIT,
    Along,
    Quantised,
    product,
    quantise,
)
from foreplan.datasets.kernels.training_recipe import Recipe


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, seed: int = 0) -> Tensor:
    """``x @ weight.T + bias``, as a recipe says, with a gradient.

    Args:
        x: ``[..., K]``, any float dtype.
        weight: fp32 master ``[N, K]``; its gradient is fp32.
        bias: fp32 ``[N]`` or ``None``; its gradient is fp32.
        recipe: how.
        seed: of stochastic rounding in the backward pass; a new one a call.

    Returns:
        ``[..., N]`` in ``recipe.output``.

    Raises:
        SpecError: the recipe cannot run on this kind of device.
    """
    if recipe.forward == recipe.backward == recipe.saved == "fp32":
        return F.linear(x.float(), weight, bias)
    run: Any = _Linear.apply
    out: Tensor = run(x, weight, bias, recipe, seed)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, seed: int
    ) -> Tensor:
        ctx.recipe, ctx.seed, ctx.shape = recipe, seed, x.shape
        rows = x.reshape(-1, x.shape[-1])
        out = DTYPES[recipe.output]
        if recipe.forward in EIGHT_BITS:
            limit = INT8_LIMIT if recipe.forward == "int8" else FP8_LIMIT
            p = quantise(rows, recipe.forward, recipe.along, limit=recipe.limit)
            q = quantise(weight, recipe.forward, recipe.along, limit=recipe.limit or limit)
            ctx.save_for_backward(p.values, p.scale, q.values, q.scale)
            made = product(p, q.transposed(), bias, out)
        else:
            dtype = DTYPES[recipe.forward]
            low, low_weight = rows.to(dtype), weight.to(dtype)
            ctx.save_for_backward(low, low_weight)
            low_bias = None if bias is None else bias.to(dtype)
            made = _multiply(low, low_weight.t(), recipe.forward, out, low_bias)
        return made.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        g = grads[0].reshape(-1, grads[0].shape[-1])
        saved = ctx.saved_tensors
        gx = gw = None
        gb = g.sum(0, dtype=torch.float32) if need_bias else None
        if recipe.saved in EIGHT_BITS:
            p, q = Quantised(*saved[:2]), Quantised(*saved[2:])
            if recipe.along == "tensor" and recipe.backward in EIGHT_BITS:
                gx, gw = _rounded_once(g, p, q, recipe)
            else:
                if need_x:
                    gx = _times(g, q.scale.t(), q.values, recipe, ctx.seed)
                if need_weight:
                    gw = _transposed_times(g, p.scale, p.values, recipe, ctx.seed + 1)
        else:
            low = g.to(DTYPES[recipe.backward])
            if need_x:
                gx = _multiply(low, saved[1], recipe.backward, low.dtype)
            if need_weight:
                gw = _multiply(low.t(), saved[0], recipe.backward, torch.float32)
        return None if gx is None else gx.view(ctx.shape), gw, gb, None, None


def _rounded_once(g: Tensor, p: Quantised, q: Quantised, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight with one scale a tensor: scales only multiply the results."""
    low = quantise(g, recipe.backward, "tensor", limit=recipe.limit)
    one = torch.ones(1, 1, device=g.device)
    by_input, by_weight = (Quantised(low.values, low.scale * x.scale) for x in (q, p))
    gx = product(by_input, Quantised(q.values, one), None, torch.bfloat16)
    return gx, product(by_weight.transposed(), Quantised(p.values, one), None, torch.float32)


def _times(g: Tensor, factor: Tensor, values: Tensor, recipe: Recipe, seed: int) -> Tensor:
    """``(g * factor) @ values`` of ``g[rows, N]``, ``factor[1, N]`` and ``values[N, K]``."""
    one = torch.ones(1, 1, device=g.device)
    if recipe.backward in EIGHT_BITS:
        left = _rounded(g, "row", factor, recipe, seed)
        return product(left, Quantised(values, one), None, torch.bfloat16)
    dtype = DTYPES[recipe.backward]
    return _multiply((g * factor).to(dtype), values.to(dtype), recipe.backward, dtype)


def _transposed_times(
    g: Tensor, factor: Tensor, values: Tensor, recipe: Recipe, seed: int
) -> Tensor:
    """``(g * factor)^T @ values`` of ``g[rows, N]``, ``factor[rows, 1]``, ``values[rows, K]``."""
    one = torch.ones(1, 1, device=g.device)
    if recipe.backward in EIGHT_BITS:
        left = _rounded(g, "column", factor, recipe, seed)
        return product(left.transposed(), Quantised(values, one), None, torch.float32)
    dtype = DTYPES[recipe.backward]
    low = (g * factor).to(dtype)
    return _multiply(low.t(), values.to(dtype), recipe.backward, torch.float32)


def _rounded(g: Tensor, along: Along, factor: Tensor, recipe: Recipe, seed: int) -> Quantised:
    rounding = seed if recipe.backward == "int8" else None
    return quantise(g, recipe.backward, along, factor=factor, limit=recipe.limit, seed=rounding)


def _multiply(
    a: Tensor, b: Tensor, precision: str, out: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``a @ b + bias`` of equal float dtypes with fp32 sums.

    A CPU without bf16 instructions multiplies bf16 operands in fp32: rounded once like a bf16
    kernel's result, and three to seventy times faster than torch's fallback.
    """
    if a.device.type == "cpu" and precision == "bf16" and not _has_bf16():
        a, b = a.float(), b.float()
        bias = None if bias is None else bias.float()
    with _tf32(precision == "tf32" and a.device.type == "cuda"):
        if a.device.type == "cuda" and out is torch.float32 and a.dtype is not out and bias is None:
            return torch.mm(a, b, out_dtype=out)
        return (a @ b if bias is None else torch.addmm(bias, a, b)).to(out)


@functools.cache
def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow tf32; the switch belongs to the process, so it is put back."""
    if not allowed:
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
