"""What functions of elements take beside moving them: ``python function_figures.py [--seed N]``.

One core in fp32: nanoseconds an element takes longer than in a plain map or sum of as many, and how
many elements that makes in a microsecond, for three drawn sizes (medians; each the quickest of
`_REPEATS` by the thread's own time). `cost_models.rates.slow_functions` has these figures, read off
seed 0; other seeds check them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

_REPEATS = 25
_F, _ATEN = nn.functional, torch.ops.aten

Call = Callable[[], object]


class Case(NamedTuple):
    """A function of some elements, and what moves as many."""

    name: str
    elements: int
    call: Call
    plain: Call


#: Of one tensor; where positive values are wanted, they lie in (0.1, 0.9).
_OF_ANY = {
    "elu": _F.elu, "selu": _F.selu, "celu": _F.celu, "mish": _F.mish, "softplus": _F.softplus,
    "log_sigmoid": _F.logsigmoid, "gelu_tanh": partial(_F.gelu, approximate="tanh"),
    "atan": torch.atan, "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh,
    "asinh": torch.asinh, "erfc": torch.erfc, "expm1": torch.expm1, "exp2": torch.exp2,
    "randn_like": torch.randn_like, "rand_like": torch.rand_like, "bernoulli": None,
    "tril": torch.tril, "triu": torch.triu, "isnan": torch.isnan,
}  # fmt: skip
_OF_POSITIVE = {
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "acos": torch.acos, "asin": torch.asin,
    "atanh": torch.atanh, "erfinv": torch.erfinv, "lgamma": torch.lgamma,
    "digamma": torch.digamma, "logit": torch.logit, "bernoulli": torch.bernoulli,
}  # fmt: skip
_OF_TWO = {
    "atan2": torch.atan2, "remainder": torch.remainder, "fmod": torch.fmod, "hypot": torch.hypot,
    "logaddexp": torch.logaddexp, "gt": torch.gt,
}  # fmt: skip
_OF_ROWS = {
    "std": torch.std, "var": torch.var, "std_mean": torch.std_mean, "var_mean": torch.var_mean,
    "max": torch.max, "min": torch.min, "median": torch.median, "logsumexp": torch.logsumexp,
    "cumsum": torch.cumsum, "cumprod": torch.cumprod, "logcumsumexp": torch.logcumsumexp,
    "log_softmax": torch.log_softmax,
}  # fmt: skip


def cases(rows: int, cols: int) -> Iterator[Case]:
    """Every function once."""
    count = rows * cols
    x, y = torch.randn(rows, cols), torch.randn(rows, cols)
    unit = torch.rand(rows, cols) * 0.8 + 0.1
    causal = torch.ones(rows, cols).tril() > 0
    one, two = partial(torch.abs, x), partial(torch.add, x, y)
    summed = partial(torch.sum, x, -1)
    for name, call in _OF_ANY.items():
        if call is not None:
            yield Case(name, count, partial(call, x), one)
    for name, call in _OF_POSITIVE.items():
        yield Case(name, count, partial(call, unit), one)
    for name, call in _OF_TWO.items():
        yield Case(name, count, partial(call, x, unit), two)
    for name, call in _OF_ROWS.items():
        moved = one if name.startswith(("cum", "log")) and name != "logsumexp" else summed
        yield Case(name, count, partial(call, x, -1), moved)
    yield Case("where", count, partial(torch.where, causal, x, y), two)
    yield Case("masked_fill", count, partial(torch.masked_fill, x, causal, 0.0), one)
    yield Case("glu", count // 2, partial(_F.glu, x), partial(torch.abs, x[:, : cols // 2]))
    yield Case("kthvalue", count, partial(torch.kthvalue, x, 5, -1), summed)
    yield Case("histc", count, partial(torch.histc, x, 100), summed)
    yield Case("parts that take turns", 2 * count, partial(torch.stack, [x, y], -1),
               partial(torch.cat, [x, y], -1))  # fmt: skip
    yield Case("transposed copy", count, lambda: x.t().contiguous(), partial(torch.clone, x))
    yield from _of_indices(rows, cols)
    yield from _of_images(rows)
    yield from _of_windows(rows)


def _of_indices(rows: int, cols: int) -> Iterator[Case]:
    """Rows that are written to a third as many, too many for the nearer caches."""
    rows, cols = 20 * rows, cols // 4
    source, target = torch.randn(rows, cols), torch.zeros(rows // 3, cols)
    index = torch.randint(0, rows // 3, (rows,))
    wide, plain = index[:, None].expand(rows, cols), partial(torch.clone, source)
    for name, call in {
        "index_add": partial(target.index_add, 0, index, source),
        "scatter_add": partial(target.scatter_add, 0, wide, source),
        "scatter_reduce": partial(target.scatter_reduce, 0, wide, source, "amax"),
        "index_put": partial(target.index_put, (index,), source, accumulate=True),
        "scatter": partial(target.scatter, 0, wide, source),
    }.items():
        yield Case(name, source.numel(), call, plain)


def _of_windows(channels: int) -> Iterator[Case]:
    """Pools along lines and of volumes, by result, for two sizes of windows."""
    line, volume = torch.randn(4, channels, 720), torch.randn(1, channels, 8, 12, 12)
    for dimensions, x in ((1, line), (3, volume)):
        for kind in ("max", "avg"):
            pool = getattr(_F, f"{kind}_pool{dimensions}d")
            for window in (2, 4):
                call = partial(pool, x, window)
                made = call()
                name = f"{kind}_pool{dimensions}d by result of {window}"
                yield Case(name, made.numel(), call, partial(torch.abs, made))


def _of_images(channels: int) -> Iterator[Case]:
    x = torch.randn(1, channels, 24, 24)
    columns: Tensor = _F.unfold(x, 3)
    yield Case("im2col", columns.numel(), partial(_F.unfold, x, 3), partial(torch.abs, columns))
    larger = torch.randn(1, channels, 48, 48)
    shuffled = torch.randn(1, 4 * channels, 24, 24)
    shuffle = partial(_F.pixel_shuffle, shuffled, 2)
    yield Case("pixel_shuffle", shuffled.numel(), shuffle, partial(torch.clone, shuffled))
    last = x.contiguous(memory_format=torch.channels_last)
    yield Case(
        "copy of channels last", x.numel(), lambda: last.contiguous(), partial(torch.clone, x)
    )
    nearest = partial(_F.interpolate, x, scale_factor=2.0)
    yield Case("nearest, small images", larger.numel(), nearest, partial(torch.abs, larger))
    wide = torch.randn(1, channels // 4, 96, 96)
    nearest = partial(_F.interpolate, wide[..., ::2, ::2].contiguous(), scale_factor=2.0)
    yield Case("upsample_nearest2d", wide.numel(), nearest, partial(torch.abs, wide))
    grid = torch.rand(1, 24, 24, 2) * 2.0 - 1.0
    sampled = partial(_F.grid_sample, x, grid, align_corners=False)
    yield Case("grid_sampler_2d", x.numel(), sampled, partial(torch.abs, x))


def chosen(rows: int, cols: int, k: int) -> tuple[float, int, int]:
    """Nanoseconds that the largest ``k`` of each row take, numbers of values and of results."""
    x = torch.randn(rows, cols)
    return 1e9 * quickest_s(partial(torch.topk, x, k)), rows * cols, rows * k


def quickest_s(call: Call) -> float:
    """Seconds of the thread."""
    found = []
    for _ in range(_REPEATS):
        before = time.thread_time()
        call()
        found.append(time.thread_time() - before)
    return min(found)


def main() -> None:
    """Print a line a function."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    torch.set_num_threads(1)
    sizes = [(int(r), int(c) * 2) for r, c in zip(
        torch.randint(100, 500, (3,)), torch.randint(100, 400, (3,)), strict=True
    )]  # fmt: skip
    print(f"sizes {sizes}")
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        for size in sizes:
            for case in cases(*size):
                beside = quickest_s(case.call) - quickest_s(case.plain)
                found.setdefault(case.name, []).append(1e9 * beside / case.elements)
        rows = [chosen(*how) for how in ((4096, 64, 6), (16, 32000, 50), (512, 512, 8))]
    for name, each in found.items():
        middle = statistics.median(each)
        shown = " ".join(f"{ns:6.2f}" for ns in each)
        print(f"{name:26} {middle:6.2f} ns ({shown}), {1e3 / middle:8.0f} in 1 us")
    for took, values, results in rows:
        print(f"topk of {values} to {results}: {took / values:.2f} ns a value, "
              f"{took / results:.0f} a result")  # fmt: skip


if __name__ == "__main__":
    main()
