"""Products of the sweep inside CUDA graphs: of activations by weights, and of two activations.

Of any sizes, or of very many rows and few channels on one side (narrow), as networks of images have
them before they shrink, whose gradients by weights add up over all rows.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from foreplan.datasets.operator_case import (
    MOST_BYTES,
    NARROW,
    Calls,
    Case,
    Operands,
    most_flops,
    narrow_product,
    product_shape,
    width_of,
)

#: Weights in turn take so many bytes together: four times the largest cache of today.
_COLD_BYTES, _MOST_TURNS = 2.5e8, 16


def linear(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A linear, or the product that is its gradient by its input or its weight."""
    name, width = op.removeprefix(NARROW), width_of(dtype)
    most = {"flops": most_flops(dtype, scale), "most_bytes": MOST_BYTES * scale}
    if name == op:
        _, m, n, k = product_shape(rng, batched=False, width=width, **most)
    else:
        m, n, k = narrow_product(rng, width=width, **most)
    # Forward, gradient of the input, gradient of the weight: other operands are transposed.
    role, bias = int(rng.integers(3)), bool(rng.random() < 0.5)
    if role == 2:  # adds up over rows
        m, k = k, m
    turns = max(1, min(_MOST_TURNS, round(_COLD_BYTES / (width * n * k))))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        first = view(dtype, 0, m, k)
        room = n * k + 256
        weights = [view(dtype, m * k + n + 256 + turn * room, n, k) for turn in range(turns)]
        if role == 0:
            added = view(dtype, m * k, n) if bias else None
            return [partial(F.linear, first, w, added) for w in weights]
        if role == 1:
            return [partial(torch.mm, first, w.view(k, n)) for w in weights]
        turned = first.view(k, m).t()
        return [partial(torch.mm, turned, w.view(k, n)) for w in weights]

    return Case(name, name, dtype, {"b": 1, "m": m, "n": n, "k": k, "turned": role}, calls)


def bmm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A batch of products of two activations."""
    b, m, n, k = product_shape(
        rng, batched=True, width=width_of(dtype), flops=most_flops(dtype, scale),
        most_bytes=MOST_BYTES * scale,
    )  # fmt: skip
    # Scores of attention, their product with values, gradients by the second operand.
    turned = int(rng.integers(3))

    def calls(view: Operands) -> Calls:
        import torch

        x, y = view(dtype, 0, b, m, k), view(dtype, b * m * k, b, k, n)
        x = x.view(b, k, m).transpose(1, 2) if turned == 2 else x
        y = y.view(b, n, k).transpose(1, 2) if turned == 0 else y
        return [lambda: torch.bmm(x, y)]

    return Case(op, op, dtype, {"b": b, "m": m, "n": n, "k": k, "turned": turned}, calls)
