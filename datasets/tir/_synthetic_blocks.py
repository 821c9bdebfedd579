"""Random small graphs of torch operators, of the kinds that networks are made of.

The kinds, their rates and the ranges of sizes come from what networks do in general (convolutions
of 1 to 7, products of any size, norms over any axes, chains on elements, layouts of attention and
windows, look-ups, masks), not from errors on any network. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from foreplan.datasets.tir._synthetic_dice import MOST_PRODUCTS, Dice, Drawn, Function
from foreplan.datasets.tir._synthetic_elements import chain, norm, pooling, reduction
from foreplan.datasets.tir._synthetic_layouts import heads, layout, lookup, mask, windows
from foreplan.datasets.tir._synthetic_products import (
    convolution,
    excite,
    line_convolution,
    linear,
    product,
    upward,
)
from foreplan.errors import SpecError


class Block(nn.Module):
    """A function of tensors as a module.

    Args:
        function: called with the inputs, then the weights.
        weights: become parameters, whose gradients a training step has.
    """

    def __init__(self, function: Function, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(*inputs, *self.weights)


#: Kinds with their rates. Convolutions lead: few graphs give so few tasks each.
KINDS: dict[Callable[[Dice], Drawn], float] = {
    convolution: 30, line_convolution: 3, upward: 4, linear: 10, product: 10, pooling: 6, norm: 11,
    reduction: 8, chain: 10, layout: 10, lookup: 4, mask: 3, heads: 6, windows: 5, excite: 2,
}  # fmt: skip


def draw(
    seed: int, kinds: Collection[str] = (), most_products: float = MOST_PRODUCTS
) -> tuple[nn.Module, tuple[Tensor, ...], str, bool]:
    """Draw one graph.

    Args:
        seed: equal seed and other arguments, equal graph.
        kinds: names of functions in `KINDS`, of which one is drawn by their rates; all by default.
        most_products: most multiplications of a product.

    Returns:
        Module, its positional inputs, its kind, and whether its gradient is to be captured in
        place of it (one in eight of those whose gradient TVM takes).

    Raises:
        SpecError: no such kind.
    """
    names = [kind.__name__ for kind in KINDS]
    if unknown := sorted(set(kinds) - set(names)):
        raise SpecError("--kinds", got=unknown[0], expected="one of " + ", ".join(names))
    rates = {kind: rate for kind, rate in KINDS.items() if not kinds or kind.__name__ in kinds}
    dice = Dice(seed, most_products)
    kind = dice.random.choices(list(rates), weights=list(rates.values()))[0]
    found = kind(dice)
    if found.trains and dice.chance(0.12):
        floats = [t for t in found.inputs if t.is_floating_point()]
        if len(floats) == len(found.inputs):
            return Block(found.function, floats), (), found.kind, True
    return Block(found.function), found.inputs, found.kind, False
