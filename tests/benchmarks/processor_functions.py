"""Functions of torch on a processor against what ``predict`` says of them, each by itself.

    python processor_functions.py measure measured.json [--drawn]
    python processor_functions.py score measured.json DOCUMENT

``measure`` runs functions of recommenders, networks of graphs, films, generated images, scans and
samplers on one core in FP32, forward and backward, two sizes each: median seconds of the thread,
operands in whatever cache holds them from the run before. Constants are read off those sizes;
``--drawn`` takes two others, which check them. ``score`` compares prices of the same steps without
the host's, by the figures of the device in DOCUMENT, one of the end-to-end check.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_functions import Function, Of
from torch import Tensor

_REPEATS, _SECONDS = 40, 0.25

Sizes = tuple[int, ...]


class Case(NamedTuple):
    """A function of tensors; the first has a gradient where there is one."""

    name: str
    function: Function
    tensors: Sequence[Tensor]
    backward: bool = True


#: A family of functions: what makes one by its sizes, sizes that figures are of, and others.
_Family = tuple[Callable[..., Iterator[Case]], Sequence[Sizes], Sequence[Sizes]]


def cases(drawn: bool) -> Iterator[Case]:
    """Every function at the sizes that figures are of, or at others."""
    for make, fitted, others in _FAMILIES:
        for sizes in others if drawn else fitted:
            torch.manual_seed(0)
            for case in make(*sizes):
                yield case._replace(name=f"{case.name} {'x'.join(map(str, sizes))}")


def _bags(vocab: int, cols: int, bags: int, length: int) -> Iterator[Case]:
    table, ids = torch.randn(vocab, cols), torch.randint(0, vocab, (bags, length))
    for mode in ("sum", "mean", "max"):
        yield Case(f"embedding_bag {mode}", partial(_bag, mode), [table, ids])
    yield Case("embedding", lambda t, i: F.embedding(i, t), [table, ids])


def _bag(mode: str, table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, mode=mode)


def _edges(edges: int, nodes: int, cols: int) -> Iterator[Case]:
    x, to, at = (
        torch.randn(edges, cols),
        torch.zeros(nodes, cols),
        torch.randint(0, nodes, (edges,)),
    )
    wide = at[:, None].expand(-1, cols)
    yield Case("index_add", lambda x, to, at: to.index_add(0, at, x), [x, to, at])
    yield Case("scatter_add", lambda x, to, at: to.scatter_add(0, at, x), [x, to, wide])
    for how in ("amax", "mean", "sum"):
        yield Case(f"scatter_reduce {how}", partial(_reduced, how), [x, to, wide])
    table = torch.randn(nodes, cols)
    yield Case("index", lambda x, at: x[at], [table, at])
    yield Case("index_select", lambda x, at: x.index_select(0, at), [table, at])
    yield Case("gather", lambda x, at: x.gather(0, at), [table, wide.contiguous()])


def _reduced(how: str, x: Tensor, to: Tensor, at: Tensor) -> Tensor:
    return to.scatter_reduce(0, at, x, how, include_self=False)


def _volumes(cin: int, cout: int, frames: int, side: int) -> Iterator[Case]:
    x = torch.randn(1, cin, frames, side, side)
    for window in ((3, 3, 3), (1, 3, 3), (3, 1, 1)):
        convolved = partial(F.conv3d, padding=tuple(size // 2 for size in window))
        kernel = torch.randn(cout, cin, *window)
        name = "conv3d " + "".join(map(str, window))
        yield Case(name, convolved, [x, kernel])
        yield Case(f"{name} by filters", partial(_turned, convolved), [kernel, x])


def _turned(function: Function, second: Tensor, first: Tensor) -> Any:
    return function(first, second)


def _modulated(batch: int, cin: int, cout: int, side: int) -> Iterator[Case]:
    x, kernel = torch.randn(1, batch * cin, side, side), torch.randn(batch * cout, cin, 3, 3)
    convolved = partial(F.conv2d, padding=1, groups=batch)
    yield Case("modulated conv", convolved, [x, kernel])
    yield Case("modulated conv by filters", partial(_turned, convolved), [kernel, x])
    yield Case("modulation", lambda w, s: w[None] * s[:, None, :, None, None],
               [torch.randn(cout, cin, 3, 3), torch.randn(batch, cin)])  # fmt: skip


def _sampled(batch: int, channels: int, side: int, points: int) -> Iterator[Case]:
    x, grid = torch.randn(batch, channels, side, side), torch.rand(batch, points, 4, 2) * 2 - 1
    sample = partial(F.grid_sample, align_corners=False)
    yield Case("grid_sample", sample, [x, grid])
    yield Case("grid_sample by places", partial(_turned, sample), [grid, x])


def _scans(rows: int, cols: int, inner: int) -> Iterator[Case]:
    x = torch.randn(rows, cols, inner)
    for name in ("cumsum", "softmax", "logsumexp"):
        yield Case(f"{name} of middles", partial(_along, name), [x])
    yield Case("mean of middles", lambda x: x.mean(1), [x])
    yield Case("mean of all", torch.mean, [x])
    yield Case("mean of rows", lambda x: x.mean(-1), [x])
    yield Case("sum of rows", lambda x: x.sum(-1), [x])


def _along(name: str, x: Tensor) -> Any:
    return getattr(x, name)(1)


def _powers(rows: int, cols: int) -> Iterator[Case]:
    x = torch.rand(rows, cols) + 0.5
    for power in (2.0, 3.0, 4, 0.5, 1.7, -1.0):
        yield Case(f"x ** {power}", partial(torch.pow, exponent=power), [x])
    yield Case("2 ** x", lambda x: torch.pow(2.0, x), [x])
    yield Case("exp of masked", torch.exp, [x - 200.0 * (x > 1)])
    yield Case("softmax of masked", lambda x: x.softmax(-1),
               [torch.where(x > 1, -3e4, x)])  # fmt: skip
    yield Case("exp", torch.exp, [x])


def _draws(rows: int, cols: int) -> Iterator[Case]:
    p = torch.rand(rows, cols).softmax(-1)
    one, several = (partial(torch.multinomial, num_samples=count, replacement=count > 1)
                    for count in (1, 8))  # fmt: skip
    yield Case("multinomial", one, [p], backward=False)
    yield Case("multinomial of 8", several, [p], backward=False)
    x = torch.randn(rows, cols)
    for bounds in (16, 1024):
        at = torch.linspace(-2, 2, bounds)
        yield Case(f"searchsorted of {bounds}", partial(_turned, torch.searchsorted), [x, at],
                   backward=False)  # fmt: skip
        yield Case(f"bucketize by {bounds}", torch.bucketize, [x, at], backward=False)


def _images(batch: int, channels: int, side: int) -> Iterator[Case]:
    x = torch.randn(batch, channels, side, side)
    yield Case("reflect pad", partial(F.pad, pad=(2, 2, 2, 2), mode="reflect"), [x])
    yield Case("replicate pad", partial(F.pad, pad=(1, 1, 1, 1), mode="replicate"), [x])
    yield Case("circular pad", partial(F.pad, pad=(1, 1, 1, 1), mode="circular"), [x])
    yield Case("local_response_norm", partial(F.local_response_norm, size=5), [x])
    columns: Tensor = F.unfold(x, 3, padding=1)
    yield Case("unfold", partial(F.unfold, kernel_size=3, padding=1), [x])
    yield Case("fold", partial(F.fold, output_size=(side, side), kernel_size=3, padding=1),
               [columns])  # fmt: skip
    last = x.contiguous(memory_format=torch.channels_last)
    for name, of in (("", x), (", channels last", last)):
        for mode in ("nearest", "bilinear"):
            yield Case(f"{mode}{name}", partial(F.interpolate, scale_factor=2.0, mode=mode), [of])
        yield Case(f"pixel_shuffle{name}", partial(F.pixel_shuffle, upscale_factor=2), [of])
        yield Case(f"adaptive_avg_pool{name}", partial(F.adaptive_avg_pool2d, output_size=7), [of])
        yield Case(f"avg_pool{name}", partial(F.avg_pool2d, kernel_size=2), [of])
        yield Case(f"max_pool{name}", partial(F.max_pool2d, kernel_size=2), [of])
    yield Case("max_pool in bf16", partial(F.max_pool2d, kernel_size=2), [x.bfloat16()])
    yield Case("masked_fill", lambda x, m: x.masked_fill(m, 0.0), [x, x > 0])


def _doubles(rows: int, cols: int) -> Iterator[Case]:
    x, weight = torch.randn(rows, cols).double(), torch.randn(cols, cols).double()
    yield Case("linear of doubles", F.linear, [x, weight])
    yield Case("relu of doubles", torch.relu, [x])
    yield Case("exp of doubles", torch.exp, [x])
    yield Case("tanh of doubles", torch.tanh, [x])
    yield Case("softmax of doubles", lambda x: x.softmax(-1), [x])
    yield Case("layer_norm of doubles", lambda x: F.layer_norm(x, x.shape[-1:]), [x])
    yield Case("sum of doubles", lambda x: x.sum(-1), [x])


_FAMILIES: Sequence[_Family] = (
    (_bags, [(50_000, 32, 512, 20), (4_000, 128, 2048, 4)],
     [(20_000, 16, 3000, 8), (9_000, 64, 700, 30)]),
    (_edges, [(20_000, 2_000, 16), (12_000, 4_000, 96)], [(50_000, 9_000, 8), (7_000, 1_500, 200)]),
    (_volumes, [(256, 256, 2, 7), (64, 64, 8, 28)], [(384, 192, 4, 6), (48, 96, 6, 40)]),
    (_modulated, [(4, 128, 128, 16), (2, 64, 64, 48)], [(3, 192, 96, 20), (8, 32, 64, 32)]),
    (_sampled, [(8, 32, 32, 300), (4, 64, 24, 900)], [(16, 16, 40, 500), (2, 128, 20, 700)]),
    (_scans, [(8, 256, 512), (16, 100, 300)], [(4, 600, 256), (30, 64, 200)]),
    (_powers, [(128, 1024), (300, 700)], [(64, 700), (400, 1000)]),
    (_draws, [(64, 1000), (8, 32_000)], [(200, 700), (4, 50_000)]),
    (_doubles, [(256, 512), (700, 300)], [(400, 384), (1000, 200)]),
    (_images, [(2, 32, 56), (4, 64, 28)], [(8, 16, 36), (1, 128, 42)]),
)  # fmt: skip


# ---------------------------------------------------------------------------------- measuring


def measure(path: Path, drawn: bool) -> None:
    """Write median seconds of each function, forward and backward."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"drawn": drawn}
    for case in cases(drawn):
        found[case.name] = seconds(case)
    path.write_text(json.dumps(found, indent=0) + "\n")


def seconds(case: Case) -> dict[str, float]:
    """Of the thread, by part."""
    with torch.no_grad():
        found = {"forward": median_s(partial(case.function, *case.tensors))}
    if case.backward:
        source = case.tensors[0].detach().requires_grad_()
        made = case.function(source, *case.tensors[1:])
        by = torch.randn_like(made)
        back = partial(torch.autograd.grad, made, source, by, retain_graph=True)
        found["backward"] = median_s(back)
    return found


def median_s(call: Callable[[], object]) -> float:
    """Median seconds of the thread."""
    call()
    times: list[float] = []
    ends = time.perf_counter() + _SECONDS
    while len(times) < 5 or (len(times) < _REPEATS and time.perf_counter() < ends):
        before = time.thread_time()
        call()
        times.append(time.thread_time() - before)
    return statistics.median(times)


# ------------------------------------------------------------------------------------ scoring


def score(path: Path, document: Path, *, told: bool) -> None:
    """Print what predictions are of the measured times, the worst last, and how many are near.

    Args:
        path: what `measure` wrote.
        document: with the device's figures.
        told: whether steps and their prices are printed, too.
    """
    from foreplan.cost_models.lowering.graph_programs import lower
    from foreplan.cost_models.predictor import Predictor
    from foreplan.cost_models.replay import replay_book, replay_steps
    from foreplan.datasets.device import Device
    from foreplan.datasets.graphs.capture import capture
    from foreplan.datasets.specs import load_document, validate

    device = validate(Device, load_document(document)["figures"], "figures")
    predictor = Predictor.load("pretrained:ops")
    found = json.loads(path.read_text())
    rows = []
    for case in cases(found["drawn"]):
        for part, took in found.get(case.name, {}).items():
            forward = part == "forward"
            first, *others = case.tensors
            module = Of(case.function, None if forward else first)
            inputs = [*([first] if forward else []), *others]
            graph = capture(module, inputs, eager=True, training=not forward)
            steps = lower(graph, "inference" if forward else "training")
            book = replay_book(device, steps=steps, predictor=predictor)
            prices = replay_steps(steps, book, device).prices
            mine = [(step, price.mean_s) for step, price in zip(steps, prices, strict=True)
                    if step.part == part and step.target != "cross_entropy"]  # fmt: skip
            if mine:  # else a view
                rows.append((sum(s for _, s in mine) / took, case.name, part, took, mine))
    for ratio, name, part, took, mine in sorted(rows, key=lambda row: abs(math.log(row[0]))):
        print(f"{ratio:6.2f} {name:44} {part:8} {1e6 * took:9.1f} us")
        for step, price in mine if told else ():
            print(f"       {1e6 * price:9.1f} {step.target} {step.work}")
    for within in (1.25, 1.5, 2.0, 3.0):
        near = sum(abs(math.log(row[0])) <= math.log(within) for row in rows)
        print(f"within a factor of {within}: {near} of {len(rows)}")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    measured = ways.add_parser("measure")
    measured.add_argument("path", type=Path)
    measured.add_argument(
        "--drawn", action="store_true", help="sizes that no constant was read off"
    )
    scored = ways.add_parser("score")
    scored.add_argument("path", type=Path)
    scored.add_argument("document", type=Path)
    scored.add_argument("--steps", action="store_true", help="prices of steps, too")
    given = parser.parse_args()
    if given.way == "measure":
        measure(given.path, given.drawn)
    else:
        score(given.path, given.document, told=given.steps)


if __name__ == "__main__":
    main()
