"""Norms of groups of channels and interpolated images of the sweep inside CUDA graphs.

A norm of groups stands as rows of a norm, one for the channels of a group of one image; an
interpolated image as a pool whose windows are what each of its pixels is a mean of.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    gradient_call,
    images_of,
)

#: How a row of a pool says that its images are interpolated, not means of whole windows.
INTERPOLATED: Final = 2
#: Pixels of a side that one is made of, by the name of the way.
_WAYS = {"bilinear": 2, "bicubic": 4}


def group_norm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """A norm of each group of channels, or its gradients."""
    while True:
        batch, channels = (int(2.0 ** rng.uniform(low, high)) for low, high in ((0, 7), (4, 11)))
        groups = int(rng.choice([1, 8, 16, 32, 64], p=[0.25, 0.1, 0.1, 0.45, 0.1]))
        groups = groups if channels >= groups else 1
        channels = max(groups, channels // max(groups, 8) * max(groups, 8))
        side = int(2.0 ** rng.uniform(2, 8))
        if 12.0 * batch * channels * side**2 < MOST_BYTES * scale / 4:
            break
    last = bool(rng.random() < 0.2)

    def calls(view: Operands) -> Calls:
        import torch.nn.functional as F

        x = images_of(view, dtype, batch, channels, side, last=last)
        own = view(dtype, x.numel(), 2, channels)

        def forward(a: Any, weight: Any, bias: Any) -> Any:
            return F.group_norm(a, groups, weight, bias)

        if op == "group_norm":
            return [lambda: forward(x, own[0], own[1])]
        return [gradient_call(forward, [x, own[0], own[1]])]

    kind = "layernorm" if op == "group_norm" else "layernorm_gradient"
    dims = {"rows": batch * groups, "cols": channels // groups * side**2, "channels": channels,
            "channels_last": int(last)}  # fmt: skip
    dims |= {"rms": 0} if kind == "layernorm" else {}
    return Case(op, kind, dtype, dims, calls)


def interpolated(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """Images made larger or smaller, or the gradient of that."""
    way = str(rng.choice(list(_WAYS), p=[0.75, 0.25]))
    while True:
        batch, channels = (int(2.0 ** rng.uniform(low, high)) for low, high in ((0, 6), (0, 10)))
        side, out = (int(2.0 ** rng.uniform(3, 9)) for _ in "ab")
        if 12.0 * batch * channels * max(side, out) ** 2 < MOST_BYTES * scale / 4:
            break
    last, corners = bool(rng.random() < 0.2), bool(rng.random() < 0.3)

    def calls(view: Operands) -> Calls:
        import torch.nn.functional as F

        x = images_of(view, dtype, batch, channels, side, last=last)

        def forward(a: Any) -> Any:
            return F.interpolate(a, size=(out, out), mode=way, align_corners=corners)

        if op == "interpolated":
            return [lambda: forward(x)]
        return [gradient_call(forward, [x])]

    kind = "pool" if op == "interpolated" else "pool_gradient"
    # Pixels of an image for each that is made: as programs have it, one at least.
    dims = {"rows": batch * channels * out**2, "cols": max(1, round(side**2 / out**2)),
            "window": _WAYS[way], "channels_last": int(last), "average": INTERPOLATED,
            "side": out}  # fmt: skip
    return Case(op, kind, dtype, dims, calls)
