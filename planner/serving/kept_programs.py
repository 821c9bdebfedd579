"""Programs of passes, kept while a search asks for them again and again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from foreplan.datasets.models.attention_window import LayerKind
from foreplan.datasets.models.decoder_programs import layer_programs, product_programs
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant, program

#: Passes of a layer whose programs are kept: the contexts of a few long runs.
MOST_KEPT = 1 << 14

#: Programs and how often each runs.
Parts = tuple[tuple[Program, int], ...]
#: Dimensions of an operator's programs, and how often each runs.
Shapes = Sequence[tuple[dict[str, int], int]]


@functools.lru_cache(maxsize=MOST_KEPT)
def layer_parts(
    model: Model, batch: int, queries: int, keys: int, linear: Variant, attention: Variant,
    kind: LayerKind,
) -> Parts:  # fmt: skip
    """`layer_programs` with these variants; decisions of a plan share most of their passes."""

    def choose(op: str, _: Mapping[str, int]) -> Variant:
        return linear if op == "linear" else attention

    return tuple(layer_programs(model, batch, queries, keys, choose, *kind))


@functools.lru_cache(maxsize=MOST_KEPT)
def products(model: Model, rows: int, variant: Variant) -> Parts:
    """`product_programs`, kept."""
    return tuple(product_programs(model, rows, variant))


def in_variant(op: str, variant: Variant, shapes: Shapes) -> list[tuple[Program, int]]:
    """Programs of an operator in one variant."""
    return [(program(op, variant, **dims), count) for dims, count in shapes]
