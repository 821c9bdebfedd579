"""Convolutions of the sweep inside CUDA graphs: forward, and their gradients by input and weight.

Plain and channels last, with stride, groups, one filter a channel, and as patches; or without
groups, of as many filters as channels within a factor of six; or of groups alone, as published
networks of images have them: up to 128 channels a group (ResNeXt 4 to 64, RegNet 8 to 264), one
filter a channel with windows of 3 and 5 (MobileNet, EfficientNet) or 7 (ConvNeXt), grouped 1 x 1
(ShuffleNet); or along a line, as networks of sound have them; or of the sizes that stages of such
networks share: images of 7 to 256 pixels, channels in steps of 8 and 16, bottlenecks and stems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from foreplan.datasets.sweeps.operator_case import (
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
#: Channels of the widest image.
_MOST_CHANNELS = 4096
#: Sides of images in stages, and images of a batch.
_SIDES = (
    7,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
)
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)

#: Before the name of an operator: one of groups alone, or without any as stages of networks of
#: images have them, or along a line, or of the usual sizes of stages.
GROUPED, IMAGES, SOUND, STAGED = "grouped_", "image_", "sound_", "stage_"


class _Shape(NamedTuple):
    """Sizes of a convolution; images and windows are square, or (``line``) of one dimension."""

    b: int
    cin: int
    cout: int
    window: int
    size: int
    stride: int
    padding: int
    groups: int
    line: int = 0


def convolution(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A convolution, or its gradient by its input or its weight, as ``op`` says."""
    first = next((word for word in _SHAPES if word and op.startswith(word)), "")
    name = op.removeprefix(first)
    while True:
        shape = _SHAPES[first](rng)
        b, cin, cout, window, size, stride, padding, groups, line = shape
        rank = 2 - line
        out = (size + 2 * padding - window) // stride + 1
        if size < window or out < 1 or max(cin, cout) > _MOST_CHANNELS:
            continue
        kernel = cin // groups * cout * window**rank
        moved = width_of(dtype) * (b * (cin * size**rank + cout * out**rank) + kernel)
        flops = 2.0 * b * kernel * out**rank
        # What no product of matrix units computes takes as long as in FP32.
        most = most_flops("fp32" if groups > 1 else dtype, scale) * _CONV_FLOPS
        if moved < MOST_BYTES * scale / 4 and flops < most:
            break
    last, bias = bool(rng.random() < 0.5), name == "conv" and bool(rng.random() < 0.3)
    gradient = {"conv_input_gradient": 0, "conv_weight_gradient": 1}.get(name)

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        def image(offset: int, channels: int, extent: int) -> Any:
            if not last:
                return view(dtype, offset, b, channels, *[extent] * rank)
            return view(dtype, offset, b, *[extent] * rank, channels).movedim(-1, 1)

        x = image(0, cin, size)
        behind = x.numel() + 256
        w = view(dtype, behind, cout, cin // groups, *[window] * rank)
        if gradient is None:
            added = view(dtype, behind + w.numel() + 256, cout) if bias else None
            call: Any = F.conv1d if line else F.conv2d
            return [lambda: call(x, w, added, stride, padding, 1, groups)]
        g = image(behind + w.numel(), cout, out)
        mask = [gradient == 0, gradient == 1, False]
        return [
            lambda: torch.ops.aten.convolution_backward(
                g,
                x,
                w,
                None,
                [stride] * rank,
                [padding] * rank,
                [1] * rank,
                False,
                [0] * rank,
                groups,
                mask,
            )
        ]

    dims = {**shape._asdict(), "channels_last": int(last), "bias": int(bias)}
    return Case(name, name, dtype, dims, calls)


def _any_shape(rng: np.random.Generator) -> _Shape:
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
    return _Shape(b, cin, cout, window, size, stride, padding, groups)


def _grouped_shape(rng: np.random.Generator) -> _Shape:
    b, size = int(2.0 ** rng.uniform(0, 7)), int(2.0 ** rng.uniform(2, 7))
    stride = int(rng.choice([1, 2], p=[0.75, 0.25]))
    if rng.random() < 0.3:  # one filter a channel
        width, groups = 1, int(2.0 ** rng.uniform(3, 12))
        groups = groups // 8 * 8 if rng.random() < 0.85 else groups
        window = int(rng.choice([3, 5, 7], p=[0.5, 0.25, 0.25]))
    else:
        # Powers of two from 2 to 128, or any multiple of eight.
        exponent, eighths = int(rng.integers(1, 8)), int(rng.integers(1, 17))
        width = 2**exponent if rng.random() < 0.5 else 8 * eighths
        groups = int(2.0 ** rng.uniform(1, 6.5))
        window = int(rng.choice([1, 3, 5, 7], p=[0.2, 0.65, 0.1, 0.05]))
    cin = cout = width * groups
    if rng.random() < 0.15:  # more or fewer filters than channels
        if width == 1 or rng.random() < 0.5:
            cout *= 2
        else:
            cin *= 2
    return _Shape(b, cin, cout, window, size, stride, window // 2, groups)


def _image_shape(rng: np.random.Generator) -> _Shape:
    b, size = int(2.0 ** rng.uniform(0, 7.01)), int(2.0 ** rng.uniform(2.81, 7.81))
    cin = int(2.0 ** rng.uniform(1.6, 11.01))
    # A bottleneck, a stage's first, or one behind its like.
    cout = cin if rng.random() < 0.3 else int(cin * 2.0 ** rng.uniform(-2.6, 2.6))
    unit = int(rng.choice([32, 8, 1], p=[0.4, 0.4, 0.2]))
    cin, cout = (max(unit, channels // unit * unit) for channels in (cin, cout))
    window = int(rng.choice([1, 3, 5, 7], p=[0.4, 0.44, 0.08, 0.08]))
    stride = int(rng.choice([1, 2], p=[0.7, 0.3]))
    padding = window // 2 if rng.random() < 0.9 else 0
    if rng.random() < 0.08:  # of colours
        cin = int(rng.choice([1, 3, 4]))
    return _Shape(b, cin, cout, window, size, stride, padding, 1)


def _staged_shape(rng: np.random.Generator) -> _Shape:
    b, size = int(rng.choice(_BATCHES)), int(rng.choice(_SIDES))
    unit = int(rng.choice([8, 16, 64], p=[0.3, 0.4, 0.3]))
    cin, cout = (max(1, round(2.0 ** rng.uniform(4, 11) / unit)) * unit for _ in "io")
    role, groups, stride = rng.random(), 1, int(rng.choice([1, 2], p=[0.75, 0.25]))
    # The larger of two draws is timed, by the product of its sizes, groups among them.
    if role < 0.55:  # a bottleneck's, or an expansion
        window, cout = 1, int(rng.choice([cout, cin, cin // 4, 4 * cin, 6 * cin]))
        stride = 1 if rng.random() < 0.8 else stride
    elif role < 0.82:
        window, cout = 3, int(rng.choice([cout, cin, cin, 2 * cin]))
    elif role < 0.92:  # one filter a channel
        window, cout, groups = int(rng.choice([3, 5, 7], p=[0.5, 0.2, 0.3])), cin, cin
    else:  # a stem, or patches
        window, cin = int(rng.choice([2, 3, 4, 7, 8, 14, 16])), 3 if rng.random() < 0.7 else cin
        size = int(rng.choice([192, 224, 256, 288, 384])) if cin == 3 else size
        stride = window if window % 2 == 0 else 2
    padding = 0 if window % 2 == 0 else window // 2
    return _Shape(b, cin, max(8, cout), window, size, stride, padding, groups)


def _sound_shape(rng: np.random.Generator) -> _Shape:
    b, size = int(2.0 ** rng.uniform(0, 6.01)), int(2.0 ** rng.uniform(6, 18))
    cin, cout = (int(2.0 ** rng.uniform(3, 11.01)) for _ in "io")
    if rng.random() < 0.85:
        cin, cout = cin // 8 * 8, cout // 8 * 8
    cout = cin if rng.random() < 0.4 else cout
    window, stride, groups = int(rng.integers(1, 11)), int(rng.integers(1, 6)), 1
    layout = rng.random()
    if layout < 0.15:  # of samples
        cin = int(rng.choice([1, 2]))
    elif layout < 0.35:  # over positions, groups of channels or each by itself
        window, stride = int(2.0 ** rng.uniform(1.6, 7.01)), 1
        groups = cin if rng.random() < 0.5 else 2 ** int(rng.integers(1, 6))
        cin = cout = -(-cin // groups) * groups
    elif layout < 0.65:
        stride = 1
    padding = window // 2 if rng.random() < 0.6 else 0
    return _Shape(b, cin, cout, window, size, stride, padding, groups, 1)


_SHAPES: Mapping[str, Callable[[np.random.Generator], _Shape]] = MappingProxyType(
    {
        "": _any_shape,
        GROUPED: _grouped_shape,
        IMAGES: _image_shape,
        SOUND: _sound_shape,
        STAGED: _staged_shape,
    }
)
