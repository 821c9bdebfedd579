"""Functions of torch on a GPU against what ``predict`` says of them, each by itself.

    python gpu_functions.py measure cuda:0 measured.json [--scale 5]     (needs torch alone)
    python gpu_functions.py score measured.json h200

``measure`` runs every function from a CUDA graph, forward and backward, in FP32 and BF16: once with
operands that go round 300 MB, once on the same ones, whose bytes L2 holds. It takes two minutes. A
graph that cannot be recorded leaves CUDA unusable, so that the rest goes on in a new process.
``score`` needs no GPU: a prediction between the two times is right, outside of them the nearer one
counts. `cost_models.operators.slow_kernels` has its figures from scale 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]
#: Bytes that operands out of L2 go round, and copies at most.
_ROUND_BYTES, _MOST_COPIES, _REPEATS = 300e6, 24, 7


class Case(NamedTuple):
    """A function of tensors; the first has a gradient where there is one."""

    name: str
    function: Function
    shape: tuple[int, ...]
    others: Callable[[str, torch.dtype], Sequence[Tensor]] = lambda device, dtype: ()
    positive: bool = False
    backward: bool = True


_PLAIN, _CUBE, _ROWS = (4096, 2048), (32, 512, 512), (4096, 512)
_IMAGES, _WIDE_IMAGES = (8, 64, 64, 64), (16, 64, 112, 112)
_OF_ANY = (
    "sin cos tan atan sinh cosh exp expm1 tanh sigmoid erf abs neg square",
    "elu selu celu mish softplus logsigmoid gelu silu hardswish hardsigmoid relu6 leaky_relu",
)
_OF_POSITIVE = "sqrt rsqrt log log2 log1p reciprocal digamma lgamma erfinv asin acos logit"
_THROUGH = (
    "cumsum softmax log_softmax sum mean amax max var std norm logsumexp prod argmax flip roll"
)
#: Those that no gradient is computed of here.
_FORWARD = frozenset({"prod", "argmax"})


def cases(scale: int) -> Iterator[Case]:
    """Every function once; its first extent is a ``scale``-th of what figures are of."""
    for case in _maps(), _through(), _shapes(), _picks(), _losses(), _layers():
        for each in case:
            yield each._replace(shape=(max(1, each.shape[0] // scale), *each.shape[1:]))


def _maps() -> Iterator[Case]:
    for module, names in zip((torch, F), _OF_ANY, strict=True):
        for name in names.split():
            yield Case(name, getattr(module, name), _PLAIN)
    for name in _OF_POSITIVE.split():
        yield Case(name, getattr(torch, name), _PLAIN, positive=True)
    for name in ("bernoulli", "randn_like", "rand_like"):
        yield Case(name, getattr(torch, name), _PLAIN, positive=True, backward=False)
    yield Case("remainder", lambda x: torch.remainder(x, 0.7), _PLAIN)
    yield Case("rrelu", partial(F.rrelu, training=True), _PLAIN)
    yield Case("glu", F.glu, _PLAIN)
    yield Case("hypot", lambda x: torch.hypot(x, x + 1.0), _PLAIN)
    yield Case("logaddexp", lambda x: torch.logaddexp(x, x + 1.0), _PLAIN)
    yield Case("cube", lambda x: x**3, _PLAIN)
    yield Case("clamp", lambda x: x.clamp(-1.0, 1.0), _PLAIN)


def _through() -> Iterator[Case]:
    for name in _THROUGH.split():
        for dim in range(3):
            yield Case(f"{name} of {dim}", partial(_along, name, dim), _CUBE,
                       backward=name not in _FORWARD)  # fmt: skip
    yield Case("sort", lambda x: x.sort(-1)[0], (1024, 1024))
    yield Case("topk 8 of 64", lambda x: x.topk(8, -1)[0], (16384, 64))
    yield Case("topk 50 of 32000", lambda x: x.topk(50, -1)[0], (32, 32000))
    yield Case("topk 2 of 512", lambda x: x.topk(2, -1)[0], _ROWS)
    yield Case("kthvalue", lambda x: x.kthvalue(5, -1)[0], _ROWS)
    yield Case("median", lambda x: x.median(-1)[0], _ROWS)


def _along(name: str, dim: int, x: Tensor) -> Any:
    if name == "roll":
        return x.roll(3, dim)
    if name == "flip":
        return x.flip(dim)
    if name == "norm":
        return x.norm(dim=dim)
    found = getattr(x, name)(dim)
    return found[0] if name == "max" else found


def _shapes() -> Iterator[Case]:
    yield Case("tril", torch.tril, _CUBE)
    yield Case("triu", torch.triu, _CUBE)
    yield Case("im2col", lambda x: F.unfold(x, 3, padding=1), _IMAGES)
    yield Case("col2im", lambda x: F.fold(x, (64, 64), 3, padding=1), (8, 576, 4096))
    yield Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (8, 256, 64, 64))
    yield Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (8, 64, 128, 128))
    yield Case("channel_shuffle", lambda x: F.channel_shuffle(x, 4), (16, 128, 64, 64))
    modes = {"nearest": _IMAGES, "bilinear": _IMAGES, "bicubic": _IMAGES,
             "linear": (32, 128, 2048), "trilinear": (2, 32, 16, 32, 32)}  # fmt: skip
    for mode, shape in modes.items():
        yield Case(mode, partial(F.interpolate, scale_factor=2.0, mode=mode), shape)
    for n, shape in (("1d", (32, 256, 4096)), ("2d", _WIDE_IMAGES), ("3d", (4, 32, 16, 56, 56))):
        pools = {k: getattr(F, f"{k}_pool{n}") for k in ("max", "avg", "adaptive_avg")}
        yield Case(f"max_pool{n}", partial(pools["max"], kernel_size=2), shape)
        yield Case(f"avg_pool{n}", partial(pools["avg"], kernel_size=2), shape)
        yield Case(f"adaptive_avg_pool{n}", partial(pools["adaptive_avg"], output_size=7), shape)


def _picks() -> Iterator[Case]:
    def index(rows: int, *shape: int) -> Callable[[str, torch.dtype], Sequence[Tensor]]:
        return lambda device, _: (torch.randint(0, rows, shape, device=device),)

    def written(device: str, dtype: torch.dtype) -> Sequence[Tensor]:
        target = torch.zeros(4096, 128, device=device, dtype=dtype)
        return torch.randint(0, 4096, (65536,), device=device), target

    def wide(function: str, x: Tensor, i: Tensor, to: Tensor, *more: str) -> Any:
        at = i[: x.shape[0], None].expand(-1, 128)
        return getattr(to, function)(0, at, x, *more)

    yield Case("index_select", lambda x, i: x.index_select(0, i), (8192, 512), index(1600, 16384))
    yield Case("gather", lambda x, i: x.gather(1, i[: x.shape[0]]), _PLAIN, index(2048, *_PLAIN))
    yield Case("embedding", lambda x, i: F.embedding(i, x), (32000, 1024), index(6000, 8, 2048))
    yield Case("index_add", lambda x, i, to: to.index_add(0, i[: x.shape[0]], x), (65536, 128),
               written)  # fmt: skip
    yield Case("scatter_add", partial(wide, "scatter_add"), (65536, 128), written)
    yield Case("scatter", partial(wide, "scatter"), (65536, 128), written)
    yield Case("scatter_reduce", lambda x, i, to: wide("scatter_reduce", x, i, to, "amax"),
               (65536, 128), written, backward=False)  # fmt: skip
    yield Case("masked_scatter", lambda x, m: torch.zeros_like(x).masked_scatter(m[: len(x)], x),
               _PLAIN, lambda device, _: (torch.rand(*_PLAIN, device=device) > 0.5,),
               backward=False)  # fmt: skip
    yield Case("searchsorted", lambda x, at: torch.searchsorted(at, x), (2048, 1024),
               lambda device, dtype: (torch.linspace(-3.0, 3.0, 1024, device=device).to(dtype),),
               backward=False)  # fmt: skip
    yield Case("multinomial", lambda x: torch.multinomial(x, 1), (256, 32000), positive=True,
               backward=False)  # fmt: skip
    sampled = partial(F.grid_sample, align_corners=False)
    yield Case("grid_sample", lambda x, at: sampled(x, at[: x.shape[0]]), _IMAGES,
               lambda device, dtype: (_places(device).to(dtype),))  # fmt: skip


def _places(device: str) -> Tensor:
    return torch.rand(8, 64, 64, 2, device=device) * 2.0 - 1.0


def _losses() -> Iterator[Case]:
    def goals(device: str, dtype: torch.dtype) -> Sequence[Tensor]:
        return (torch.rand(*_PLAIN, device=device).to(dtype),)

    for name in (
        "mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "kl_div"
    ):  # fmt: skip
        yield Case(name, partial(_loss, name), _PLAIN, goals)
    yield Case("cross_entropy", lambda x, i: F.cross_entropy(x, i[: x.shape[0]]), (2048, 32000),
               lambda device, _: (torch.randint(0, 32000, (2048,), device=device),))  # fmt: skip


def _loss(name: str, x: Tensor, goal: Tensor) -> Any:
    more = {"reduction": "batchmean"} if name == "kl_div" else {}
    return getattr(F, name)(x, goal[: x.shape[0]], **more)


def _layers() -> Iterator[Case]:
    yield Case("layer_norm", lambda x: F.layer_norm(x, (2048,)), _PLAIN)
    yield Case("rms_norm", lambda x: F.rms_norm(x, (2048,)), _PLAIN)
    yield Case("group_norm", lambda x: F.group_norm(x, 32), (16, 128, 56, 56))
    yield Case("transposed", lambda x: x.transpose(-1, -2).contiguous(), _CUBE)
    yield Case("joined", lambda x: torch.cat([x, x], 0), _PLAIN)
    yield Case("added", lambda x: x + x.flip(0), _PLAIN)


# ---------------------------------------------------------------------------------- measuring


def measure(device: str, output: Path, scale: int, start: int) -> None:
    """Write seconds of each function, from the ``start``-th on."""
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: dict[str, dict[str, Any]] = json.loads(output.read_text()) if start else {}
    found["scale"] = {"scale": scale}
    runs = [(c, d) for c in cases(scale) for d in (torch.float32, torch.bfloat16)]
    for at, (case, dtype) in list(enumerate(runs))[start:]:
        row: dict[str, Any] = {}
        try:
            _time(case, device, dtype, row)
        except Exception as error:
            row["error"] = str(error)[:150]
        found[f"{case.name}/{str(dtype).removeprefix('torch.')}"] = row
        output.write_text(json.dumps(found))
        torch.cuda.empty_cache()
        if "error" in row:
            again = ["measure", device, str(output), "--scale", str(scale), "--start", str(at + 1)]
            os.execv(sys.executable, [sys.executable, __file__, *again])


def _given(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
    torch.manual_seed(0)
    drawn = torch.rand if case.positive else torch.randn
    x = drawn(*case.shape, device=device)
    return (x * 0.8 + 0.1 if case.positive else x).to(dtype), case.others(device, dtype)


def _time(case: Case, device: str, dtype: torch.dtype, row: dict[str, Any]) -> None:
    x, others = _given(case, device, dtype)
    size = max(1, 2 * x.numel() * x.element_size())
    xs = [x.clone() for _ in range(max(2, min(_MOST_COPIES, int(_ROUND_BYTES // size) + 1)))]
    with torch.no_grad():
        calls = [partial(case.function, each, *others) for each in xs]
        row["forward"] = [graph_s(calls), graph_s(calls[:1] * 8)]
    if not case.backward:
        return
    leaves = [each.detach().requires_grad_() for each in xs]
    made = [case.function(leaf, *others) for leaf in leaves]
    seeds = [torch.randn_like(out) for out in made]
    calls = [
        partial(torch.autograd.grad, out, [leaf], seed, retain_graph=True)
        for out, leaf, seed in zip(made, leaves, seeds, strict=True)
    ]
    row["backward"] = [graph_s(calls), graph_s(calls[:1] * 8)]


def graph_s(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of a call from a graph of all of them, on the current stream."""
    calls[0]()
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in calls:
            call()
    times = []
    for _ in range(_REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return sorted(times)[_REPEATS // 2] / len(calls)


# ------------------------------------------------------------------------------------ scoring


class Of(nn.Module):
    """A function of a tensor that is given, or of a parameter."""

    def __init__(self, function: Function, x: Tensor | None) -> None:
        super().__init__()
        self.function, self.x = function, None if x is None else nn.Parameter(x)

    def forward(self, *given: Tensor) -> Any:
        return self.function(*(given if self.x is None else (self.x, *given)))


def score(path: Path, device: str) -> None:
    """Print what predictions are of the measured times, the worst last, and how many are near."""
    found = json.loads(path.read_text())
    rows = []
    for case in cases(found["scale"]["scale"]):
        for dtype in (torch.float32, torch.bfloat16):
            key = f"{case.name}/{str(dtype).removeprefix('torch.')}"
            for part, times in found.get(key, {}).items():
                if part != "error":
                    took, low, high = _predicted_s(case, dtype, device, part), *sorted(times)
                    if not took:  # a view
                        continue
                    ratio = took / low if took < low else max(1.0, took / high)
                    rows.append((ratio, key, part, took, low, high))
    for ratio, key, part, *seconds in sorted(rows, key=lambda row: abs(math.log(row[0]))):
        told = " ".join(f"{1e6 * each:9.1f}" for each in seconds)
        print(f"{ratio:6.2f} {key:44} {part:8} {told} us")
    for within in (1.25, 1.5, 2.0, 3.0):
        near = sum(abs(math.log(row[0])) <= math.log(within) for row in rows)
        print(f"within a factor of {within}: {near} of {len(rows)}")


def _predicted_s(case: Case, dtype: torch.dtype, device: str, part: str) -> float:
    from foreplan import predict_latency

    x, others = _given(case, "cpu", dtype)
    forward = part == "forward"
    module = Of(case.function, None if forward else x)
    inputs = [*([x] if forward else []), *others]
    phase = "inference" if forward else "training"
    replay = predict_latency(module, device, inputs=inputs, phase=phase, execution="graph")
    return sum(
        (price.mean_s + replay.gap_s) * step.calls
        for price, step in zip(replay.prices, replay.steps, strict=True)
        if step.part == part
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    measured = ways.add_parser("measure")
    measured.add_argument("device")
    measured.add_argument("path", type=Path)
    measured.add_argument("--scale", type=int, default=1)
    measured.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    scored = ways.add_parser("score")
    scored.add_argument("path", type=Path)
    scored.add_argument("device", help="of the zoo")
    given = parser.parse_args()
    if given.way == "measure":
        measure(given.device, given.path, given.scale, given.start)
    else:
        score(given.path, given.device)


if __name__ == "__main__":
    main()
