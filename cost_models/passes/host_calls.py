"""`measured_calls`: what single ATen calls cost the host of this machine. Imports torch.

Operands are so small that the device is done before the host asks for the next call, forty calls
in a row; medians of nine such rows. Written as models write them (``x @ y``, not
``torch.ops.aten.matmul``), so that Python's part of a call is in its price.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = tuple[Callable[[], tuple[Tensor, ...]], Callable[..., Any]]

#: Width, tokens, channels and pixels of an operand.
_WIDTH, _TOKENS, _CHANNELS, _PIXELS = 64, 16, 64, 8
_CALLS, _ROWS, _GRADIENTS = 40, 9, 20


def measured_calls(device: str, dtype: Any) -> dict[str, dict[str, float]]:
    """Seconds by kind of call and mode (`HostPrices.call_s`)."""
    return {kind: _modes(*call, device) for kind, call in calls(device, dtype).items()}


def measured_update(device: str, dtype: Any) -> tuple[float, float]:
    """Seconds of an update by fused AdamW, setting gradients to none included: fixed, a tensor."""
    times = {}
    for count in (16, 256):
        tensors = [torch.nn.Parameter(torch.rand(_WIDTH).to(device, dtype)) for _ in range(count)]
        optimizer = torch.optim.AdamW(tensors, lr=1e-6, fused=True)
        rows = []
        for _ in range(_ROWS):
            for tensor in tensors:
                tensor.grad = torch.zeros_like(tensor)
            _wait(device)
            started = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            rows.append(time.perf_counter() - started)
        times[count] = sorted(rows)[_ROWS // 2]
    each = max(0.0, (times[256] - times[16]) / 240)
    return max(0.0, times[16] - 16 * each), each


def calls(device: str, dtype: Any) -> Mapping[str, Call]:
    """Operands and call of each kind that has a price."""

    def draw(*shape: int) -> Tensor:
        return (torch.rand(shape) + 0.5).to(device, dtype).requires_grad_()

    x = partial(draw, 1, _TOKENS, _WIDTH)
    w, row = partial(draw, _WIDTH, _WIDTH), partial(draw, _WIDTH)
    image = partial(draw, 1, _CHANNELS, _PIXELS, _PIXELS)
    other = torch.float64 if dtype == torch.float32 else torch.float32
    ones = partial(torch.ones, device=device)
    mean, variance = ones(_CHANNELS, dtype=dtype), ones(_CHANNELS, dtype=dtype)
    integers = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    found: dict[str, Call] = {
        kind: (lambda: (x(),), run)
        for kind, run in {
            "view": lambda a: a.view(_TOKENS, _WIDTH), "add scalar": lambda a: a + 1.0,
            "mul scalar": lambda a: a * 2.0, "sub scalar": lambda a: 1.0 - a,
            "div scalar": lambda a: a / 2.0, "neg": lambda a: -a, "pow": lambda a: a.pow(2),
            "mean": lambda a: a.mean(-1, keepdim=True), "rsqrt": torch.rsqrt,
            "to": lambda a: a.to(other), "silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh,
            "relu": F.relu, "sigmoid": torch.sigmoid, "softmax": lambda a: torch.softmax(a, -1),
            "cos": torch.cos, "sin": torch.sin, "clone": torch.clone,
            "contiguous": lambda a: a.transpose(1, 2).contiguous(), "exp": torch.exp,
            "sum": lambda a: a.sum(-1), "roll": lambda a: a.roll(1, 1),
        }.items()
    }  # fmt: skip
    found |= {
        kind: (lambda: (x(), x()), run)
        for kind, run in {
            "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "sub": lambda a, b: a - b,
            "div": lambda a, b: a / b, "cat": lambda a, b: torch.cat((a, b), -1),
            "matmul": lambda a, b: a @ b.transpose(1, 2),
        }.items()
    }  # fmt: skip
    found |= {
        "linear": (lambda: (x(), w()), F.linear),
        "linear bias": (lambda: (x(), w(), row()), F.linear),
        "addmm": (lambda: (row(), draw(_TOKENS, _WIDTH), w()), torch.addmm),
        "layer_norm": (lambda: (x(), row(), row()),
                       lambda a, b, c: F.layer_norm(a, (_WIDTH,), b, c)),
        "rms_norm": (lambda: (x(), row()), lambda a, b: F.rms_norm(a, (_WIDTH,), b)),
        "embedding": (lambda: (w(),), lambda a: F.embedding(integers, a)),
        "scaled_dot_product_attention": _attention(draw, 4),
        "scaled_dot_product_attention grouped": _attention(draw, 2),
        "conv 1": _convolution(draw, 1), "conv 1 strided": _convolution(draw, 1, stride=2),
        "conv n": _convolution(draw, 3), "conv n strided": _convolution(draw, 3, stride=2),
        "conv grouped": _convolution(draw, 7, groups=_CHANNELS),
        "batch_norm": (lambda: (image(), row(), row()),
                       lambda a, b, c: F.batch_norm(a, mean, variance, b, c)),
        "max_pool2d": (lambda: (image(),), lambda a: F.max_pool2d(a, 3, 2, 1)),
        "adaptive_avg_pool2d": (lambda: (image(),), lambda a: F.adaptive_avg_pool2d(a, (1, 1))),
        "cross_entropy": (lambda: (draw(_TOKENS, _WIDTH),),
                          lambda a: F.cross_entropy(a, integers[0])),
        "arange": (tuple, lambda: torch.arange(_TOKENS, device=device)),
        "ones": (tuple, lambda: ones(_TOKENS)),
        "ne": (tuple, lambda: integers != 1), "cumsum": (tuple, lambda: integers.cumsum(-1)),
        "diff": (tuple, lambda: torch.diff(integers, dim=-1)),
        "gather": (lambda: (row(),), lambda a: a[integers]),
    }  # fmt: skip
    return found


def _attention(draw: Callable[..., Tensor], kv_heads: int) -> Call:
    def make() -> tuple[Tensor, ...]:
        key = (1, kv_heads, _TOKENS, _WIDTH)
        return draw(1, 4, _TOKENS, _WIDTH), draw(*key), draw(*key)

    grouped = kv_heads < 4
    return make, partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)


def _convolution(draw: Callable[..., Tensor], taps: int, *, stride: int = 1,
                 groups: int = 1) -> Call:  # fmt: skip
    def make() -> tuple[Tensor, ...]:
        weight = draw(_CHANNELS, _CHANNELS // groups, taps, taps)
        return draw(1, _CHANNELS, _PIXELS, _PIXELS), weight

    return make, partial(F.conv2d, stride=stride, padding=taps // 2, groups=groups)


# ------------------------------------------------------------------------------------ timing


def _modes(
    make: Callable[[], tuple[Tensor, ...]], run: Callable[..., Any], device: str
) -> dict[str, float]:
    operands = make()
    with torch.inference_mode():
        found = {"inference": _row(lambda: run(*operands), device)}
    found["forward"] = _row(lambda: run(*operands), device)
    result = run(*operands)
    if result.requires_grad:
        found["backward"] = _gradients(make, run, device)
    else:
        found["backward"] = 0.0
    return found


def _row(call: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(_ROWS + 1):
        _wait(device)
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - started) / _CALLS)
    return sorted(times[1:])[_ROWS // 2]  # the first row warms up


def _gradients(
    make: Callable[[], tuple[Tensor, ...]], run: Callable[..., Any], device: str
) -> float:
    """Seconds of one call's gradients: of several in one pass, less such a pass without them."""
    sets = [make() for _ in range(_GRADIENTS)]
    bare = [torch.empty_like(run(*sets[0])).requires_grad_() for _ in sets]
    operands = [operand for operands in sets for operand in operands]
    times = []
    for _ in range(_ROWS + 1):
        # One result, because autograd checks each in Python.
        whole = _pass(torch.stack([run(*operands) for operands in sets]), operands, device)
        times.append(whole - _pass(torch.stack(bare), bare, device))
    return max(0.0, sorted(times[1:])[_ROWS // 2] / _GRADIENTS)


def _pass(result: Tensor, operands: list[Tensor], device: str) -> float:
    seed = torch.ones_like(result)
    _wait(device)
    started = time.perf_counter()
    torch.autograd.grad(result, operands, seed)
    return time.perf_counter() - started


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
