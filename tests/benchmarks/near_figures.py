"""What the constants of `near_costs` were read off: ``python tests/benchmarks/near_figures.py``.

One thread, in a loop, so that operands lie in caches: how fast products of one row read their
weights, what elements of slow kernels take, what rate transforms reach, and what a step of each
kind of recurrent layer takes (of 40 steps less 8). Seconds are of the thread.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def seconds(run: Callable[[], Any], rounds: int = 5, passes: int = 9) -> float:
    """Median over rounds of the median pass."""
    found = []
    for _ in range(rounds):
        run()
        each = []
        for _ in range(passes):
            start = time.thread_time()
            run()
            each.append(time.thread_time() - start)
        found.append(statistics.median(each))
    return statistics.median(found)


def products() -> None:
    """Weights of products by few rows."""
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for n, k in ((192, 64), (512, 128), (768, 256), (2048, 512), (4096, 1024)):
            x, weight, bias = torch.rand(rows, k), torch.rand(n, k), torch.rand(n)
            s = seconds(lambda x=x, w=weight, b=bias: F.linear(x, w, b))
            read, rate = 4e-9 * n * k / s, 2e-9 * rows * n * k / s
            print(f"product {rows} x {k} -> {n}: {1e6 * s:8.1f} us, weights {read:5.1f} GB/s, "
                  f"{rate:6.1f} GFLOP/s")  # fmt: skip


def layers() -> None:
    """A step, and what all steps take besides, of three kinds of layers."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for rows in (1, 4, 16, 64):
            for size in (64, 128, 256, 512):
                layer: nn.Module = kind(size, size).eval()
                given = [torch.rand(steps, rows, size) for steps in (8, 40)]
                short, long = (seconds(lambda m=layer, x=x: m(x), 3, 5) for x in given)
                step = (long - short) / 32
                print(f"{kind.__name__} of {size}, {rows} rows: {1e6 * step:8.1f} us a step, "
                      f"{1e6 * (short - 8 * step):8.1f} besides")  # fmt: skip


def elements() -> None:
    """Nanoseconds of an element of kernels that bytes say too little of."""
    real, odd = torch.rand(20000), torch.complex(torch.rand(20000), torch.rand(20000))
    rows, images = torch.rand(64, 1024), torch.rand(2, 8, 32, 32)
    volume = torch.rand(1, 4, 16, 16, 16)
    pairs = {
        p: (lambda p=p: torch.cdist(rows[:20], rows[20:60], p=p)) for p in (0.0, 1.0, math.inf)
    }
    cases: dict[str, tuple[Callable[[], Any], float]] = {
        "tanh": (lambda: real.tanh(), 2e4),
        "abs of complex": (lambda: odd.abs(), 2e4),
        "exp of complex": (lambda: odd.exp(), 2e4),
        "polar": (lambda: torch.polar(real, real), 2e4),
        "sort (comparisons)": (lambda: rows.sort(), 64 * 1024 * 10),
        "logcumsumexp": (lambda: rows.logcumsumexp(1), 64 * 1024),
        "bilinear": (lambda: F.interpolate(images, scale_factor=2, mode="bilinear"), 65536),
        "bicubic": (lambda: F.interpolate(images, scale_factor=2, mode="bicubic"), 65536),
        "trilinear": (lambda: F.interpolate(volume, scale_factor=2, mode="trilinear"), 131072),
        "distance of power 3": (lambda: torch.cdist(rows[:20], rows[20:60], p=3.0), 20 * 40 * 1024),
        **{f"distance of power {p}": (run, 20 * 40 * 1024) for p, run in pairs.items()},
    }
    for name, (run, count) in cases.items():
        print(f"{name}: {1e9 * seconds(run) / count:6.2f} ns")


def transforms() -> None:
    """Rates of Fourier transforms."""
    for rows, points in ((8, 1000), (64, 1024), (256, 1024), (16, 16384)):
        x = torch.rand(rows, points)
        s = seconds(lambda x=x: torch.fft.rfft(x))
        print(f"rfft {rows} x {points}: {1e6 * s:7.1f} us, "
              f"{2.5e-9 * rows * points * math.log2(points) / s:5.1f} GFLOP/s")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        products()
        layers()
        elements()
        transforms()
