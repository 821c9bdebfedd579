"""Pools of the sweep inside CUDA graphs, over windows of images, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    gradient_call,
    images_of,
)


def pool(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """The largest value of each window, or its mean, or the gradient of either."""
    while True:
        batch, channels = (int(2.0 ** rng.uniform(low, high)) for low, high in ((0, 8), (3, 10)))
        channels = channels // 8 * 8
        side = int(2.0 ** rng.uniform(2.5, 8))
        if 12.0 * batch * channels * side**2 < MOST_BYTES * scale / 2:
            break
    window = int(rng.choice([2, 3, 4, 5, 7], p=[0.35, 0.4, 0.05, 0.1, 0.1]))
    stride = int(rng.choice([1, 2, window], p=[0.15, 0.6, 0.25]))
    padding = window // 2 if rng.random() < 0.6 else 0
    average, last = bool(rng.random() < 0.3), bool(rng.random() < 0.25)
    window = min(window, side)
    padding = min(padding, window // 2)
    out = (side + 2 * padding - window) // stride + 1

    def calls(view: Operands) -> Calls:
        import torch.nn.functional as F

        x = images_of(view, dtype, batch, channels, side, last=last)

        def forward(a: Any) -> Any:
            kind = F.avg_pool2d if average else F.max_pool2d
            return kind(a, window, stride, padding)

        return [gradient_call(forward, [x])] if op == "pool_gradient" else [lambda: forward(x)]

    outputs = batch * channels * out**2
    # Elements of an image for each output, as programs have it.
    size = max(1, round(batch * channels * side**2 / outputs))
    dims = {"rows": outputs, "cols": size, "window": window, "channels_last": int(last),
            "average": int(average), "side": 0}  # fmt: skip
    return Case(op, op, dtype, dims, calls)
