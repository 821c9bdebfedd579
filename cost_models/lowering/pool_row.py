"""`pool_row`: a pool, or what a GPU computes like one, in the words of operator tables."""

from __future__ import annotations

import math
from types import MappingProxyType

from foreplan.cost_models.lowering.element_gradients import OF_INTERPOLATED
from foreplan.datasets.program import CHANNELS_LAST, Program
from foreplan.datasets.sweeps.image_cases import INTERPOLATED

#: Elements of a side that an interpolated one is a mean of, by kernel.
_INTERPOLATED = MappingProxyType({"torch.upsample_bilinear2d": 2, "torch.upsample_bicubic2d": 4})


def pool_row(item: Program) -> tuple[str, dict[str, int]] | None:
    """Kind and sizes of a pool over windows; ``None`` of all else, adaptive pools included.

    Args:
        item: any program; square windows of images are what tables know.
    """
    d, kernel = item.dims, item.variant.kernel
    if item.op in ("pool", "pool_gradient") and "adaptive" not in kernel:
        size = {"rows": d["rows"], "cols": d["cols"], "window": max(1, math.isqrt(d["taps"]))}
        marks = {"channels_last": int(CHANNELS_LAST in kernel), "average": int("avg" in kernel)}
        return item.op, size | marks
    whole = kernel.removesuffix(CHANNELS_LAST)  # by which no sweep tells them apart
    plain = whole.removesuffix(OF_INTERPOLATED)
    if item.op == "elementwise" and plain in _INTERPOLATED:
        size = {"rows": d["rows"] * d["cols"], "cols": d["inputs"], "side": d["cols"]}
        marks = {"window": _INTERPOLATED[plain], "channels_last": 0, "average": INTERPOLATED}
        return ("pool" if plain == whole else "pool_gradient"), size | marks
    return None
