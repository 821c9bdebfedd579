"""Random convolutions and products with what follows them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.tir._synthetic_dice import (
    ACTIVATIONS,
    MOST_ELEMENTS,
    UNARY,
    Dice,
    Drawn,
    tail,
    values,
)


def convolution(dice: Dice) -> Drawn:
    while True:
        kind = dice.random.choice(
            (
                "plain",
                "plain",
                "plain",
                "depthwise",
                "depthwise",
                "grouped",
                "point",
                "point",
                "patch",
            )
        )
        batch, (height, width) = dice.batch(), dice.image()
        inputs, outputs, groups = dice.features(3, 768), dice.features(4, 768), 1
        size = (dice.random.choice((1, 2, 3, 3, 3, 3, 5, 5, 7)),) * 2
        if dice.chance(0.1):
            size = (size[0], dice.random.choice((1, 3, 5, 7)))
        stride = dice.random.choice((1, 1, 1, 2, 2, 3))
        padding = dice.random.choice((0, size[0] // 2, size[0] // 2, 1))
        spread = 2 if dice.chance(0.08) else 1
        if kind == "depthwise":
            outputs = groups = inputs
            if dice.chance(0.15):
                outputs *= 2
        elif kind == "grouped":
            groups = dice.random.choice((2, 4, 8, 16, 32))
            inputs, outputs = groups * max(1, inputs // groups), groups * max(1, outputs // groups)
        elif kind == "point":
            size, padding, spread = (1, 1), 0, 1
        elif kind == "patch":
            stride = dice.random.choice((2, 4, 7, 8, 14, 16))
            size, padding, spread = (stride, stride), 0, 1
            height, width = stride * max(1, height // 4), stride * max(1, width // 4)
            inputs = dice.random.choice((1, 3, 3, 4, inputs))
        out = [
            (n + 2 * padding - spread * (k - 1) - 1) // stride + 1
            for n, k in zip((height, width), size, strict=True)
        ]
        if min(out) < 1:
            continue
        elements = max(batch * inputs * height * width, batch * outputs * math.prod(out))
        products = batch * outputs * math.prod(out) * inputs // groups * math.prod(size)
        if elements <= MOST_ELEMENTS and products <= dice.most_products:
            break
    end, extra = tail(dice, (batch, outputs, *out), 1)

    def run(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        return end(F.conv2d(x, w, None, stride, padding, spread, groups), *rest)

    tensors = (
        values(batch, inputs, height, width),
        values(outputs, inputs // groups, *size),
        *extra,
    )
    return Drawn("convolution", run, tensors, groups in (1, inputs))


def line_convolution(dice: Dice) -> Drawn:
    while True:
        batch, inputs, outputs, length = (
            dice.batch(),
            dice.features(1, 512),
            dice.features(4, 512),
            dice.between(16, 8000),
        )
        size, stride = dice.random.choice((1, 3, 3, 5, 7, 9, 15)), dice.random.choice((1, 1, 2, 4))
        groups = inputs if dice.chance(0.3) else 1
        outputs = inputs if groups > 1 else outputs
        products = batch * outputs * (length // stride + 1) * inputs // groups * size
        if (
            products <= dice.most_products
            and batch * max(inputs, outputs) * length <= MOST_ELEMENTS
        ):
            break
    activation = UNARY[dice.random.choice(ACTIVATIONS)]
    return Drawn(
        "convolution-1d",
        lambda x, w, b: activation(F.conv1d(x, w, b, stride, size // 2, 1, groups)),
        (
            values(batch, inputs, length),
            values(outputs, inputs // groups, size),
            values(outputs),
        ),
        False,
    )


def upward(dice: Dice) -> Drawn:
    """Transposed convolutions and upsampling."""
    while True:
        batch, (height, width) = dice.batch(), dice.image(3, 64)
        inputs, outputs = dice.features(4, 384), dice.features(3, 384)
        size, stride = dice.random.choice(((2, 2), (3, 2), (4, 2), (3, 1), (4, 4)))
        products = batch * inputs * outputs * height * width * size * size
        if (
            products <= dice.most_products
            and batch * max(inputs, outputs) * height * width * stride * stride <= MOST_ELEMENTS
        ):
            break
    if dice.chance(0.5):
        padding = (size - stride) // 2
        return Drawn(
            "upward", lambda x, w, b: F.relu(F.conv_transpose2d(x, w, b, stride, padding)),
            (
                values(batch, inputs, height, width), values(inputs, outputs, size, size),
                values(outputs),
            ), False,
        )  # fmt: skip
    mode = dice.random.choice(("nearest", "nearest", "bilinear"))
    options = {"align_corners": False} if mode == "bilinear" else {}
    factor = dice.random.choice((2, 2, 2, 3, 4))
    keep = min(inputs, max(1, MOST_ELEMENTS // (batch * height * width * factor * factor)))
    other = values(batch, keep, height * factor, width * factor)
    joined = dice.chance(0.4)

    def grow(x: Tensor, y: Tensor) -> Tensor:
        found = F.interpolate(x, scale_factor=factor, mode=mode, **options)
        return torch.cat([found, y], 1) if joined else found + y

    return Drawn("upward", grow, (values(batch, keep, height, width), other), False)


def linear(dice: Dice) -> Drawn:
    while True:
        rows, inputs, outputs = (
            dice.between(1, 2048),
            dice.features(8, 4096),
            dice.features(2, 8192),
        )
        if (
            rows * inputs * outputs <= dice.most_products
            and max(rows * inputs, inputs * outputs, rows * outputs) <= 4 * MOST_ELEMENTS
        ):
            break
    batch = dice.batch()
    lead = [batch, max(1, rows // batch)] if dice.chance(0.7) else [rows]
    end, extra = tail(dice, (*lead, outputs), -1)
    if dice.chance(0.12):  # gated
        return Drawn(
            "linear", lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v),
            (values(*lead, inputs), values(outputs, inputs), values(outputs, inputs)), True,
        )  # fmt: skip
    return Drawn(
        "linear", lambda x, w, *rest: end(F.linear(x, w), *rest),
        (values(*lead, inputs), values(outputs, inputs), *extra), True,
    )  # fmt: skip


def product(dice: Dice) -> Drawn:
    """Batched products: attention's two, any side transposed, and broadcast ones."""
    while True:
        batch, heads = dice.batch(), dice.random.choice((1, 2, 3, 4, 6, 8, 12, 16, 32))
        rows, inner, columns = dice.between(1, 784), dice.features(4, 784), dice.between(1, 784)
        products = batch * heads * rows * inner * columns
        if (
            products <= dice.most_products
            and batch * heads * max(rows * inner, inner * columns, rows * columns) <= MOST_ELEMENTS
        ):
            break
    lead = [batch, heads] if dice.chance(0.6) else [batch * heads]
    right = lead if dice.chance(0.8) else [1] * len(lead)
    turned = dice.chance(0.5)
    other = values(*right, columns, inner) if turned else values(*right, inner, columns)
    end = dice.random.choice(("none", "scale", "mask", "softmax", "merge"))
    shape = [*lead, rows, columns]

    def run(x: Tensor, y: Tensor, *rest: Tensor) -> Tensor:
        found = x @ (y.transpose(-1, -2) if turned else y)
        if end == "scale":
            found = found * 0.125
        elif end in ("mask", "softmax"):
            found = found / 8.0 + rest[0]
            found = found.softmax(-1) if end == "softmax" else found
        elif end == "merge" and len(shape) == 4:
            found = found.transpose(1, 2).reshape(shape[0], rows, -1)
        return found

    mask = [values(*[1] * len(lead), rows, columns)] if end in ("mask", "softmax") else []
    return Drawn("product", run, (values(*lead, rows, inner), other, *mask), True)


def excite(dice: Dice) -> Drawn:
    """Squeeze and excite, and scales of layers."""
    batch, channels, (height, width) = dice.batch(), dice.features(8, 1024), dice.image(4, 96)
    channels = max(8, min(channels, MOST_ELEMENTS // (batch * height * width)))
    less = max(1, channels // dice.random.choice((4, 8, 16)))

    def run(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        gate = torch.sigmoid(F.linear(F.relu(F.linear(x.mean((2, 3)), w)), v))
        return x * gate[:, :, None, None]

    return Drawn(
        "excite",
        run,
        (values(batch, channels, height, width), values(less, channels), values(channels, less)),
        True,
    )
