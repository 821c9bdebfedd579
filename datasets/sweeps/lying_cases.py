"""Maps of the sweep inside CUDA graphs whose operands lie across, or are of another data type.

An operand lies *across* where neighbours of the result are none of its own, as after a convolution
whose channels become features. Operands of two data types, as a weight in 16 bits and activations
in FP32, are converted one by one as they are read, without vectors (``CUDALoops.cuh``). Beside
them orders along a row: sums so far, sorts and the largest few.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.datasets.sweeps.function_cases import CALLS
from foreplan.datasets.sweeps.map_cases import map_sizes
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    narrow_shape,
    wide_shape,
)

#: Functions of two operands, of which the second is read again and again in some forms.
_TWO = ("add", "mul", "sub")
#: What operands of two data types are: a vector of columns, of rows, a block, or both whole.
_MIXED = {"column": 0.35, "row": 0.15, "block": 0.3, "whole": 0.2}  # a share of draws each
_LIES = {"row": 1, "column": 2, "block": 3, "whole": 0}
_ORDERS = ("cumsum", "topk", "sort")


def crossed(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A map of features of tokens that lie as channels of images, and of another tensor."""
    batch, tokens, cols = _tokens(rng, scale)
    block = bool(rng.random() < 0.35)  # a table of positions, for all of a batch
    first = bool(rng.random() < 0.7)
    name = str(rng.choice(_TWO))

    def calls(view: Operands) -> Calls:
        x = view(dtype, 0, batch, cols, tokens).transpose(1, 2)
        room = batch * cols * tokens + 256
        y = view(dtype, room, tokens, cols) if block else view(dtype, room, batch, tokens, cols)
        return [(lambda: CALLS[2, name](x, y)) if first else lambda: CALLS[2, name](y, x)]

    # The result lies as the first operand does; a row is a token's either way.
    sizes = map_sizes(
        batch * tokens, cols, 1 if block else 2, strided=5, broadcast=3 * block,
        function=MAP_FUNCTIONS[name],
    )  # fmt: skip
    return Case(name, "elementwise", dtype, sizes, calls)


def mixed(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A map of an operand in FP32 and one in 16 bits; the result is in FP32."""
    narrow = dtype if dtype != "fp32" else "bfloat16"
    form = str(rng.choice(list(_MIXED), p=list(_MIXED.values())))
    name = str(rng.choice(_TWO, p=[0.3, 0.5, 0.2]))
    wide = bool(rng.random() < 0.5)  # the larger operand is the one in FP32
    # Of what is written half is read (1), or as much, or half as much again of two (2).
    converts = 2 if wide or form == "whole" else 1
    kinds = ("fp32", narrow) if wide else (narrow, "fp32")
    if form == "block":
        return _of_heads(name, "fp32", kinds, converts, rng, scale)
    rows, cols = (wide_shape if rng.random() < 0.7 else narrow_shape)(rng, MOST_BYTES * scale)

    def calls(view: Operands) -> Calls:
        x = view(kinds[0], 0, rows, cols)
        extents = {"row": (rows, 1), "column": (cols,), "whole": (rows, cols)}[form]
        y = view(kinds[1], rows * cols + 256, *extents)
        return [lambda: CALLS[2, name](x, y)]

    sizes = map_sizes(
        rows, cols, 2 if form == "whole" else 1, broadcast=_LIES[form], converts=converts,
        function=MAP_FUNCTIONS[name],
    )  # fmt: skip
    return Case(name, "elementwise", "fp32", sizes, calls)


def shared(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A map of heads, or of parts of them, and of angles that heads share."""
    name = str(rng.choice(_TWO, p=[0.2, 0.7, 0.1]))
    return _of_heads(name, dtype, (dtype, dtype), 0, rng, scale)


def _of_heads(
    name: str, dtype: str, kinds: tuple[str, str], converts: int, rng: np.random.Generator,
    scale: float,
) -> Case:  # fmt: skip
    """A map of heads of tokens, and of a table with a row for each token."""
    while True:
        batch, tokens, heads = (int(2.0 ** rng.uniform(0, top)) for top in (6, 11, 6))
        cols = int(rng.choice([16, 32, 64, 80, 96, 128]))
        rows = batch * tokens * heads
        if 36.0 * rows * cols < MOST_BYTES * scale / 4:
            break
    lies = str(rng.choice(["rows", "turned", "parts"], p=[0.3, 0.3, 0.4]))
    wide = cols * int(rng.integers(2, 4))  # of which a part is read

    def calls(view: Operands) -> Calls:
        if lies == "rows":
            x = view(kinds[0], 0, batch, heads, tokens, cols)
        else:
            width = wide if lies == "parts" else cols
            x = view(kinds[0], 0, batch, tokens, heads, width)[..., :cols].transpose(1, 2)
        y = view(kinds[1], rows * wide + 256, tokens, cols)
        return [lambda: CALLS[2, name](x, y)]

    sizes = map_sizes(
        rows, cols, 1, strided=3 * (lies == "parts"), broadcast=3, converts=converts,
        function=MAP_FUNCTIONS[name],
    )  # fmt: skip
    return Case(name, "elementwise", dtype, sizes, calls)


def ordered(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """Sums so far of each row, a row in order, or its few largest; dearer by far than a map."""
    name = str(rng.choice(_ORDERS))
    while True:
        rows, cols = (int(2.0 ** rng.uniform(low, high)) for low, high in ((0, 14), (3, 16)))
        if rows * cols < min(2**25, MOST_BYTES * scale / 64):
            break
    few = min(cols, int(rng.choice([1, 2, 4, 8, 64, 1000])))

    def calls(view: Operands) -> Calls:
        import torch

        x = view(dtype, 0, rows, cols)
        made: dict[str, Any] = {
            "cumsum": lambda: torch.cumsum(x, -1),
            "topk": lambda: torch.topk(x, few, -1)[0],
            "sort": lambda: torch.sort(x, -1)[0],
        }
        return [made[name]]

    sizes = map_sizes(rows, cols, 1, function=MAP_FUNCTIONS[name])
    return Case(name, "elementwise", dtype, sizes, calls)


def _tokens(rng: np.random.Generator, scale: float) -> tuple[int, int, int]:
    """Sequences, tokens of each and features of a token."""
    while True:
        batch, tokens, cols = (
            int(2.0 ** rng.uniform(low, high)) for low, high in ((0, 7), (4, 12), (4, 12))
        )
        tokens = int(rng.choice([tokens, tokens // 16 * 16]))
        cols = cols // 8 * 8
        if 12.0 * batch * tokens * cols < MOST_BYTES * scale / 4:
            return batch, tokens, cols
