"""Convolutions of the sweep inside CUDA graphs: forward, and their gradients by input and weight.

Plain and channels last, with stride, groups, one filter a channel, and as patches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.datasets.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    most_flops,
    width_of,
)

#: FLOP of the largest convolution over those of a product: kernels of few channels reach a tenth of
#: the peak. Assumed.
_CONV_FLOPS = 0.2


def convolution(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A convolution, or its gradient by its input or its weight, as ``op`` says."""
    while True:
        b, size = int(2.0 ** rng.uniform(0, 8)), int(2.0 ** rng.uniform(2, 8))
        cin, cout = (int(2.0 ** rng.uniform(3, 11.3)) for _ in "io")
        if rng.random() < 0.85:
            cin, cout = cin // 8 * 8, cout // 8 * 8
        window = int(rng.choice([1, 3, 5, 7], p=[0.4, 0.4, 0.1, 0.1]))
        stride, padding, groups = int(rng.choice([1, 2], p=[0.75, 0.25])), window // 2, 1
        layout = rng.random()
        if layout < 0.06:  # patches
            window = stride = int(rng.choice([2, 4, 8, 14, 16]))
            padding, cin = 0, int(rng.choice([1, 3, cin]))
        elif layout < 0.22:  # one filter a channel
            cout = groups = cin
            window = int(rng.choice([3, 5, 7]))
            padding = window // 2
        elif layout < 0.32:
            groups = 2 ** int(rng.integers(1, 6))
            cin, cout = (-(-channels // groups) * groups for channels in (cin, cout))
        out = (size + 2 * padding - window) // stride + 1
        if size < window or out < 1:
            continue
        kernel = cin // groups * cout * window**2
        moved = width_of(dtype) * (b * (cin * size**2 + cout * out**2) + kernel)
        flops = 2.0 * b * kernel * out**2
        # What no product of matrix units computes takes as long as in FP32.
        most = most_flops("fp32" if groups > 1 else dtype, scale) * _CONV_FLOPS
        if moved < MOST_BYTES * scale / 4 and flops < most:
            break
    last, bias = bool(rng.random() < 0.5), op == "conv" and bool(rng.random() < 0.3)
    gradient = {"conv_input_gradient": 0, "conv_weight_gradient": 1}.get(op)

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        def image(offset: int, channels: int, extent: int) -> Any:
            if not last:
                return view(dtype, offset, b, channels, extent, extent)
            return view(dtype, offset, b, extent, extent, channels).permute(0, 3, 1, 2)

        x = image(0, cin, size)
        behind = x.numel() + 256
        w = view(dtype, behind, cout, cin // groups, window, window)
        if gradient is None:
            added = view(dtype, behind + w.numel() + 256, cout) if bias else None
            return [lambda: F.conv2d(x, w, added, stride, padding, 1, groups)]
        g = image(behind + w.numel(), cout, out)
        mask = [gradient == 0, gradient == 1, False]
        return [
            lambda: torch.ops.aten.convolution_backward(
                g, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups, mask
            )
        ]

    dims = {"b": b, "cin": cin, "cout": cout, "window": window, "size": size, "stride": stride,
            "padding": padding, "groups": groups, "channels_last": int(last),
            "bias": int(bias)}  # fmt: skip
    return Case(op, op, dtype, dims, calls)
