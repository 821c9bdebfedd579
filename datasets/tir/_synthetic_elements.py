"""Random pooling, norms, reductions and arithmetic on elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.tir._synthetic_dice import (
    ACTIVATIONS,
    BINARY,
    MOST_ELEMENTS,
    UNARY,
    Dice,
    Drawn,
    Function,
    values,
)


def pooling(dice: Dice) -> Drawn:
    while True:
        batch, channels, (height, width) = dice.batch(), dice.features(3, 1024), dice.image(5, 160)
        size = dice.random.choice((2, 2, 3, 3, 5, 7))
        if size <= min(height, width) and batch * channels * height * width <= MOST_ELEMENTS:
            break
    stride, padding = dice.random.choice((1, 2, 2, size)), dice.random.choice((0, size // 2))
    kind = dice.random.choice(("max", "max", "average", "adaptive", "global"))
    activation = UNARY[dice.random.choice(("relu", "scale", "sigmoid", "silu"))]

    def run(x: Tensor) -> Tensor:
        if kind == "max":
            x = F.max_pool2d(x, size, stride, padding)
        elif kind == "average":
            x = F.avg_pool2d(x, size, stride, padding)
        elif kind == "adaptive":
            x = F.adaptive_avg_pool2d(x, (max(1, height // size), max(1, width // size)))
        else:
            x = F.adaptive_avg_pool2d(x, 1)
        return activation(x)

    return Drawn("pooling", run, (values(batch, channels, height, width),), False)


def norm(dice: Dice) -> Drawn:
    kind = dice.random.choice(
        (
            "layer",
            "layer",
            "rms",
            "rms",
            "batch",
            "group",
            "instance",
            "softmax",
            "softmax",
            "log_softmax",
            "unit",
        )
    )
    if kind in ("batch", "group", "instance"):
        while True:
            batch, (height, width) = dice.batch(), dice.image(2, 160)
            groups = dice.random.choice((1, 2, 4, 8, 16, 32))
            channels = groups * max(1, dice.features(4, 1024) // groups)
            if batch * channels * height * width <= MOST_ELEMENTS:
                break
        lines = [values(channels) for _ in range(4)]
        activation = UNARY[dice.random.choice(ACTIVATIONS)]

        def image(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            if kind == "batch":
                return activation(F.batch_norm(x, a, b, c, d))
            if kind == "group":
                return activation(F.group_norm(x, groups, c, d) + (a * b)[:, None, None])
            mean = x.mean((2, 3), keepdim=True)
            spread = ((x - mean) ** 2).mean((2, 3), keepdim=True)
            x = (x - mean) * torch.rsqrt(spread + 1e-5)
            return x * (a * c)[:, None, None] + (b * d)[:, None, None]

        return Drawn(
            kind + "-norm",
            image,
            (values(batch, channels, height, width), *lines),
            kind != "group",
        )
    rank = dice.random.choice((2, 3, 3, 4))
    shape = dice.shape(rank)
    axis = -1 if kind in ("layer", "rms") or dice.chance(0.6) else dice.random.randrange(rank)
    line = values(shape[-1])

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if kind == "layer":
            return F.layer_norm(x, (shape[-1],), a, b, 1e-5)
        if kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * a
        if kind == "unit":
            return x / x.square().sum(axis, keepdim=True).sqrt().clamp(min=1e-6)
        x = x * 0.5 + (a if axis in (-1, rank - 1) else 1.0)
        return x.softmax(axis) if kind == "softmax" else x.log_softmax(axis)

    return Drawn(kind + "-norm", run, (values(*shape), line, line.clone()), kind != "unit")


def reduction(dice: Dice) -> Drawn:
    rank = dice.random.choice((2, 3, 3, 4, 4, 5))
    shape = dice.shape(rank)
    axes = sorted(dice.random.sample(range(rank), dice.random.choice((1, 1, 1, 2, 2, rank - 1))))
    keep = dice.chance(0.5)
    kind = dice.random.choice(
        ("sum", "sum", "sum", "mean", "mean", "amax", "amin", "var", "argmax", "prod")
    )
    before = (
        UNARY[dice.random.choice(("square", "exp", "abs", "scale", "pow2", "relu"))]
        if dice.chance(0.5)
        else None
    )
    product = dice.chance(0.3)
    after = (
        UNARY[dice.random.choice(("rsqrt", "scale", "sqrt", "shift", "tanh"))]
        if dice.chance(0.4)
        else None
    )

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        if before is not None:
            x = before(x)
        if rest:
            x = x * rest[0]
        if kind in ("argmax", "prod"):
            return (
                x.argmax(axes[0], keepdim=keep)
                if kind == "argmax"
                else x.prod(axes[0], keepdim=keep)
            )
        if kind == "var":
            x = x.var(axes, unbiased=False, keepdim=keep)
        else:
            x = getattr(x, kind)(axes, keepdim=keep)
        return x if after is None else after(x)

    other = [values(*shape)] if product else []
    return Drawn("reduction", run, (values(*shape), *other), kind in ("sum", "mean"))


def _narrowed(dice: Dice, shape: Sequence[int]) -> list[int]:
    """A shape that broadcasts to another."""
    kind = dice.random.choice(("full", "full", "last", "any", "any"))
    if kind == "full":
        return list(shape)
    if kind == "last":
        return [shape[-1]]
    return [n if dice.chance(0.5) else 1 for n in shape]


def chain(dice: Dice) -> Drawn:
    """Arithmetic on elements with broadcasts, one to nine steps."""
    shape = dice.shape(dice.random.choice((1, 2, 3, 3, 4, 4, 5)))
    tensors = [values(*shape)]
    steps: list[tuple[Function, int | None]] = []
    for _ in range(dice.between(1, 9)):
        if dice.chance(0.5):
            tensors.append(values(*_narrowed(dice, shape)))
            steps.append((dice.random.choice(BINARY), len(tensors) - 1))
        else:
            steps.append((UNARY[dice.random.choice(list(UNARY))], None))

    def run(*found: Tensor) -> Tensor:
        x = found[0]
        for step, other in steps:
            x = step(x) if other is None else step(x, found[other])
        return x

    return Drawn("chain", run, tuple(tensors), True)
