"""What operators take against their likeness: ``python likeness_figures.py DOCUMENT [--seed N]``.

Operators that no sweep of processors times (`cost_models.rates.profiled_alike`), of drawn sizes, on
one core: seconds of the thread behind `BEHIND` of other data, with activations just written, over
the price that the shipped rates have for them there. DOCUMENT is one of the end-to-end check,
measured on this machine, for the device's figures. Constants were read off seed 0; other seeds
check them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.rates.rate_law import Waits
from foreplan.cost_models.rates.reuse import waiting_share
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import load_document, validate
from foreplan.datasets.sweeps.update_packing import packed_update

#: Bytes that go through the caches before a call.
BEHIND = 4 << 20
_REPEATS = 15
_ATEN = torch.ops.aten


class Case(NamedTuple):
    """An operator of a kind, its call, and the activations that are written before."""

    kind: str
    item: Program
    call: Callable[[], object]
    written: tuple[torch.Tensor, ...]


class Draw:
    """Sizes from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def size(self, least: int, most: int, step: int = 1) -> int:
        """A multiple of ``step``, evenly by its logarithm."""
        drawn = math.exp(self._rng.uniform(math.log(least), math.log(most)))
        return max(step, round(drawn / step) * step)

    def one(self, *of: int) -> int:
        """One of some."""
        return int(self._rng.choice(of))


def _plain(kernel: str) -> Variant:
    return Variant("fp32", "fp32", f"torch.{kernel}")


def products(draw: Draw) -> Iterator[Case]:
    """Products of two activations."""
    while True:
        b, m, n, k = draw.one(1, 1, 4, 12, 32), *(draw.size(8, 512, 4) for _ in "mnk")
        item = program("matmul", _plain("matmul"), batch=b, m=m, n=n, k=k)
        if not 1e5 < item.flops < 2e8:
            continue
        x, y = torch.randn(b, m, k), torch.randn(b, k, n)
        kind = "product" if b == 1 else "products"
        yield Case(kind, item, partial(torch.bmm, x, y), (x, y))


def convolutions(draw: Draw) -> Iterator[list[Case]]:
    """Convolutions and their gradients."""
    while True:
        how = ("grouped", "by channel", "by channel, last", "patches, last", "plain", "last")[
            draw.one(0, 0, 1, 2, 2, 3, 4, 5)
        ]
        batch, size = draw.one(1, 2, 4), draw.one(4, 6, 8, 12, 16, 24, 32)
        window, stride, cin, cout = draw.one(1, 3, 3, 5), draw.one(1, 1, 2), *(
            draw.size(24, 640, 8) for _ in "io"
        )  # fmt: skip
        groups = 1
        if how == "grouped":
            wide = draw.one(4, 8, 16, 32, 48, 64)
            groups, window = draw.one(2, 4, 6, 12), 3
            cin = cout = groups * wide
        elif how.startswith("by channel"):
            groups = cout = cin
            window = draw.one(3, 3, 5, 7)
        elif how.startswith("patches"):
            window = stride = draw.one(2, 4)
            size = size // stride * stride
        elif window == stride == 1 and how == "plain":
            how = "of a pixel"
        pad = 0 if how.startswith("patches") else window // 2
        out = (size + 2 * pad - window) // stride + 1
        last = how.endswith("last")
        kernel = "conv2d" + ("_channels_last" if last else "") + "_bias"
        sizes = {"batch": batch, "groups": groups, "cin": cin, "cout": cout, "taps": window**2,
                 "inputs": size**2, "outputs": out**2}  # fmt: skip
        item = program("conv", _plain(kernel), **sizes)
        if out < 1 or not 1e5 < item.flops < 2e8:
            continue
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(batch, cin, size, size).to(memory_format=layout)
        g = torch.randn(batch, cout, out, out).to(memory_format=layout)
        w, bias = torch.randn(cout, cin // groups, window, window), torch.randn(cout)
        args = ([stride, stride], [pad, pad], [1, 1])
        forward = partial(torch.conv2d, x, w, bias, *args, groups)
        found = [Case(f"conv {how}", item, forward, (x,))]
        back = partial(
            _ATEN.convolution_backward.default, g, x, w, [cout], *args, False, [0, 0], groups
        )
        for way, mask in (("input", [True, False, False]), ("weight", [False, True, True])):
            variant = _plain(f"{kernel}_{way}_gradient")
            found.append(Case(
                f"conv {how}, {way}", program("conv", variant, **sizes), partial(back, mask), (g,)
            ))  # fmt: skip
        yield found


def maps(draw: Draw) -> Iterator[list[Case]]:
    """Maps over elements and their gradients."""
    forward = {
        "add": 2, "mul": 2, "relu": 1, "gelu": 1, "silu": 1, "tanh": 1, "sigmoid": 1, "exp": 1,
        "sin": 1, "cos": 1, "erf": 1, "pow": 1,
    }  # fmt: skip
    backward: dict[str, Callable[..., Any]] = {
        "gelu": _ATEN.gelu_backward.default, "silu": _ATEN.silu_backward.default,
        "tanh": _ATEN.tanh_backward.default,
        "relu": lambda g, x: _ATEN.threshold_backward.default(g, x, 0),
    }  # fmt: skip
    while True:
        rows, cols = draw.size(16, 512), draw.size(64, 2048, 16)
        x, y = torch.randn(rows, cols), torch.randn(rows, cols)
        found = []
        for name, inputs in forward.items():
            item = program("elementwise", _plain(name), rows=rows, cols=cols, inputs=inputs)
            call = getattr(torch.nn.functional if name in ("gelu", "silu") else torch, name)
            given = {"add": (x, y), "mul": (x, y), "pow": (x, 3.0)}.get(name, (x,))
            found.append(Case(name, item, partial(call, *given), (x, y)))
        for name, call in backward.items():
            kernel = f"{name}_backward" if name in ("gelu", "silu") else "backward"
            item = program("elementwise", _plain(kernel), rows=rows, cols=cols, inputs=2)
            found.append(Case(f"{name}, gradient", item, partial(call, y, x), (y,)))
        yield found


def norms(draw: Draw) -> Iterator[list[Case]]:
    """Norms of rows and of channels, and their gradients."""
    while True:
        rows, cols = draw.size(16, 2048), draw.size(32, 1024, 16)
        if rows * cols > 1 << 20:
            continue
        x, g, w, b = (torch.randn(rows, cols), torch.randn(rows, cols), *torch.randn(2, cols))
        _, mean, rstd = torch.native_layer_norm(x, [cols], w, b, 1e-5)
        size = {"rows": rows, "cols": cols}
        back = program("norm_gradient", _plain("backward"), **size, channels=1, results=2)
        found = [
            Case("layer norm", program("norm", _plain("layer_norm"), **size),
                 partial(torch.nn.functional.layer_norm, x, [cols], w, b), (x,)),
            Case("layer norm, gradient", back,
                 partial(_ATEN.native_layer_norm_backward.default, g, x, [cols], mean, rstd, w, b,
                         [True, True, True]), (g,)),
        ]  # fmt: skip
        batch, channels, side = draw.one(1, 4), draw.size(32, 512, 16), draw.one(4, 8, 16, 32)
        found += _batch_norms(batch, channels, side)
        yield found


def _batch_norms(batch: int, channels: int, side: int) -> list[Case]:
    image, back = torch.randn(2, batch, channels, side, side)
    scale, shift = torch.ones(channels), torch.zeros(channels)
    size = {"rows": batch * channels, "cols": side**2, "channels": channels}
    found = []
    for word, whole in (("", False), ("_of_batch", True)):
        norm = partial(torch.nn.functional.batch_norm, image, shift.clone(), scale.clone(), scale,
                       shift, whole)  # fmt: skip
        item = program("batch_norm", _plain(f"batch_norm{word}"), **size)
        found.append(Case(f"batch norm{word}", item, norm, (image,)))
        mean, rstd = image.mean((0, 2, 3)), 1 / image.std((0, 2, 3))
        call = partial(_ATEN.native_batch_norm_backward.default, back, image, scale, shift, scale,
                       mean, rstd, whole, 1e-5, [True, True, True])  # fmt: skip
        item = program("norm_gradient", _plain(f"backward{word}"), **size, results=2)
        found.append(Case(f"batch norm{word}, gradient", item, call, (back,)))
    return found


def filters(draw: Draw) -> Iterator[list[Case]]:
    """Gradients of filters of one channel by their weights, with and without a kernel."""
    while True:
        batch, channels, side = draw.one(1, 2, 4), draw.size(24, 768, 8), draw.one(2, 4, 8, 16, 32)
        window, stride, last = draw.one(3, 5, 7, 7, 9), draw.one(1, 1, 2), bool(draw.one(0, 1))
        pad = window // 2
        out = (side + 2 * pad - window) // stride + 1
        sizes = {"batch": batch, "groups": channels, "cin": channels, "cout": channels,
                 "taps": window**2, "inputs": side**2, "outputs": out**2}  # fmt: skip
        kernel = "conv2d" + ("_channels_last" if last else "") + "_bias_weight_gradient"
        item = program("conv", _plain(kernel), **sizes)
        if item.flops > 2e8:
            continue
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(batch, channels, side, side).to(memory_format=layout)
        g = torch.randn(batch, channels, out, out).to(memory_format=layout)
        w = torch.randn(channels, 1, window, window)
        call = partial(
            _ATEN.convolution_backward.default, g, x, w, [channels], [stride, stride], [pad, pad],
            [1, 1], False, [0, 0], channels, [False, True, True],
        )  # fmt: skip
        found = "a kernel" if window == 3 and side > 2 else "no kernel"
        yield [Case(f"filters, {'last' if last else 'plain'}, {found}", item, call, (g,))]


def narrow_norms(draw: Draw) -> Iterator[list[Case]]:
    """Batch norms of small images."""
    while True:
        yield _batch_norms(draw.one(1, 2, 4), draw.size(64, 2048, 8), draw.one(2, 3, 4))


def updates(draw: Draw) -> Iterator[Case]:
    """Updates of several parameters."""
    while True:
        count, each = draw.size(4, 120), draw.size(256, 200000)
        if count * each > 4e6:
            continue
        tensors = [torch.nn.Parameter(torch.randn(each)) for _ in range(count)]
        for tensor in tensors:
            tensor.grad = torch.randn(each)
        optimizer = torch.optim.AdamW(tensors, lr=1e-6, fused=True)
        packed = packed_update([each] * count)
        item = program("adamw", _plain("adamw"), parameters=count * each, kernels=packed.kernels,
                       longest=packed.longest)  # fmt: skip
        many = "few" if each > 20000 else "many"
        yield Case(f"update, {many}", item, optimizer.step, ())


def seconds(case: Case, other: torch.Tensor) -> float:
    """Median of a call behind other data."""
    held = [tensor.clone() for tensor in case.written]
    found = []
    case.call()
    for _ in range(_REPEATS):
        other.sum()
        for tensor, values in zip(case.written, held, strict=True):
            tensor.copy_(values)
        started = time.thread_time()
        case.call()
        found.append(time.thread_time() - started)
    return statistics.median(found)


#: How many draws of each kind.
_MANY = {convolutions: 72, maps: 8, norms: 12, filters: 60, narrow_norms: 16}


def drawn(seed: int, kinds: Collection[str] = ()) -> Iterator[Case]:
    """All cases of a seed, or those of some kinds, drawn by themselves."""
    draw = Draw(seed)
    for many, count in _MANY.items():
        for cases, _ in zip(many(draw), range(count * (many.__name__ in kinds)), strict=False):
            yield from cases
    if kinds:
        return
    for source, count in ((products, 48), (updates, 10)):
        for case, _ in zip(source(draw), range(count), strict=False):
            yield case
    for many, count in _MANY.items():
        for cases, _ in zip(many(draw), range(count), strict=False):
            yield from cases


def main() -> None:
    """Print the ratio of measured to predicted for each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=[], choices=[of.__name__ for of in _MANY])
    parser.add_argument("--behind", type=int, default=BEHIND, help="bytes")
    asked = parser.parse_args()
    device = validate(Device, load_document(asked.document)["figures"], "figures")
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    other = torch.ones(asked.behind // 4)
    wide = waiting_share(device, asked.behind, "wide")
    waits = {device.name: Waits(waiting_share(device, asked.behind), {"wide": wide})}
    source = PredictedSource(Predictor.load(), devices={device.name: device}, waits=waits)
    found: dict[str, list[tuple[float, float]]] = {}
    with torch.no_grad():
        for case in drawn(asked.seed, asked.kinds):
            measured = seconds(case, other)
            price = source.estimate(case.item, device.name)
            predicted = price.mean_s if price else math.nan
            found.setdefault(case.kind, []).append((measured, predicted))
            if asked.each:
                print(f"{case.kind:28} {1e6 * measured:9.1f} us, predicted {1e6 * predicted:9.1f}"
                      f" {case.item}")  # fmt: skip
    for kind, times in found.items():
        ratios = [m / p for m, p in times]
        off = statistics.mean(abs(math.log(r)) for r in ratios)
        print(f"{kind:30} {len(times):3}: measured / predicted {statistics.median(ratios):5.2f} "
              f"({min(ratios):5.2f} to {max(ratios):5.2f}), factor {math.exp(off):.2f}, "
              f"all {sum(m for m, _ in times) / sum(p for _, p in times):5.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
