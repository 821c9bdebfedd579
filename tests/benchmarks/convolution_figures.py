"""What convolutions take against their price: ``python convolution_figures.py FIGURES [--seed N]``.

One core in fp32: lines, images and volumes of drawn sizes, forward and the gradients by images and
by filters, seconds of the thread behind `BEHIND` of other data over the price that the shipped
rates have for them. FIGURES is a document of the end-to-end check, measured on this machine, or the
device's figures alone. `cost_models.rates.wide_windows` and its neighbours have their constants
from seeds 0 and 1; other seeds check them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.rates.rate_law import Waits
from foreplan.cost_models.rates.reuse import waiting_share
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import load_document, validate

#: Bytes that go through the caches before a call.
BEHIND = 4 << 20
_ROUNDS = 9
#: FLOP of what is drawn: none that takes no time, none that takes more than 30 ms.
_LEAST, _MOST = 4e5, 2e9
#: Elements of images and results: none that the allocator gives back to the system.
_MOVED = 6e6
#: Of which every kind is drawn.
KINDS = (
    "volumes", "lines", "few outputs", "few inputs", "by channel", "by channel, last", "grouped",
    "uneven groups", "grouped volumes", "images",
)  # fmt: skip


class Convolution(NamedTuple):
    """Sizes of one, alike in each of its dimensions but a volume's first.

    Attributes:
        sides: of an image (positions by dimension).
        window: elements along each side; padded by half of it.
    """

    kind: str
    batch: int
    cin: int
    cout: int
    groups: int
    sides: tuple[int, ...]
    window: int
    stride: int
    last: bool = False

    @property
    def outputs(self) -> list[int]:
        """Positions of the result by dimension."""
        padded = 2 * (self.window // 2) - self.window
        return [(side + padded) // self.stride + 1 for side in self.sides]

    def program(self, word: str) -> Program:
        """One of its three passes by the name of its kernel."""
        kernel = f"torch.conv{len(self.sides)}d{'_channels_last' * self.last}_bias{word}"
        return program(
            "conv", Variant("fp32", "fp32", kernel), batch=self.batch, groups=self.groups,
            cin=self.cin, cout=self.cout, taps=self.window ** len(self.sides),
            inputs=math.prod(self.sides), outputs=math.prod(self.outputs),
        )  # fmt: skip


def drawn(kind: str, rng: np.random.Generator) -> Convolution:
    """A convolution of a kind."""

    def one(*of: int) -> int:
        return int(rng.choice(of))

    def size(least: int, most: int, step: int = 1) -> int:
        found = math.exp(rng.uniform(math.log(least), math.log(most)))
        return max(step, round(found / step) * step)

    batch, stride, window = one(1, 1, 2, 4, 8), one(1, 1, 1, 2), one(1, 3, 3, 5)
    cin, cout, groups = size(16, 320, 4), size(16, 320, 4), 1
    sides: tuple[int, ...] = (size(7, 96),) * 2
    if kind == "volumes":
        side = size(6, 64)
        cin, cout = one(1, 3, *[size(4, 64, 4) for _ in range(5)]), size(4, 96, 4)
        sides, window = (size(3, 16), side, side), one(1, 3, 3, 3, 5)
    elif kind == "lines":
        sides, window = (size(40, 4000),), one(1, 2, 3, 3, 5, 8, 10)
        cin, cout = one(1, *[size(16, 512, 4) for _ in range(4)]), size(16, 512, 4)
        stride = one(1, 1, 2, 3)
    elif kind == "few outputs":
        cout, window = size(1, 12), one(1, 3, 3, 5, 7, 9)
    elif kind == "few inputs":
        cin, window = size(1, 12), one(1, 3, 3, 5, 7)
    elif kind.startswith("by channel"):
        groups = cout = cin
        window, sides = one(3, 3, 5, 7), (size(6, 112),) * 2
    elif kind == "grouped":
        groups, window = one(2, 2, 4, 8, 16, 32), one(1, 3, 3, 5)
        cin, cout = (groups * one(size(4, 96, 4), size(16, 128, 16)) for _ in "io")
    elif kind == "uneven groups":
        groups, window = one(2, 4, 8, 16, 32), one(3, 3, 5)
        cin, cout = groups * size(2, 48), groups * size(2, 48)
    elif kind == "grouped volumes":
        side, groups, window = size(6, 40), size(8, 128, 8), one(3, 3, 5)
        sides = (size(3, 16), side, side)
        cin = cout = groups * one(1, 1, 4, 8)
    last = kind.endswith("last") or (kind == "images" and bool(rng.random() < 0.3))
    return Convolution(kind, batch, cin, cout, groups, sides, window, stride, last)


def calls(of: Convolution) -> dict[str, tuple[Callable[[], object], torch.Tensor]]:
    """Its passes by the word of their kernel, and what is written before each."""
    dims, groups = len(of.sides), of.groups
    layout = torch.channels_last if of.last else torch.contiguous_format
    x = torch.randn(of.batch, of.cin, *of.sides).to(memory_format=layout)
    g = torch.randn(of.batch, of.cout, *of.outputs).to(memory_format=layout)
    w, bias = torch.randn(of.cout, of.cin // groups, *[of.window] * dims), torch.randn(of.cout)
    how = ([of.stride] * dims, [of.window // 2] * dims, [1] * dims)
    forward = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    back = partial(
        torch.ops.aten.convolution_backward.default, g, x, w, [of.cout], *how, False, [0] * dims,
        groups,
    )  # fmt: skip
    return {
        "": (partial(forward, x, w, bias, *how, groups), x),
        "_input_gradient": (partial(back, [True, False, False]), g),
        "_weight_gradient": (partial(back, [False, True, False]), g),
    }


def seconds(call: Callable[[], object], written: torch.Tensor, other: torch.Tensor) -> float:
    """Median of a call behind other data."""
    held, found = written.clone(), []
    call()
    for _ in range(_ROUNDS):
        other.sum()
        written.copy_(held)
        started = time.thread_time()
        call()
        found.append(time.thread_time() - started)
    return statistics.median(found)


def sizes(kinds: list[str], many: int, seed: int) -> Iterator[Convolution]:
    """So many of each kind."""
    for kind in kinds:
        rng = np.random.default_rng([seed, KINDS.index(kind)])
        found = 0
        while found < many:
            each = drawn(kind, rng)
            moved = each.batch * (each.cin * math.prod(each.sides)
                                  + each.cout * math.prod(each.outputs))  # fmt: skip
            if min(each.outputs) > 0 and moved < _MOVED and _LEAST < each.program("").flops < _MOST:
                found += 1
                yield each


def main() -> None:
    """Print the ratio of measured to predicted for each kind and pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--many", type=int, default=16, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="every case, as JSON lines")
    asked = parser.parse_args()
    document = load_document(asked.figures)
    device = validate(Device, document.get("figures", document), "figures")
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    other = torch.ones(BEHIND // 4)
    waits = {device.name: Waits(waiting_share(device, BEHIND))}
    source = PredictedSource(Predictor.load(), devices={device.name: device}, waits=waits)
    found: dict[str, list[tuple[float, float]]] = {}
    lines = []
    with torch.no_grad():
        for each in sizes(asked.kinds, asked.many, asked.seed):
            for word, (call, written) in calls(each).items():
                item, took = each.program(word), seconds(call, written, other)
                price = source.estimate(item, device.name)
                predicted = price.mean_s if price else math.nan
                found.setdefault(each.kind + word, []).append((took, predicted))
                lines.append(json.dumps([each._asdict(), word, took, predicted]))
                if asked.each:
                    print(f"{1e3 * took:9.3f} ms, predicted {1e3 * predicted:9.3f} {each} {word}")
    if asked.output:
        asked.output.write_text("\n".join(lines) + "\n")
    for kind, times in found.items():
        ratios = [m / p for m, p in times]
        off = [abs(math.log(r)) for r in ratios]
        within = statistics.mean(o < math.log(1.5) for o in off)
        print(f"{kind:28} {len(times):3}: measured / predicted {statistics.median(ratios):5.2f} "
              f"({min(ratios):5.2f} to {max(ratios):5.2f}), factor "
              f"{math.exp(statistics.mean(off)):.2f}, {within:4.0%} within 1.5")  # fmt: skip


if __name__ == "__main__":
    main()
