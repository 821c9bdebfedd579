"""Dice: random sizes as networks have them, and what every kind of random graph is made of."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Most multiplications of a product unless another number is asked for, and most elements of a
#: tensor: a slow schedule of the first runs for a second on a core, the second is 16 MiB.
MOST_PRODUCTS, MOST_ELEMENTS = 6e8, 1 << 22

Function = Callable[..., Any]
OnTensors = Callable[..., Tensor]


class Drawn(NamedTuple):
    """One random graph.

    Attributes:
        kind: of `KINDS`.
        function: of ``inputs``.
        inputs: example tensors.
        trains: whether its gradient is worth taking.
    """

    kind: str
    function: Function
    inputs: tuple[Tensor, ...]
    trains: bool


UNARY: dict[str, OnTensors] = {
    "relu": F.relu, "relu6": F.relu6, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "erf": torch.erf,
    "rsqrt": lambda x: torch.rsqrt(x + 1e-5), "sqrt": torch.sqrt, "log": torch.log,
    "square": lambda x: x * x, "cube": lambda x: x**3, "power": lambda x: x**1.7,
    "pow2": lambda x: x**2, "neg": torch.neg, "abs": torch.abs,
    "leaky": lambda x: F.leaky_relu(x, 0.1), "elu": F.elu, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "softplus": F.softplus, "cos": torch.cos, "sin": torch.sin,
    "scale": lambda x: x * 0.125, "shift": lambda x: x + 1.0, "inverse": lambda x: 1.0 / x,
    "clamp": lambda x: x.clamp(0.0, 6.0),
}  # fmt: skip
#: Chosen for the end of a product or a norm.
ACTIVATIONS = (
    "relu", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "relu6", "hardswish", "leaky",
)  # fmt: skip
BINARY: tuple[OnTensors, ...] = (
    torch.add, torch.add, torch.mul, torch.mul, torch.sub, torch.div, torch.maximum, torch.minimum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.where(b >= 0.5, a, torch.full_like(a, -1e9)),
)  # fmt: skip


class Dice:
    """Random sizes as networks have them.

    Args:
        seed: equal seed, equal graphs.
        most_products: most multiplications of a product.
    """

    def __init__(self, seed: int, most_products: float = MOST_PRODUCTS) -> None:
        self.random = random.Random(seed)
        self.most_products = most_products

    def chance(self, share: float) -> bool:
        """True for a share of the calls."""
        return self.random.random() < share

    def between(self, least: int, most: int) -> int:
        """A whole number whose logarithm is uniform."""
        low, high = math.log(least), math.log(most + 1)
        return min(most, max(least, int(math.exp(self.random.uniform(low, high)))))

    def features(self, least: int = 4, most: int = 2048) -> int:
        """Channels or features: mostly round, one in five any number."""
        size = self.between(least, most)
        if self.chance(0.2):
            return size
        step = self.random.choice((8, 16, 32, 64))
        return max(least, round(size / step) * step) if size >= step else size

    def image(self, least: int = 4, most: int = 160) -> tuple[int, int]:
        """Height and width; half of them square."""
        height = self.between(least, most)
        if self.chance(0.5):
            height = max(least, height // 4 * 4)
        if self.chance(0.6):
            return height, height
        return height, max(least, min(most, int(height * self.random.uniform(0.5, 2.0))))

    def batch(self) -> int:
        """Images or sequences at a time."""
        return self.random.choice((1, 1, 1, 1, 2, 2, 3, 4, 8, 16))

    def shape(self, rank: int, most: float = MOST_ELEMENTS) -> list[int]:
        """Sizes of a tensor whose number of elements has a uniform logarithm from 2,000 on."""
        wanted = self.between(2000, int(most))
        while True:
            cuts = sorted(self.random.random() for _ in range(rank - 1))
            ends = [0.0, *cuts, 1.0]
            parts = [b - a for a, b in itertools.pairwise(ends)]
            shape = [max(1, round(wanted**part)) for part in parts]
            shape = [n if n < 8 or self.chance(0.35) else n // 8 * 8 for n in shape]
            if math.prod(shape) <= most:
                return shape

    def factors(self, size: int) -> tuple[int, int]:
        """Two factors of a size, the first of them any divisor."""
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        first = self.random.choice(divisors)
        return first, size // first


def values(*shape: int) -> Tensor:
    return torch.full(shape, 0.5)


def tail(dice: Dice, shape: Sequence[int], axis: int) -> tuple[OnTensors, list[Tensor]]:
    """What follows a product: bias, batch norm, activation, residual, scale, in that order."""
    steps: list[Function] = []
    extra: list[Tensor] = []
    line = [1] * len(shape)
    line[axis] = shape[axis]
    if dice.chance(0.5):
        extra.append(values(*line))
        steps.append(lambda x, rest: x + rest.pop(0))
    if len(shape) == 4 and dice.chance(0.35):
        extra.extend(values(shape[axis]) for _ in range(4))
        steps.append(lambda x, rest: F.batch_norm(x, *[rest.pop(0) for _ in range(4)]))
    residual_first = dice.chance(0.5)
    for step in ("residual", "activation") if residual_first else ("activation", "residual"):
        if step == "activation" and dice.chance(0.6):
            chosen = UNARY[dice.random.choice(ACTIVATIONS)]
            steps.append(lambda x, rest, f=chosen: f(x))
        elif step == "residual" and dice.chance(0.3):
            extra.append(values(*shape))
            steps.append(lambda x, rest: x + rest.pop(0))
    if dice.chance(0.15):
        extra.append(values(*line))
        steps.append(lambda x, rest: x * rest.pop(0))

    def tail(x: Tensor, *rest: Tensor) -> Tensor:
        left = list(rest)
        for step in steps:
            x = step(x, left)
        return x

    return tail, extra
