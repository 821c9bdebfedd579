"""Products of the sweep inside CUDA graphs: of activations by weights, and of two activations.

Of any sizes, or of very many rows and few channels on one side (narrow), as networks of images have
them before they shrink, whose gradients by weights add up over all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from foreplan.datasets.sweeps.operator_case import (
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
    dims = {"b": 1, "m": m, "n": n, "k": k, "turned": role}
    return Case(name, name, dtype, dims, partial(_linear_calls, dtype, dims, bias))


def bmm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A batch of products of two activations."""
    b, m, n, k = product_shape(
        rng, batched=True, width=width_of(dtype), flops=most_flops(dtype, scale),
        most_bytes=MOST_BYTES * scale,
    )  # fmt: skip
    # Scores of attention, their product with values, gradients by the second operand.
    dims = {"b": b, "m": m, "n": n, "k": k, "turned": int(rng.integers(3))}
    return Case(op, op, dtype, dims, partial(_bmm_calls, dtype, dims))


def product_again(row: Mapping[str, Any]) -> Case:
    """The product of a table's row, to be timed again; a linear has no bias then.

    Args:
        row: columns ``op`` (``linear`` or ``bmm``), ``dtype``, ``b``, ``m``, ``n``, ``k`` and
            ``turned``.
    """
    op, dtype = str(row["op"]), str(row["dtype"])
    dims = {name: int(row[name]) for name in ("b", "m", "n", "k", "turned")}
    if op == "linear":
        return Case(op, op, dtype, dims, partial(_linear_calls, dtype, dims, False))
    return Case(op, op, dtype, dims, partial(_bmm_calls, dtype, dims))


def _linear_calls(dtype: str, dims: Mapping[str, int], bias: bool, view: Operands) -> Calls:
    import torch
    import torch.nn.functional as F

    m, n, k, role = (dims[name] for name in ("m", "n", "k", "turned"))
    turns = max(1, min(_MOST_TURNS, round(_COLD_BYTES / (width_of(dtype) * n * k))))
    drawn = partial(view, normal=True)
    first = drawn(dtype, 0, m, k)
    room = n * k + 256
    weights = [drawn(dtype, m * k + n + 256 + turn * room, n, k) for turn in range(turns)]
    if role == 0:
        added = drawn(dtype, m * k, n) if bias else None
        return [partial(F.linear, first, w, added) for w in weights]
    if role == 1:
        return [partial(torch.mm, first, w.view(k, n)) for w in weights]
    turned = first.view(k, m).t()
    return [partial(torch.mm, turned, w.view(k, n)) for w in weights]


def _bmm_calls(dtype: str, dims: Mapping[str, int], view: Operands) -> Calls:
    import torch

    b, m, n, k, turned = (dims[name] for name in ("b", "m", "n", "k", "turned"))
    drawn = partial(view, normal=True)
    x, y = drawn(dtype, 0, b, m, k), drawn(dtype, b * m * k, b, k, n)
    x = x.view(b, k, m).transpose(1, 2) if turned == 2 else x
    y = y.view(b, n, k).transpose(1, 2) if turned == 0 else y
    return [lambda: torch.bmm(x, y)]
