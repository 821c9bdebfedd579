"""Maps, sums and norms of the sweep inside CUDA graphs, and the gradients of norms.

Maps read full operands, operands of one value a row, a column or a block of rows (broadcast),
convert between FP32 and 16 bits, copy strided elements, or roll them. Sums run over rows, over
columns, and over all but a middle size. Norms are of rows (layer, root mean square) or of channels
(batch).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    NARROW,
    Calls,
    Case,
    Operands,
    gradient_call,
    images_of,
    narrow_shape,
    wide_shape,
)


def elementwise(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A map whose operands are all as large as its result, or a strided copy."""
    rows, cols = wide_shape(rng, MOST_BYTES * scale)
    inputs = int(rng.choice([1, 2, 3], p=[0.5, 0.4, 0.1]))
    strided = inputs == 1 and bool(rng.random() < 0.3)
    which = int(rng.integers(11))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        x, y, z = (view(dtype, at * (rows * cols + 256), rows, cols) for at in range(3))
        if strided:
            turned, half = x.view(cols, rows).t(), cols // 2
            return [
                [lambda: turned.contiguous(),
                 lambda: torch.cat((x[:, half:], x[:, :half]), -1)][which % 2]
            ]  # fmt: skip
        aten: Any = torch.ops.aten
        one: Calls = [
            lambda: torch.relu(x), lambda: F.gelu(x), lambda: F.silu(x), lambda: torch.tanh(x),
            lambda: x * 2.0, lambda: x.pow(2), lambda: torch.rsqrt(x), lambda: x.clone(),
            lambda: x.neg(), lambda: torch.exp(x), lambda: torch.sigmoid(x),
        ]  # fmt: skip
        two: Calls = [
            lambda: x + y, lambda: x * y, lambda: x - y, lambda: x / y,
            lambda: aten.gelu_backward(x, y), lambda: aten.silu_backward(x, y),
            lambda: aten.threshold_backward(x, y, 0), lambda: aten.tanh_backward(x, y),
            lambda: x * y, lambda: x + y, lambda: x * y,
        ]  # fmt: skip
        three: Calls = [lambda: torch.addcmul(x, y, z), lambda: torch.lerp(x, y, z)] * 6
        return [(one, two, three)[inputs - 1][which]]

    return _map(dtype, rows, cols, inputs, calls, strided=(1, 3)[which % 2] if strided else 0)


def broadcast(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A map of a matrix and an operand that is read again and again."""
    rows, cols = wide_shape(rng, MOST_BYTES * scale)
    lies = int(rng.choice([1, 2, 3], p=[0.4, 0.3, 0.3]))
    repeats = min(rows, 2 ** int(rng.integers(1, 7)))
    rows = rows // repeats * repeats if lies == 3 else rows
    which = int(rng.integers(3))

    def calls(view: Operands) -> Calls:
        x, behind = view(dtype, 0, rows, cols), rows * cols + 256
        if lies == 1:
            y = view(dtype, behind, rows, 1)
        elif lies == 2:
            y = view(dtype, behind, cols)
        else:  # as a rotation's angles are shared by heads
            x, y = x.view(-1, repeats, cols), view(dtype, behind, rows // repeats, 1, cols)
        return [[lambda: x * y, lambda: x + y, lambda: x - y][which]]

    return _map(dtype, rows, cols, 1, calls, broadcast=lies)


def convert(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A copy in another data type, named by what it writes."""
    rows, cols = wide_shape(rng, MOST_BYTES * scale)
    source = "bfloat16" if dtype == "fp32" else "fp32"

    def calls(view: Operands) -> Calls:
        import torch

        x = view(source, 0, rows, cols)
        to = {"fp32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        return [lambda: x.to(to)]

    # FP32 from 16 bits reads half an input, 16 bits from FP32 two.
    return _map(dtype, rows, cols, 1 if dtype == "fp32" else 2, calls, converts=1)


def roll(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A roll along one dimension: ``rows`` parts of ``cols`` neighbours go round, each by itself.

    Along several torch rolls one after another (``TensorTransformations.h``).
    """
    while True:
        rows, size, inner = (int(2.0 ** rng.uniform(0, top)) for top in (14, 10, 11))
        inner = inner // 8 * 8 if inner > 8 and rng.random() < 0.85 else inner
        size += size == 1
        if 12.0 * rows * size * inner < MOST_BYTES * scale / 2:
            break
    shift = int(rng.integers(1, size))

    def calls(view: Operands) -> Calls:
        x = view(dtype, 0, rows, size, inner)
        return [lambda: x.roll(shift, 1)]

    return _map(dtype, rows, size * inner, 1, calls, strided=2)


def reduction(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A sum over each row (``strided`` 0), each column (1), or all but a middle size (2)."""
    narrow = op.startswith(NARROW)
    strided = int(rng.choice([0, 1, 2], p=[0.1, 0.65, 0.25] if narrow else [0.4, 0.45, 0.15]))
    rows, cols = (narrow_shape if narrow else wide_shape)(rng, MOST_BYTES * scale)
    # Of a gradient by parameters: more tokens than features.
    if strided and (narrow or rng.random() < 0.7):
        rows, cols = cols, rows
    inner = min(cols, int(2.0 ** rng.uniform(1, 12)))
    cols = cols // inner * inner if strided == 2 else cols
    which = int(rng.integers(3))

    def calls(view: Operands) -> Calls:
        if strided == 1:  # `rows` columns are summed up
            turned = view(dtype, 0, cols, rows)
            return [lambda: turned.sum(0)]
        if strided == 2:
            images = view(dtype, 0, cols // inner, rows, inner)
            return [lambda: images.sum((0, 2))]
        x = view(dtype, 0, rows, cols)
        return [[lambda: x.sum(-1), lambda: x.mean(-1, keepdim=True), lambda: x.amax(-1)][which]]

    name = op.removeprefix(NARROW)
    return Case(name, name, dtype, {"rows": rows, "cols": cols, "strided": strided}, calls)


def row_norm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """Softmax or a norm over the rows of a matrix, or the norm's gradients."""
    name = op.removeprefix(NARROW)
    rows, cols = (wide_shape if name == op else narrow_shape)(rng, MOST_BYTES * scale)
    which = int(rng.integers(3))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        x, own = view(dtype, 0, rows, cols), view(dtype, rows * cols, cols)
        if name == "softmax":
            return [lambda: torch.softmax(x, -1)]
        if name == "layernorm_gradient":
            return [gradient_call(lambda a, w, b: F.layer_norm(a, (cols,), w, b),
                                  [x, own, own.clone()])]  # fmt: skip
        if which == 0:
            return [lambda: F.rms_norm(x, (cols,), own)]
        return [lambda: F.layer_norm(x, (cols,), own, own)]

    dims = {"rows": rows, "cols": cols} | ({"rms": int(which == 0)} if name == "layernorm" else {})
    dims |= {} if name == "softmax" else {"channels": 0, "channels_last": 0}
    return Case(name, name, dtype, dims, calls)


def batch_norm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A norm of channels, or its gradients.

    With the batch's own statistics (``training``) or with those it keeps.
    """
    while True:
        batch, channels = (int(2.0 ** rng.uniform(low, high)) for low, high in ((0, 8), (3, 11)))
        channels = channels // 8 * 8 if channels > 8 else channels
        side = int(2.0 ** rng.uniform(2, 7.5))
        if 12.0 * batch * channels * side**2 < MOST_BYTES * scale / 2:
            break
    training = bool(rng.random() < 0.35)
    last = bool(rng.random() < 0.25)

    def calls(view: Operands) -> Calls:
        import torch.nn.functional as F

        x = images_of(view, dtype, batch, channels, side, last=last)
        own = view(dtype, x.numel(), 4, channels)

        def forward(a: Any, weight: Any, bias: Any) -> Any:
            return F.batch_norm(a, own[2], own[3], weight, bias, training)

        if op == "batchnorm":
            return [lambda: forward(x, own[0], own[1])]
        return [gradient_call(forward, [x, own[0], own[1]])]

    dims = {"rows": batch * channels, "cols": side**2, "channels": channels,
            "training": int(training), "channels_last": int(last)}  # fmt: skip
    return Case(op, op, dtype, dims, calls)


def map_sizes(rows: int, cols: int, inputs: int, **marks: int) -> dict[str, int]:
    """Dimensions of a map in an operator table.

    Args:
        rows: of the result.
        cols: of the result.
        inputs: operands that are as large.
        marks: of `operator_table.KINDS`; 0 otherwise. The cost of an element, which is not known of
            a program, is 1.
    """
    return {"rows": rows, "cols": cols, "inputs": inputs, "cost": 1, "strided": 0, "broadcast": 0,
            "converts": 0, "kernels": 0, "longest": 0, "function": 0} | marks  # fmt: skip


def _map(dtype: str, rows: int, cols: int, inputs: int, calls: Any, **marks: int) -> Case:
    sizes = map_sizes(rows, cols, inputs, **marks)
    return Case("elementwise", "elementwise", dtype, sizes, calls)
