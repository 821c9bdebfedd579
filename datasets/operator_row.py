"""`Operator`: a row of the table of operators (`foreplan.datasets.operators`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreplan.datasets.program import Variant


@dataclass(frozen=True, slots=True)
class Operator:
    """What an operator's dimensions are called and how much work they mean.

    Attributes:
        dims: names of the dimensions, in the canonical order.
        flops: FLOP (multiply-add = 2) from the dimensions.
        bytes: fewest bytes that move through memory: each input read and each output written once.
    """

    dims: tuple[str, ...]
    flops: Callable[[Mapping[str, int]], float]
    bytes: Callable[[Mapping[str, int], Variant], float]
