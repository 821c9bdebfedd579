"""Operators of the sweep inside CUDA graphs as the stages of published networks have them.

Gradients of softmaxes, which a warp takes a row of for short rows and a block for long ones, and
norms of features: batch norms whose images are rows of features, so that few pixels of many
channels lie as channels last (LevIT, heads of contrastive training).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.datasets.sweeps.map_cases import map_sizes
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    gradient_call,
    narrow_shape,
    wide_shape,
)


def softmax_gradient(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """The gradient of a softmax over rows, or of its logarithm: a map of two in a table's words.

    A softmax's multiplies both first, by a kernel of its own (``SoftMax.cu``, torch 2.11).
    """
    rows, cols = (wide_shape if rng.random() < 0.5 else narrow_shape)(rng, MOST_BYTES * scale)
    log = bool(rng.random() < 0.3)

    def calls(view: Operands) -> Calls:
        import torch

        aten: Any = torch.ops.aten
        given, made = (view(dtype, at * (rows * cols + 256), rows, cols) for at in range(2))
        if log:
            return [lambda: aten._log_softmax_backward_data(given, made, -1, made.dtype)]
        return [lambda: aten._softmax_backward_data(given, made, -1, made.dtype)]

    name = "log_softmax_backward" if log else "softmax_backward"
    sizes = map_sizes(rows, cols, 2, function=MAP_FUNCTIONS[name])
    return Case(name, "elementwise", dtype, sizes, calls)


def feature_norm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A batch norm of rows of features, or its gradients."""
    name = op.replace("feature_norm", "batchnorm")
    while True:
        rows, channels = (int(2.0 ** rng.uniform(low, high)) for low, high in ((4, 17), (4, 12)))
        channels = channels // 8 * 8
        if 12.0 * rows * channels < MOST_BYTES * scale / 2:
            break
    training = bool(rng.random() < 0.6)

    def calls(view: Operands) -> Calls:
        import torch.nn.functional as F

        x, own = view(dtype, 0, rows, channels), view(dtype, rows * channels, 4, channels)

        def forward(a: Any, weight: Any, bias: Any) -> Any:
            return F.batch_norm(a, own[2], own[3], weight, bias, training)

        if name == "batchnorm":
            return [lambda: forward(x, own[0], own[1])]
        return [gradient_call(forward, [x, own[0], own[1]])]

    dims = {"rows": rows * channels, "cols": 1, "channels": channels,
            "training": int(training), "channels_last": 1}  # fmt: skip
    return Case(name, name, dtype, dims, calls)
