"""Passes of tiny networks, back to back: ``python small_networks.py FILE DOCUMENT --measure``.

Chains of maps, small perceptrons, convolutions, blocks of transformers and loops, whose weights,
activations and code fit into a core's own caches or nearly so: seconds of the thread of an
inference and of the parts of a training step, into FILE; without ``--measure`` an earlier FILE is
scored. DOCUMENT is one of the end-to-end check, measured on this machine, for the device's figures.
``--fit`` prints the constants of `processor_host` for small passes, fitted to the networks of
`FITTED`; errors are of those and of `OTHERS`, which no constant knows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Phase, Step
from foreplan.cost_models.passes.call_times import no_collection
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.rates import processor_host, reuse
from foreplan.cost_models.rates.processor_host import processor_host_s
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.specs import load_document, validate

PARTS = ("inference", "forward", "backward", "optimizer")
#: A network and its inputs, made when it is asked for.
Made = tuple[nn.Module, Sequence[torch.Tensor]]


class Chain(nn.Module):
    """Maps in turn, ``count`` of them; a scale before them makes it trainable."""

    def __init__(self, maps: Sequence[Callable[[Any], Any]], count: int, scaled: bool) -> None:
        super().__init__()
        self.maps, self.count = tuple(maps), count
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        x = x if self.scale is None else x * self.scale
        for each in itertools.islice(itertools.cycle(self.maps), self.count):
            x = each(x)
        return x


def _one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _mixed() -> list[Callable[[Any], Any]]:
    return [torch.relu, _one, torch.sigmoid, lambda x: x * 0.5, torch.tanh]


class Mlp(nn.Module):
    """Linears and maps between them."""

    def __init__(self, depth: int, width: int, outputs: int = 0, inputs: int = 0) -> None:
        super().__init__()
        sizes = [inputs or width, *[width] * (depth - 1), outputs or width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width)."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


class Linears(nn.Sequential):
    """Linears alone."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(depth)))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width)."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Looped(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module, width: int) -> None:
        super().__init__()
        self.cell, self.width = cell, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(steps, batch, inputs)."""
        state = x.new_zeros(x.shape[1], self.width)
        for each in x:
            state = self.cell(each, state)
        return state


class Mixer(nn.Module):
    """A step of an RWKV-like loop: a state that decays, and gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.value, self.gate = (nn.Linear(width, width) for _ in range(3))
        self.decay = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """(batch, width) each."""
        key = torch.exp(-self.key(x).abs())
        state = state * torch.exp(-torch.exp(self.decay)) + key * self.value(x)
        return torch.sigmoid(self.gate(x)) * state / (1 + key)


class Tanh(nn.Module):
    """Elman's step, by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.old, self.new = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """(batch, width) each."""
        return torch.tanh(self.old(state) + self.new(x))


def _cnn(channels: Sequence[int], side: int, classes: int, norm: bool) -> Made:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers.append(nn.Conv2d(before, after, 3, padding=1))
        layers += [nn.BatchNorm2d(after)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    left = channels[-1] * (side >> (len(channels) - 1)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(left, classes)), [
        torch.randn(1, channels[0], side, side)
    ]


def _lenet() -> Made:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84),
        nn.Tanh(), nn.Linear(84, 10),
    ), [torch.randn(1, 1, 28, 28)]  # fmt: skip


def _keywords() -> Made:
    return nn.Sequential(
        nn.Conv2d(1, 16, (8, 4), stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(),
        nn.Conv2d(16, 24, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 12),
    ), [torch.randn(1, 1, 49, 10)]  # fmt: skip


def _chain(
    maps: Sequence[Callable[[Any], Any]], count: int, *shape: int, scaled: bool = True
) -> Made:
    return Chain(maps, count, scaled), [torch.randn(shape)]


def _mlp(rows: int, *sizes: int) -> Made:
    return Mlp(*sizes), [torch.randn(rows, sizes[3] if len(sizes) > 3 else sizes[1])]


def _linears(rows: int, depth: int, width: int) -> Made:
    return Linears(depth, width), [torch.randn(rows, width)]


def _blocks(count: int, tokens: int, width: int, heads: int) -> Made:
    blocks = nn.Sequential(*(Block(width, heads) for _ in range(count)))
    return blocks, [torch.randn(1, tokens, width)]


def _loop(cell: Callable[[], nn.Module], steps: int, width: int, rows: int = 1) -> Made:
    return Looped(cell(), width), [torch.randn(steps, rows, width)]


FITTED: dict[str, Callable[[], Made]] = {
    **{f"relu x {n}": partial(_chain, [torch.relu], n, 4, 64) for n in (6, 30, 120, 500)},
    **{f"maps x {n}": partial(_chain, _mixed(), n, 8, 96) for n in (3, 15, 60, 240)},
    **{
        f"mlp {n} x {width}, {rows}": partial(_mlp, rows, n, width)
        for n, width, rows in (
            (3, 32, 1), (3, 256, 4), (6, 128, 16), (12, 48, 1), (12, 160, 4), (12, 320, 1),
            (30, 96, 1), (30, 192, 2), (60, 64, 8), (8, 512, 1),
        )
    },
    **{
        f"cnn {channels} {side}": partial(_cnn, channels, side, 10, norm)
        for channels, side, norm in (
            ((1, 8, 16), 16, False), ((3, 16, 32, 64), 32, True), ((3, 8, 8, 16), 24, True),
        )
    },
    **{
        f"blocks {count} x {width}, {tokens}": partial(_blocks, count, tokens, width, 4)
        for count, tokens, width in (
            (1, 8, 32), (1, 32, 96), (2, 4, 64), (3, 8, 128), (4, 1, 48), (4, 16, 160), (8, 1, 64),
        )
    },
    **{f"elman {n} x 48": partial(_loop, partial(Tanh, 48), n, 48) for n in (4, 16, 64)},
}  # fmt: skip
OTHERS: dict[str, Callable[[], Made]] = {
    **{
        f"x + 1 x {n}": partial(_chain, [_one], n, 2, 128, scaled=False)
        for n in (1, 10, 20, 40, 200, 800)
    },
    "linears 10 x 64": partial(_linears, 1, 10, 64),
    "linears 20 x 128": partial(_linears, 1, 20, 128),
    "policy 4-64-64-2": partial(_mlp, 1, 3, 64, 2, 4),
    "policy, 32 rows": partial(_mlp, 32, 3, 64, 2, 4),
    "lenet": _lenet,
    "keywords": _keywords,
    "block 64, 16 tokens": partial(_blocks, 1, 16, 64, 4),
    "blocks 2 x 128, a token": partial(_blocks, 2, 1, 128, 4),
    "blocks 6 x 96, 12 tokens": partial(_blocks, 6, 12, 96, 4),
    "gru cell, 24 steps": partial(_loop, partial(nn.GRUCell, 40, 40), 24, 40),
    "mixer, 48 steps": partial(_loop, partial(Mixer, 32), 48, 32),
    "linears 6 x 400": partial(_linears, 2, 6, 400),
    "cnn 4": partial(_cnn, (3, 12, 24, 48, 48), 32, 20, True),
}


def training_parts(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[Callable[[], object]]:
    """A step as `end_to_end_passes` runs one, of a module whose result are logits."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        logits = module(*inputs)
        flat = logits.reshape(-1, logits.shape[-1])
        goal = torch.zeros(flat.shape[0], dtype=torch.int64)
        losses[:] = [nn.functional.cross_entropy(flat, goal)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return [forward, lambda: losses.pop().backward(), update]  # type: ignore[no-untyped-call]


def measured(rounds: int) -> Iterator[dict[str, Any]]:
    """Median seconds over rounds of the parts of each network's passes, which take turns."""
    runs: dict[tuple[str, Phase], list[Callable[[], object]]] = {}
    for name, make in (FITTED | OTHERS).items():
        module, inputs = make()
        runs[name, "inference"] = [partial(torch.inference_mode()(module.eval()), *inputs)]
        if any(True for _ in module.parameters()):
            runs[name, "training"] = training_parts(make()[0].train(), inputs)
    found: dict[tuple[str, Phase], list[list[float]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, parts in runs.items():
            rows: list[list[float]] = []
            ends = time.perf_counter() + 0.02
            while len(rows) < 8 or time.perf_counter() < ends:
                times = [time.thread_time()]
                for part in parts:
                    part()
                    times.append(time.thread_time())
                rows.append([after - before for before, after in itertools.pairwise(times)])
            found[key].append([statistics.median(each) for each in zip(*rows[2:], strict=True)])
    for name in FITTED | OTHERS:
        seconds = [
            statistics.median(each)
            for phase in PHASES
            for each in zip(*found.get((name, phase), ()), strict=True)
        ]
        yield {"network": name, "seconds": seconds}


class Pass(NamedTuple):
    """A pass of a network, as it was lowered, and seconds of its parts as measured."""

    name: str
    phase: Phase
    steps: list[Step]
    real_s: dict[str, float]


def lowered(rows: Sequence[dict[str, Any]]) -> Iterator[Pass]:
    """The passes that were measured."""
    for row in rows:
        module, inputs = (FITTED | OTHERS)[row["network"]]()
        seconds = dict(zip(PARTS, row["seconds"], strict=False))
        for phase in PHASES:
            real_s = {
                part: seconds[part] for part in (PARTS[:1] if phase == "inference" else PARTS[1:])
                if part in seconds
            }  # fmt: skip
            if real_s:
                graph = capture(module, inputs, eager=True, training=phase == "training")
                yield Pass(row["network"], phase, lower(graph, phase), real_s)


def predicted(of: Pass, device: Device, predictor: Predictor) -> dict[str, float]:
    """Seconds of its parts, host and all."""
    book = replay_book(device, steps=of.steps, predictor=predictor)
    pass_ = replay_steps(of.steps, book, device)
    hosts = processor_host_s(of.steps, pass_.prices, device)
    found = dict.fromkeys(of.real_s, 0.0)
    for step, price, host_s in zip(of.steps, pass_.prices, hosts, strict=True):
        part: str = "forward" if step.part == "loss" else step.part
        found[of.phase if of.phase == "inference" else part] += price.mean_s + host_s
    return found


def off(passes: Sequence[Pass], part: str, device: Device, predictor: Predictor) -> float:
    """Mean of ``|ln(predicted / measured)|`` of a part."""
    return statistics.mean(
        abs(math.log(predicted(each, device, predictor)[part] / each.real_s[part]))
        for each in passes
    )


def fit(passes: Sequence[Pass], device: Device, predictor: Predictor) -> None:
    """Print the constants of near passes: `reuse`'s of inferences, then `processor_host`'s."""
    inferences = [each for each in passes if each.phase == "inference"]
    steps = [each for each in passes if each.phase == "training"]
    tried = {}
    for hot in np.arange(0.15, 0.85, 0.05).tolist():
        with patch.object(reuse, "_HOT", hot):
            tried[hot] = off(inferences, "inference", device, predictor)
    hot = min(tried, key=lambda each: tried[each])
    print(f"hot {hot:.2f}: {tried[hot]:.2f}, cold {off_without(inferences, device, predictor):.2f}")
    for part, names in (("forward", ("forward", "loss")), ("optimizer", ("optimizer",))):
        tried = {}
        for near in np.arange(0.0, 13.0, 1.0).tolist():
            calls = {**processor_host._NEAR, **dict.fromkeys(names, near)}
            with patch.object(reuse, "_HOT", hot), patch.object(processor_host, "_NEAR", calls):
                tried[near] = off(steps, part, device, predictor)
        near = min(tried, key=lambda each: tried[each])
        print(f"{part} {near:.0f}: {tried[near]:.2f}")


def off_without(passes: Sequence[Pass], device: Device, predictor: Predictor) -> float:
    """The same where no pass is known to be near."""
    with (
        patch.object(reuse, "spilled_share", lambda *_: 1.0),
        patch.object(processor_host, "spilled_share", lambda *_: 1.0),
    ):
        return off(passes, "inference", device, predictor)


def main() -> None:
    """Measure, fit if asked, and print measured and predicted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("document", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device = validate(Device, load_document(asked.document)["figures"], "figures")
    if asked.measure:
        with no_collection():
            rows = [json.dumps(row) for row in measured(asked.rounds)]
            asked.file.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    predictor = Predictor.load("pretrained:ops")
    found = list(lowered(json.loads(asked.file.read_text())))
    if asked.fit:
        fit([each for each in found if each.name in FITTED], device, predictor)
    errors: dict[tuple[str, Phase], list[float]] = {}
    print("network | phase | measured us | predicted us | ratio")
    for each in found:
        real, told = (
            1e6 * sum(parts.values()) for parts in (each.real_s, predicted(each, device, predictor))
        )
        print(f"{each.name:26} {each.phase:9} {real:7.0f} {told:7.0f} {told / real:5.2f}")
        which = "fitted" if each.name in FITTED else "others"
        errors.setdefault((which, each.phase), []).append(abs(math.log(told / real)))
    for (which, phase), of in errors.items():
        print(f"{which}, {phase}: a factor of {math.exp(statistics.mean(of)):.2f} in the mean")


if __name__ == "__main__":
    main()
