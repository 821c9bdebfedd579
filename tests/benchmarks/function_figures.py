"""What functions of elements take beside moving them: ``python function_figures.py [--seed N]``.

One core in fp32: nanoseconds an element takes longer than in a plain map or sum of as many, and how
many elements that makes in a microsecond, for three drawn sizes (medians; each the quickest of
`_REPEATS` by the thread's own time). `cost_models.rates.slow_functions`, ``rows_across``,
``picked_rows`` and ``pool_results`` have these figures, read off seed 0; other seeds check them.
``--only`` prints functions whose names hold a word alone; ``--rows`` prints what a row takes longer
than its share of rows of 512 elements, by its width (``narrow_rows``, ``narrow_norms``);
``--dtype bf16`` that of 16 bits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

_REPEATS = 25
#: Elements of all rows together, and how many a row has, below 512.
_ELEMENTS, _WIDTHS = 1 << 18, (2, 4, 8, 15, 16, 17, 31, 32, 64, 128)
_F, _ATEN = nn.functional, torch.ops.aten

Call = Callable[[], object]
_Functions = dict[str, Callable[..., object]]


class Case(NamedTuple):
    """A function of some elements, and what moves as many."""

    name: str
    elements: int
    call: Call
    plain: Call


#: Of one tensor; where positive values are wanted, they lie in (0.1, 0.9).
_OF_ANY: _Functions = {
    "elu": _F.elu, "selu": _F.selu, "celu": _F.celu, "mish": _F.mish, "softplus": _F.softplus,
    "log_sigmoid": _F.logsigmoid, "gelu_tanh": partial(_F.gelu, approximate="tanh"),
    "atan": torch.atan, "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh,
    "asinh": torch.asinh, "erfc": torch.erfc, "expm1": torch.expm1, "exp2": torch.exp2,
    "randn_like": torch.randn_like, "rand_like": torch.rand_like,
    "tril": torch.tril, "triu": torch.triu, "isnan": torch.isnan, "isinf": torch.isinf,
    "isfinite": torch.isfinite, "sinc": torch.sinc, "i0": torch.i0,
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "uniform": lambda x: torch.empty_like(x).uniform_(),
    "normal": lambda x: torch.empty_like(x).normal_(),
    "randint_like": lambda x: torch.randint_like(x, 0, 100),
    "randperm": lambda x: torch.randperm(x.numel()),
    "floor_divide": lambda x: x // 0.3, "power of 4": lambda x: x**4,
    "power of 2": lambda x: x**2, "power by elements": lambda x: 2.0**x,
    "dropout": partial(_F.dropout, p=0.3),
    "fake_quantize_per_tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -99, 99),
    "bucketize of 30": lambda x: torch.bucketize(x, torch.linspace(-2, 2, 30)),
    "cummax": lambda x: torch.cummax(x, -1), "any": lambda x: torch.any(x > 0, -1),
    "rrelu": partial(_F.rrelu, training=True),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
}  # fmt: skip
_OF_POSITIVE: _Functions = {
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "acos": torch.acos, "asin": torch.asin,
    "atanh": torch.atanh, "erfinv": torch.erfinv, "lgamma": torch.lgamma,
    "digamma": torch.digamma, "logit": torch.logit, "bernoulli": torch.bernoulli,
    "polygamma": partial(torch.polygamma, 1), "multinomial": lambda x: torch.multinomial(x, 1),
    "poisson": torch.poisson,
} | {f"special_{name}": getattr(torch.special, name) for name in (
    "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0",
    "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "spherical_bessel_j0",
    "airy_ai", "i0e", "i1", "i1e", "ndtri", "log_ndtr", "erfcx", "entr",
)}  # fmt: skip
_OF_TWO: _Functions = {
    "atan2": torch.atan2, "remainder": torch.remainder, "fmod": torch.fmod, "hypot": torch.hypot,
    "logaddexp": torch.logaddexp, "gt": torch.gt, "xlogy": torch.xlogy,
    "pow of two": lambda x, y: torch.pow(y, x), "heaviside": torch.heaviside,
    "special_zeta": lambda x, y: torch.special.zeta(y + 1.5, y),
    "igamma": lambda x, y: torch.special.gammainc(y, y),
    "igammac": lambda x, y: torch.special.gammaincc(y, y),
}  # fmt: skip
#: Losses of two tensors of shares; `_ATEN.nll_loss_forward` picks.
_LOSSES: _Functions = {
    "binary_cross_entropy": _F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": _F.binary_cross_entropy_with_logits,
    "kl_div": partial(_F.kl_div, reduction="sum"), "soft_margin_loss": _F.soft_margin_loss,
}  # fmt: skip
#: Reductions and scans of the first dimension of a matrix.
_ACROSS: _Functions = {
    "argmax": torch.argmax, "norm": partial(torch.linalg.vector_norm),
    "cummax": torch.cummax, "cumsum": torch.cumsum, "var": torch.var, "max": torch.max,
    "softmax": torch.softmax,
}  # fmt: skip
_OF_ROWS: _Functions = {
    "std": torch.std, "var": torch.var, "std_mean": torch.std_mean, "var_mean": torch.var_mean,
    "max": torch.max, "min": torch.min, "median": torch.median, "logsumexp": torch.logsumexp,
    "cumsum": torch.cumsum, "cumprod": torch.cumprod, "logcumsumexp": torch.logcumsumexp,
    "log_softmax": torch.log_softmax, "mode": torch.mode, "nanmedian": torch.nanmedian,
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
        yield Case(name, count, partial(call, x), one)
    for name, call in _OF_POSITIVE.items():
        yield Case(name, count, partial(call, unit), one)
    for name, call in _OF_TWO.items():
        yield Case(name, count, partial(call, x, unit), two)
    for name, call in _OF_ROWS.items():
        moved = one if name.startswith(("cum", "log")) and name != "logsumexp" else summed
        yield Case(name, count, partial(call, x, -1), moved)
    for name, call in _LOSSES.items():
        yield Case(name, count, partial(call, unit, unit.flip(0)), partial(torch.sum, x))
    target = torch.randint(0, cols, (rows,))
    yield Case("multi_margin_loss", count, partial(_F.multi_margin_loss, x, target), summed)
    yield Case("nll_loss, by row", rows, partial(_F.nll_loss, x, target), partial(torch.sum, x[0]))
    tall = torch.randn(cols, rows)
    for name, call in _ACROSS.items():
        moved = one if name in ("cummax", "cumsum", "softmax") else partial(torch.sum, tall, 0)
        yield Case(f"{name} across", count, partial(call, tall, dim=0), moved)
    yield Case("sum of a transposed operand", count, partial(torch.add, x, tall.t()), two)
    compares = count * math.ceil(math.log2(cols))
    yield Case("sort, by comparison", compares, partial(torch.sort, x), one)
    soft = x.log_softmax(-1)
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        back = partial(getattr(_ATEN, name), y, soft, -1, x.dtype)
        yield Case(name, count, back, two)
    yield Case("where", count, partial(torch.where, causal, x, y), two)
    yield Case("masked_fill", count, partial(torch.masked_fill, x, causal, 0.0), one)
    yield Case("masked_scatter", count, partial(torch.masked_scatter, x, causal, y), two)
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
    table, few = torch.randn(rows // 3, cols), torch.randint(0, cols, (rows, cols // 2))
    yield Case("index", source.numel(), lambda: table[index], plain)
    yield Case("index of bytes", source.numel(), partial(table.char().__getitem__, index),
               partial(torch.clone, source.char()))  # fmt: skip
    line = table.flatten()
    yield Case("index of scalars", few.numel(), lambda: line[few], partial(torch.clone, few))
    yield Case("gather", few.numel(), partial(torch.gather, source, 1, few),
               partial(torch.abs, source[:, : cols // 2]))  # fmt: skip
    yield Case("take", few.numel(), partial(torch.take, line, few),
               partial(torch.abs, source[:, : cols // 2]))  # fmt: skip
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
    x = torch.randn(4, channels, 28, 28)
    for side in (14, 7, 3):
        for kind in ("max", "avg"):
            call = partial(getattr(_F, f"adaptive_{kind}_pool2d"), x, side)
            made = call()
            name = f"adaptive_{kind}_pool2d by result of {28 / side:.0f} x {28 / side:.0f}"
            yield Case(name, made.numel(), call, partial(torch.abs, made))
    draws = torch.rand(4, channels, 2)
    call = partial(_F.fractional_max_pool2d, x, 2, output_size=14, _random_samples=draws)
    made = call()
    yield Case("fractional_max_pool2d", made.numel(), call, partial(torch.abs, made))
    for kind, window in (("max", 2), ("max", 3), ("avg", 2), ("avg", 3)):
        call = partial(getattr(_F, f"{kind}_pool2d"), stride=window, kernel_size=window)
        yield _gradient(f"{kind}_pool2d by result of {window}", call, x)


def _gradient(name: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Case:
    """A gradient by images, by result of the forward pass, beside writing as much."""
    with torch.enable_grad():
        source = x.clone().requires_grad_()
        made = call(source)
        by = torch.ones_like(made)
        back = partial(torch.autograd.grad, made, source, by, retain_graph=True)
    return Case(f"gradient of {name}", made.numel(), back, partial(torch.abs, x))


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
    sampler = partial(_F.grid_sample, grid=grid.clone(), align_corners=False)
    yield _gradient("grid_sampler_2d", sampler, x)
    for mode in ("bilinear", "bicubic"):
        call = partial(_F.interpolate, scale_factor=2.0, mode=mode)
        yield Case(f"upsample_{mode}2d", larger.numel(), partial(call, x),
                   partial(torch.abs, larger))  # fmt: skip
        yield _gradient(f"upsample_{mode}2d", call, x)
        call = partial(_F.interpolate, x, scale_factor=0.5, mode=mode, antialias=True)
        yield Case(f"_upsample_{mode}2d_aa, by pixel", x.numel(), call, partial(torch.abs, x))
    lines, volume = x.flatten(2), torch.randn(1, channels // 4, 8, 24, 24)
    for name, source, mode in (
        ("linear1d", lines, "linear"), ("nearest1d", lines, "nearest"),
        ("trilinear3d", volume, "trilinear"), ("nearest3d", volume, "nearest"),
    ):  # fmt: skip
        call = partial(_F.interpolate, source, scale_factor=2.0, mode=mode)
        made = call()
        yield Case(f"upsample_{name}", made.numel(), call, partial(torch.abs, made))
    unshuffle = partial(_F.pixel_unshuffle, larger, 2)
    yield Case("pixel_unshuffle", larger.numel(), unshuffle, partial(torch.clone, larger))
    fold = partial(_F.fold, columns, (24, 24), 3)
    yield Case("col2im, by column", columns.numel(), fold, partial(torch.abs, x))
    yield Case("instance_norm", x.numel(), partial(_F.instance_norm, x), partial(torch.abs, x))
    scales = torch.full((channels,), 0.1), torch.zeros(channels)
    quantized = partial(torch.fake_quantize_per_channel_affine, x, *scales, 1, 0, 255)
    yield Case("fake_quantize_per_channel", x.numel(), quantized, partial(torch.abs, x))
    affine = partial(_F.affine_grid, torch.randn(8, 2, 3), [8, 1, 24, 24], align_corners=False)
    yield Case("affine_grid_generator", 8 * 24 * 24 * 2, affine, partial(torch.abs, affine()))


def _of_widths(cols: int, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Softmaxes, sums and norms of rows of so many elements."""
    x = torch.randn(_ELEMENTS // cols, cols, dtype=dtype)
    scale, soft = torch.ones(cols, dtype=dtype), x.softmax(-1)
    for name in ("softmax", "log_softmax", "sum", "mean", "amax", "prod", "max", "argmax", "var",
                 "var_mean", "logsumexp", "cumsum"):  # fmt: skip
        yield name, partial(getattr(torch, name), x, dim=-1)
    yield "norm", partial(torch.linalg.vector_norm, x, dim=-1)
    yield "layer_norm", partial(_F.layer_norm, x, (cols,), scale, scale)
    yield "rms_norm", partial(_F.rms_norm, x, (cols,))
    back = partial(_ATEN._softmax_backward_data, x, soft, -1, dtype)
    yield "softmax_backward", back
    _, mean, deviation = _ATEN.native_layer_norm(x, (cols,), scale, scale, 1e-5)
    moments, asked = (mean, deviation), [True, True, True]
    yield (
        "gradient of layer_norm",
        partial(_ATEN.native_layer_norm_backward, x, x, (cols,), *moments, scale, scale, asked),
    )


def print_rows(dtype: torch.dtype) -> None:
    """A line a function: nanoseconds of a row beside its share of wide ones, by its elements."""
    wide = {name: 1e9 * quickest_s(call) for name, call in _of_widths(512, dtype)}
    found: dict[str, list[str]] = {}
    for cols in _WIDTHS:
        for name, call in _of_widths(cols, dtype):
            beside = 1e9 * quickest_s(call) - wide[name]
            found.setdefault(name, []).append(f"{beside / (_ELEMENTS // cols):6.1f}")
    print(f"{'ns a row of':26} " + " ".join(f"{cols:6}" for cols in _WIDTHS))
    for name, each in found.items():
        print(f"{name:26} {' '.join(each)}, {wide[name] / _ELEMENTS:.2f} an element of 512")


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
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    torch.set_num_threads(1)
    if asked.rows:
        with torch.no_grad():
            print_rows(torch.float32 if asked.dtype == "fp32" else torch.bfloat16)
        return
    sizes = [(int(r), int(c) * 2) for r, c in zip(
        torch.randint(100, 500, (3,)), torch.randint(100, 400, (3,)), strict=True
    )]  # fmt: skip
    print(f"sizes {sizes}")
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for size in sizes:
            for case in cases(*size):
                if asked.only and not any(word in case.name for word in asked.only):
                    continue
                beside = quickest_s(case.call) - quickest_s(case.plain)
                found.setdefault(case.name, []).append(1e9 * beside / case.elements)
        hows = () if asked.only else ((4096, 64, 6), (16, 32000, 50), (512, 512, 8))
        rows = [chosen(*how) for how in hows]
    for name, each in found.items():
        middle = statistics.median(each)
        shown = " ".join(f"{ns:6.2f}" for ns in each)
        print(f"{name:44} {middle:6.2f} ns ({shown}), {1e3 / middle:8.0f} in 1 us")
    for took, values, results in rows:
        print(f"topk of {values} to {results}: {took / values:.2f} ns a value, "
              f"{took / results:.0f} a result")  # fmt: skip


if __name__ == "__main__":
    main()
