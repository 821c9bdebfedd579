"""Maps of the sweep inside CUDA graphs whose operands do not lie as their result does.

Heads are a view of rows that hold all of them, a half of a head is a slice, and a fused product's
queries, keys and values are parts of its rows. torch then computes where each element lies, one by
one, and reads no vectors (``OffsetCalculator.cuh``). Images with a rim are of the kind, too.
"""

from __future__ import annotations

import numpy as np

from foreplan.datasets.sweeps.function_cases import CALLS
from foreplan.datasets.sweeps.map_cases import map_sizes
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import MOST_BYTES, Calls, Case, Operands

#: What is drawn, and how often: parts of rows, operands in different orders, heads put together,
#: images with a rim.
_FORMS = {"parts": 0.4, "orders": 0.25, "joined": 0.2, "rim": 0.15}
_ONE = ("neg", "mul", "gelu", "silu", "relu", "sigmoid", "exp")
_TWO = ("add", "mul", "sub", "silu_backward")
#: Tensors that share the buffer of one data type, at most.
_TENSORS = 4


def apart(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A map of heads or of images, and their parts."""
    form = str(rng.choice(list(_FORMS), p=list(_FORMS.values())))
    if form == "rim":
        return _rim(dtype, rng, scale)
    while True:
        batch, tokens, heads = (int(2.0 ** rng.uniform(0, top)) for top in (7, 11, 6))
        inner = int(rng.choice([8, 16, 32, 48, 64, 80, 96, 128, 192, 256]))
        if heads == 1:  # whole rows, as a gate beside what it lets through
            inner *= int(2.0 ** rng.uniform(0, 7))
        rows = batch * tokens * heads
        if 4.0 * rows * inner * _TENSORS * 3 < MOST_BYTES * scale / 4:
            break
    inputs = 2 if form == "orders" or (form == "parts" and rng.random() < 0.4) else 1
    name = "cat_heads" if form == "joined" else str(rng.choice(_ONE if inputs == 1 else _TWO))
    wide = inner * int(rng.integers(2, 4))  # of which a part is read
    turned = bool(rng.random() < 0.7)
    more = int(rng.choice([1, 1, 3])) * inner  # of what heads are put together with

    def calls(view: Operands) -> Calls:
        import torch

        room = rows * wide + 256

        def rows_of(at: int, width: int) -> torch.Tensor:
            made: torch.Tensor = view(dtype, at * room, batch, tokens, heads, width)
            return made.transpose(1, 2) if turned or form != "parts" else made

        part = rows_of(0, wide)[..., wide - inner :]
        if form == "joined":
            beside = view(dtype, 2 * room, batch, tokens, heads, more + inner).transpose(1, 2)
            first, second = rows_of(1, inner), beside[..., :more]
            return [lambda: torch.cat((first, second), -1)]
        if form == "orders":
            x = rows_of(0, inner)
            y = view(dtype, room, batch, heads, tokens, inner)
            return [lambda: CALLS[2, name](x, y)]
        other = rows_of(1, inner) if inputs == 2 else part
        return [lambda: CALLS[inputs, name](part, other)]

    cols = inner + more if form == "joined" else inner
    strided = 4 if form == "orders" else 3
    sizes = map_sizes(rows, cols, inputs, strided=strided, function=MAP_FUNCTIONS[name])
    return Case(name, "elementwise", dtype, sizes, calls)


def _rim(dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """Images in the middle of zeros: a fill, and a copy of parts."""
    while True:
        images, side = int(2.0 ** rng.uniform(2, 16)), int(2.0 ** rng.uniform(2, 8))
        if 4.0 * images * (side + 2) ** 2 * 3 < MOST_BYTES * scale / 4:
            break
    before, after = ((0, 1), (1, 1), (1, 0), (2, 2))[int(rng.integers(4))]
    out = side + before + after

    def calls(view: Operands) -> Calls:
        import torch

        x = view(dtype, 0, images, side, side)
        pad = torch.ops.aten.constant_pad_nd
        return [lambda: pad(x, [before, after, before, after], 0.0)]

    sizes = map_sizes(images * out, out, 2, strided=3, function=MAP_FUNCTIONS["pad"])
    return Case("pad", "elementwise", dtype, sizes, calls)
