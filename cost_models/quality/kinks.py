"""Kinks: where a small error changes which way a gradient goes.

A rectifier passes a gradient on or not, a max pool passes it on to one of several inputs. An error
of deviation ``s`` in an input at distance ``r`` from the kink crosses it with probability
``Phi(-r / s)``, and then the gradient differs by as much as it is large, however small the error
was. So the expected squared difference grows with ``s``, not with ``s^2``, and outweighs the first
order of an expansion the more, the smaller errors are::

    F(s) = sum_j c_j Phi(-r_j / s)     c_j = (gradient that jumps at j)^2 x (its effect at j)

(derivation: the error of an input is a sum of many rounding errors, hence about normal). Smooth
activations have no such term. Imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from foreplan.cost_models.schedule import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

#: Deviations at which ``F`` is computed; between them it is interpolated (choice: 4 a decade).
_GRID = np.logspace(-9, 2, 45)


@dataclass(slots=True)
class Kink:
    """One call of a function with a kink.

    Attributes:
        input: as it was handed over, to tell whose result it is.
        x: the input, as a node of the graph of its own.
        out: the result.
        jump: share of the gradient that comes or goes; 1 of a ReLU, less of a leaky one.
        second: of a max pool the second largest of each window, flat index in its image.
        first: likewise the largest; ``None`` of a rectifier.
    """

    input: Tensor
    x: Tensor
    out: Tensor
    jump: float
    first: Tensor | None = None
    second: Tensor | None = None

    def curve(self, gradient: Tensor, effect: Tensor) -> FloatArray:
        """``F`` at the deviations of the grid.

        Args:
            gradient: of the result.
            effect: on all gradients, squared, of an error in the gradient of the input.
        """
        x, g = self.x.detach(), gradient.detach().square() * self.jump**2
        if self.first is None or self.second is None:
            distance, cost = x.abs(), g * effect
        else:
            flat, marks = x.flatten(-2), effect.flatten(-2)
            one, two = self.first.flatten(-2), self.second.flatten(-2)
            gap = flat.gather(-1, one) - flat.gather(-1, two)
            # The difference of two inputs has twice the variance; what one loses the other gains.
            distance = torch.where(one == two, math.inf, gap / math.sqrt(2))
            cost = g.flatten(-2) * (marks.gather(-1, one) + marks.gather(-1, two))
        distance, cost = distance.flatten(), cost.flatten()
        held = cost > 0
        distance, cost = distance[held].double(), cost[held].double()
        return np.array(
            [float((cost * torch.special.ndtr(-distance / float(s))).sum()) for s in _GRID]
        )


def crossing(curve: FloatArray, variance: float) -> float:
    """``F`` at a variance of the input's error."""
    if variance <= 0:
        return 0.0
    return float(np.interp(0.5 * math.log(variance), np.log(_GRID), curve))


class KinkRecorder(TorchFunctionMode):
    """Records ReLU, leaky ReLU and two-dimensional max pooling while it is active.

    Attributes:
        found: the calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kink] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _RECTIFIERS and args and args[0].requires_grad:
            # In place, the input would be gone.
            slope = float(named.get("negative_slope", args[1] if len(args) > 1 else 0.01))
            given = args[0]
            x = given.view_as(given)
            leaky = func in _LEAKY
            out = F.leaky_relu(x, slope) if leaky else torch.relu(x)
            self.found.append(Kink(given, x, out, 1 - slope if leaky else 1.0))
            return out
        if func in _POOLS and args and args[0].requires_grad:
            return self._pool(func, args, named)
        return func(*args, **named)

    def _pool(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = args[0]
        x = given.view_as(given)
        made = func(x, *args[1:], **named)
        out = made[0] if isinstance(made, tuple) else made
        words = ("kernel_size", "stride", "padding", "dilation")
        said = dict(zip(words, args[1:], strict=False)) | named
        kernel = _pair(said["kernel_size"])
        if math.prod(kernel) > 1:
            stride = _pair(said.get("stride") or kernel)
            padding, dilation = _pair(said.get("padding", 0)), _pair(said.get("dilation", 1))
            largest = _two_largest(x.detach(), out.shape, kernel, stride, padding, dilation)
            self.found.append(Kink(given, x, out, 1.0, *largest))
        return made


Pair = tuple[int, int]


def _two_largest(
    x: Tensor, out: torch.Size, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """Flat places in ``x[..., H, W]`` of the largest and the second largest of each window."""
    rows, columns = x.shape[-2:]
    spans = [(n - 1) * s + d * (k - 1) + 1
             for n, s, d, k in zip(out[-2:], stride, dilation, kernel, strict=True)]  # fmt: skip
    behind = [max(0, span - size - p)
              for span, size, p in zip(spans, (rows, columns), padding, strict=True)]  # fmt: skip
    sides = (padding[1], behind[1], padding[0], behind[0])
    padded = F.pad(x.reshape(-1, 1, rows, columns), sides, value=-math.inf)
    padded = padded[..., : spans[0], : spans[1]]
    windows = F.unfold(padded, kernel, dilation=dilation, stride=stride)
    best = windows.topk(2, dim=1).indices
    window = torch.arange(windows.shape[-1], device=x.device)
    row = (window // out[-1]) * stride[0] - padding[0] + (best // kernel[1]) * dilation[0]
    column = (window % out[-1]) * stride[1] - padding[1] + (best % kernel[1]) * dilation[1]
    # Where a window holds one number alone, the second is padding.
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    places = torch.where(inside, row * columns + column, best.new_full((), -1))
    first, second = places[:, 0].reshape(out), places[:, 1].reshape(out)
    return first, torch.where(second < 0, first, second)


def _pair(value: Any) -> Pair:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second


_LEAKY = frozenset({F.leaky_relu, F.leaky_relu_})
_RECTIFIERS = frozenset({F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu,
                         torch.Tensor.relu_}) | _LEAKY  # fmt: skip
_POOLS = frozenset({F.max_pool2d, F.max_pool2d_with_indices, torch.max_pool2d})
