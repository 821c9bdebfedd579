"""Random changes of layout, look-ups, masks, heads of attention and windows of images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.tir._synthetic_dice import (
    MOST_ELEMENTS,
    UNARY,
    Dice,
    Drawn,
    Function,
    values,
)


def layout(dice: Dice) -> Drawn:
    """One to five changes of layout, some with arithmetic between."""
    shape = dice.shape(dice.random.choice((2, 3, 3, 4, 4, 5)))
    start, steps = list(shape), []
    for _ in range(dice.random.choice((1, 1, 2, 2, 3, 4, 5))):
        step, shape = _layout_step(dice, shape)
        steps.append(step)
        if math.prod(shape) > MOST_ELEMENTS:
            steps.pop()
            break
    if not steps:
        steps = [lambda x: x.transpose(0, -1).contiguous()]

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return Drawn("layout", run, (values(*start),), False)


def _layout_step(dice: Dice, shape: list[int]) -> tuple[Function, list[int]]:
    rank = len(shape)
    axis = dice.random.randrange(rank)
    size = shape[axis]
    kind = dice.random.choice(
        ("permute", "permute", "permute", "split", "split", "join", "regroup", "slice", "slice",
         "cat", "pad", "pad", "roll", "expand", "repeat", "flip", "stride", "unary", "halves")
    )  # fmt: skip
    if kind == "permute" and rank > 1:
        order = list(range(rank))
        while order == sorted(order):
            dice.random.shuffle(order)
        return (lambda x: x.permute(order).contiguous()), [shape[n] for n in order]
    if kind == "split" and rank < 6:
        parts = dice.factors(size)
        split = [*shape[:axis], *parts, *shape[axis + 1 :]]
        return (lambda x: x.reshape(split)), split
    if kind == "join" and rank > 1:
        axis = min(axis, rank - 2)
        joined = [*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]]
        return (lambda x: x.reshape(joined)), joined
    if kind == "regroup" and rank > 1:
        first, second = dice.factors(math.prod(shape))
        return (lambda x: x.reshape(first, second) * 1.5), [first, second]
    if kind == "slice" and size > 2:
        start = dice.random.randrange(size // 2)
        stop = dice.random.randrange(start + 1, size + 1)
        return (lambda x: x.narrow(axis, start, stop - start).contiguous()), [
            *shape[:axis],
            stop - start,
            *shape[axis + 1 :],
        ]
    if kind == "stride" and size > 3:
        pace = dice.random.choice((2, 2, 3))
        index = tuple([slice(None)] * axis + [slice(0, None, pace)])
        return (lambda x: x[index].contiguous()), [
            *shape[:axis],
            -(-size // pace),
            *shape[axis + 1 :],
        ]
    if kind == "cat":
        return (lambda x: torch.cat([x, x * 2.0], axis)), [
            *shape[:axis],
            2 * size,
            *shape[axis + 1 :],
        ]
    if kind == "pad" and rank <= 5:
        before, after = dice.random.choice(((1, 1), (0, 1), (2, 2), (3, 3), (0, 5)))
        amounts = [0, 0] * (rank - 1 - axis) + [before, after]
        if axis == rank - 1 and rank >= 3 and dice.chance(0.6):  # both of an image
            amounts = [before, after, before, after]
            padded = [*shape[:-2], shape[-2] + before + after, shape[-1] + before + after]
            return (lambda x: F.pad(x, amounts)), padded
        return (lambda x: F.pad(x, amounts)), [
            *shape[:axis],
            size + before + after,
            *shape[axis + 1 :],
        ]
    if kind == "roll" and size > 1:
        shift = dice.random.randrange(1, size)
        return (lambda x: torch.roll(x, shift, axis)), shape
    if kind == "expand" and rank < 6:
        times = dice.random.choice((2, 3, 4, 8))
        wide = [*shape[:axis], times, *shape[axis:]]
        return (lambda x: x.unsqueeze(axis).expand(wide).contiguous()), wide
    if kind == "repeat":
        return (lambda x: x.repeat_interleave(2, axis)), [
            *shape[:axis],
            2 * size,
            *shape[axis + 1 :],
        ]
    if kind == "flip":
        return (lambda x: x.flip(axis)), shape
    if kind == "halves" and size % 2 == 0:

        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, axis)
            return torch.cat([-b, a], axis)

        return rotate, shape
    unary = UNARY[dice.random.choice(list(UNARY))]
    return (lambda x: unary(x)), shape


def lookup(dice: Dice) -> Drawn:
    rows, features, count = dice.between(8, 40000), dice.features(4, 2048), dice.between(1, 2048)
    rows = max(1, min(rows, 4 * MOST_ELEMENTS // features))
    count = max(1, min(count, MOST_ELEMENTS // features))
    batch = dice.batch()
    shape = [batch, max(1, count // batch)] if dice.chance(0.7) else [count]
    index = torch.zeros(*shape, dtype=torch.int64)
    table = values(rows, features)
    kind = dice.random.choice(("plain", "positions", "scaled", "select", "columns"))
    if kind == "positions":
        length = max(shape[-1], 2)
        return Drawn(
            "lookup", lambda i, t, p: F.embedding(i, t) + F.embedding(torch.arange(shape[-1]), p),
            (index, table, values(length, features)), False,
        )  # fmt: skip
    if kind == "columns":
        axis = dice.random.choice((0, 1))
        size = (rows, features)[axis]
        line = torch.zeros(max(1, min(count, size)), dtype=torch.int64)
        return Drawn("lookup", lambda i, t: t.index_select(axis, i), (line, table), False)
    functions: dict[str, Function] = {
        "plain": lambda i, t: F.embedding(i, t),
        "scaled": lambda i, t: F.embedding(i, t) * math.sqrt(features),
        "select": lambda i, t: t[i.reshape(-1)],
    }
    return Drawn("lookup", functions[kind], (index, table), False)


def mask(dice: Dice) -> Drawn:
    """Masks from positions: causal, window, padding, with where or addition."""
    batch, heads = dice.batch(), dice.random.choice((1, 2, 4, 8, 12))
    rows = dice.between(4, 512)
    columns = rows if dice.chance(0.7) else dice.between(4, 512)
    heads = max(1, min(heads, MOST_ELEMENTS // (batch * rows * columns)))
    window = dice.between(1, rows)
    kind = dice.random.choice(("causal", "window", "padding", "both"))

    def run(scores: Tensor, valid: Tensor) -> Tensor:
        row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
        seen = column <= row
        if kind == "window":
            seen = seen & (column > row - window)
        elif kind == "padding":
            seen = (valid != 0)[:, None, None, :].expand(batch, 1, rows, columns)
        elif kind == "both":
            seen = seen[None, None] & (valid != 0)[:, None, None, :]
        return torch.where(seen, scores, torch.full((), -1e9))

    valid = torch.zeros(batch, columns, dtype=torch.int64)
    return Drawn("mask", run, (values(batch, heads, rows, columns), valid), False)


def heads(dice: Dice) -> Drawn:
    """Features to heads, with bias, scale, norm or rotation on the way, and back."""
    batch, tokens = dice.batch(), dice.between(1, 784)
    heads, size = (
        dice.random.choice((1, 2, 3, 4, 6, 8, 12, 16)),
        dice.random.choice((16, 24, 32, 40, 48, 64, 64, 80, 96, 128)),
    )
    tokens = max(1, min(tokens, MOST_ELEMENTS // (batch * heads * size)))
    kind = dice.random.choice(
        ("plain", "bias", "scale", "rotate", "norm", "back", "three", "repeat")
    )
    flat = heads * size
    angles = [values(tokens, size), values(tokens, size)] if kind == "rotate" else []

    def run(x: Tensor, *rest: Tensor) -> Any:
        if kind == "three":
            q, k, v = x.repeat(1, 1, 3).chunk(3, -1)
            return tuple(
                t.reshape(batch, tokens, heads, size).transpose(1, 2).contiguous()
                for t in (q, k * 0.5, v)
            )
        if kind == "back":
            return (
                x.reshape(batch, heads, tokens, size).transpose(1, 2).reshape(batch, tokens, flat)
                * 1.0001
            )
        if kind == "bias":
            x = x + rest[0]
        x = x.reshape(batch, tokens, heads, size)
        if kind == "norm":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x.transpose(1, 2)
        if kind == "scale":
            x = x * 0.125
        if kind == "rotate":
            a, b = x.chunk(2, -1)
            x = x * rest[0] + torch.cat([-b, a], -1) * rest[1]
        if kind == "repeat":
            return (
                x[:, :, None]
                .expand(batch, heads, 2, tokens, size)
                .reshape(batch, 2 * heads, tokens, size)
            )
        return x.contiguous()

    extra = [values(flat)] if kind == "bias" else angles
    return Drawn(
        "heads", run, (values(batch, tokens, flat), *extra), kind in ("bias", "rotate", "norm")
    )


def windows(dice: Dice) -> Drawn:
    """Images cut into windows or patches, and shuffled between space and channels."""
    batch, window = dice.batch(), dice.random.choice((2, 4, 7, 7, 8))
    down, along = dice.between(1, 8), dice.between(1, 8)
    channels = dice.random.choice((1, 2, 4)) * dice.features(4, 256)
    height, width = down * window, along * window
    channels = max(4, min(channels, MOST_ELEMENTS // (batch * height * width)) // 4 * 4)
    kind = dice.random.choice(("cut", "join", "shuffle", "merge", "groups", "tokens"))
    back = dice.chance(0.3)

    def run(x: Tensor) -> Tensor:
        if kind == "cut":
            x = x.reshape(batch, channels, down, window, along, window).permute(0, 2, 4, 3, 5, 1)
            return x.reshape(-1, window * window, channels) * 1.0001
        if kind == "join":
            x = x.reshape(batch, down, along, window, window, channels).permute(0, 1, 3, 2, 4, 5)
            return x.reshape(batch, height, width, channels) + 1.0
        if kind == "shuffle":
            return F.pixel_shuffle(x, 2)
        if kind == "groups":
            return (
                x.reshape(batch, 2, channels // 2, height, width)
                .transpose(1, 2)
                .reshape(batch, channels, height, width)
                * 2.0
            )
        if kind == "tokens":
            x = x.flatten(2).transpose(1, 2)
            return (
                x.transpose(1, 2).reshape(batch, channels, height, width) * 2.0
                if back
                else x.contiguous()
            )
        x = x.permute(0, 2, 3, 1)
        return (
            torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
            if height % 2 == width % 2 == 0
            else x.contiguous()
        )

    return Drawn("windows", run, (values(batch, channels, height, width),), False)
