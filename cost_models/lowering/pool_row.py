"""`pool_row`: a pool, or what a GPU computes like one, in the words of operator tables."""

from __future__ import annotations

import math
from types import MappingProxyType

from foreplan.datasets.program import CHANNELS_LAST, Program

#: Elements of a side that an interpolated one is a mean of, by kernel: a thread each, which reckons
#: where they lie, as of a mean's window. No sweep has them; 8.4 million of an H200 took 107 us in
#: BF16 and 165 in FP32 (bilinear), where a map takes 10 and 20.
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
    if item.op == "elementwise" and kernel in _INTERPOLATED:
        size = {"rows": d["rows"] * d["cols"], "cols": 1, "window": _INTERPOLATED[kernel]}
        return "pool", size | {"channels_last": 0, "average": 1}
    return None
