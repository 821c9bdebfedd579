"""Maps of the sweep inside CUDA graphs by the function that they compute, and copies by layout.

A row's name says which function or copy it is (`gelu`, `gelu_backward`, `cat`), as torch calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from foreplan.datasets.sweeps.map_cases import map_sizes
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    narrow_shape,
    wide_shape,
)

#: Functions of one tensor, of two, and of three, as networks have them; gradients are given the
#: gradient behind them first.
_ONE = (
    "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "exp", "pow", "rsqrt", "mul", "add",
    "neg", "clone", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus", "cos",
    "sqrt", "native_dropout",
)  # fmt: skip
_TWO = (
    "add", "mul", "sub", "div", "gelu_backward", "gelu_tanh_backward", "silu_backward",
    "threshold_backward", "tanh_backward", "sigmoid_backward", "hardtanh_backward",
    "hardswish_backward", "leaky_relu_backward",
)  # fmt: skip
_THREE = ("addcmul", "where", "native_dropout_backward")
#: Tensors whose rows are multiples of so many bytes are joined by another kernel (``Shape.cu``).
_VECTOR_BYTES = 16
#: Copies into another order, or of several tensors into one.
_LAYOUTS = ("transposed", "permuted", "cat_halves", "cat", "channels_last")


def function(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A function of each element, of operands as large as the result."""
    rows, cols = (wide_shape if rng.random() < 0.7 else narrow_shape)(rng, MOST_BYTES * scale)
    inputs = int(rng.choice([1, 2, 3], p=[0.5, 0.42, 0.08]))
    name = str(rng.choice((_ONE, _TWO, _THREE)[inputs - 1]))

    def calls(view: Operands) -> Calls:
        import torch

        x, y = (view(dtype, at * (rows * cols + 256), rows, cols) for at in range(2))
        if name in ("where", "native_dropout_backward"):
            kept = torch.zeros(rows, cols, dtype=torch.bool, device=view.device)
            kept.view(-1)[::3] = True
            if name == "where":
                return [lambda: torch.where(kept, x, y)]
            dropped: Any = torch.ops.aten.native_dropout_backward
            return [lambda: dropped(x, kept, 1.1)]
        if inputs == 3:
            z = view(dtype, 2 * (rows * cols + 256), rows, cols)
            return [lambda: torch.addcmul(x, y, z)]
        return [lambda: CALLS[inputs, name](x, y)]

    number = MAP_FUNCTIONS[name]
    # A mask is a byte an element: of two tensors and a mask, or of one and a mask.
    reads = {"where": 2, "native_dropout_backward": 1}.get(name, inputs)
    return Case(name, "elementwise", dtype, map_sizes(rows, cols, reads, function=number), calls)


def layout(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A copy into another order, or of several tensors into one."""
    rows, cols = wide_shape(rng, MOST_BYTES * scale)
    name = str(rng.choice(_LAYOUTS))
    parts = int(rng.integers(2, 6))
    inner = int(rng.choice([32, 64, 80, 96, 128]))
    if name == "permuted":
        heads = int(rng.choice([4, 8, 12, 16, 32]))
        rows, cols = max(1, rows * cols // (heads * inner)), heads * inner
    if name == "channels_last":
        side, cols = int(2.0 ** rng.uniform(2, 7)), int(2.0 ** rng.uniform(2, 10)) // 4 * 4
        rows = max(1, min(rows, int(MOST_BYTES * scale / 24) // (side * side * cols))) * side * side
    if name.startswith("cat"):
        cols = max(parts * 2, cols // (parts * 2) * parts * 2)

    def calls(view: Operands) -> Calls:
        import torch

        x = view(dtype, 0, rows, cols)
        if name == "transposed":
            turned = x.t()
            return [lambda: turned.clone(memory_format=torch.contiguous_format)]
        if name == "permuted":  # heads beside positions, positions beside heads
            heads = x.view(rows, cols // inner, inner).transpose(0, 1)
            return [lambda: heads.clone(memory_format=torch.contiguous_format)]
        if name == "channels_last":
            pixels = side * side
            plain = x.view(rows // pixels, cols, side, side)
            return [lambda: plain.clone(memory_format=torch.channels_last)]
        if name == "cat_halves":
            half = cols // 2
            return [lambda: torch.cat((x[:, half:], x[:, :half]), -1)]
        tensors = [view(dtype, at * (rows * (cols // parts) + 256), rows, cols // parts)
                   for at in range(parts)]  # fmt: skip
        return [lambda: torch.cat(tensors, -1)]

    strided = 1 if name in ("transposed", "channels_last") else 3
    width = 4 if dtype == "fp32" else 2
    unaligned = name == "cat" and cols // parts * width % _VECTOR_BYTES > 0
    called = "cat_unaligned" if unaligned else name
    sizes = map_sizes(rows, cols, 1, strided=strided, function=MAP_FUNCTIONS[called])
    return Case(called, "elementwise", dtype, sizes, calls)


def _calls() -> dict[tuple[int, str], Callable[[Any, Any], Any]]:
    """What to call, by inputs and name; torch is imported when one is called."""

    def aten(name: str, *more: Any, **named: Any) -> Callable[[Any, Any], Any]:
        def call(x: Any, y: Any) -> Any:
            import torch

            return getattr(torch.ops.aten, name)(x, y, *more, **named)

        return call

    def one(name: str, *more: Any, **named: Any) -> Callable[[Any, Any], Any]:
        def call(x: Any, y: Any) -> Any:
            import torch

            made = getattr(torch.ops.aten, name)(x, *more, **named)
            return made[0] if name == "native_dropout" else made  # a mask stands behind

        return call

    given: dict[str, tuple[Any, ...]] = {
        "pow": (2.0,), "mul": (2.0,), "add": (1.0,), "hardtanh": (0.6, 1.2),
        "native_dropout": (0.1, True),
    }  # fmt: skip
    found = {(1, name): one(name, *given.get(name, ())) for name in _ONE}
    found[1, "gelu_tanh"] = one("gelu", approximate="tanh")
    found |= {(2, name): aten(name) for name in _TWO}
    found |= {
        (2, "gelu_tanh_backward"): aten("gelu_backward", approximate="tanh"),
        (2, "threshold_backward"): aten("threshold_backward", 0.0),
        (2, "hardtanh_backward"): aten("hardtanh_backward", 0.6, 1.2),
        (2, "leaky_relu_backward"): aten("leaky_relu_backward", 0.01, False),
    }
    return found


#: What to call with two operands, of which it may ignore the second; by inputs and name.
CALLS: Mapping[tuple[int, str], Callable[[Any, Any], Any]] = MappingProxyType(_calls())
