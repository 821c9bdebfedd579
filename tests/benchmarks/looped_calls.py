"""Loops of small calls on a processor, against what ``predict`` says of them.

    taskset -c 1 python looped_calls.py loops.json DOCUMENT [--measure]

Recurrences of Python, whose steps follow each other without a module or a weight between them: a
pass goes round the same few calls on operands of some KiB. Two sizes each, for inference and for
the parts of a training step; median seconds of the thread on one core in FP32. DOCUMENT is one of
the end-to-end check, for the device's figures. ``rates/loops.py`` took its constants from these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from other_networks import PARTS
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES
from foreplan.cost_models.passes.end_to_end_passes import passes
from foreplan.cost_models.rates.processor_host import processor_host_s
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.specs import load_document, validate

SIZES = ((40, 64), (150, 1024))
_ROUNDS, _SECONDS = 8, 0.5


def oscillator(x: Tensor, n: int) -> Tensor:
    place, speed = x, x * 0.5
    for _ in range(n):
        speed = speed - place * 0.01
        place = place + speed * 0.01
    return place


def powers(x: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x / (x * x).sum(-1, keepdim=True).sqrt()
    return x


def gates(x: Tensor, n: int) -> Tensor:
    state = x
    for _ in range(n):
        gate = torch.sigmoid(x + state)
        state = gate * state + (1.0 - gate) * torch.tanh(state)
    return state


def weighted(x: Tensor, n: int) -> Tensor:
    """A sum of exponentials that is kept within bounds, as attention without a softmax has it."""
    top, total = x, x
    for _ in range(n):
        new = torch.maximum(top, x)
        total = torch.exp(top - new) * total + torch.exp(x - new)
        top = new
    return total / top


def rows(x: Tensor, n: int) -> Tensor:
    made = x[0]
    found = []
    for _ in range(n):
        made = 0.9 * made + x[1]
        found.append(made)
    return torch.stack(found)


LOOPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    each.__name__: each for each in (oscillator, powers, gates, weighted, rows)
}


class Looped(nn.Module):
    """A loop behind one weight, so that there is something to train."""

    def __init__(self, name: str, n: int, width: int) -> None:
        super().__init__()
        self.loop, self.n = LOOPS[name], n
        self.weight = nn.Parameter(torch.rand(2, width) + 0.5)

    def forward(self, x: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.loop(x * self.weight, self.n))


def measured() -> Iterator[dict[str, Any]]:
    """Median seconds of the parts of each pass."""
    for name, (n, width) in itertools.product(LOOPS, SIZES):
        module, inputs = Looped(name, n, width).eval(), {"x": torch.rand(2, width) + 0.5}
        found = []
        for phase in PHASES:
            parts = passes(module, inputs, phase)
            times: list[list[float]] = []
            begun = time.perf_counter()
            while len(times) < _ROUNDS or time.perf_counter() - begun < _SECONDS:
                times.append([])
                for part in parts:
                    started = time.thread_time()
                    part()
                    times[-1].append(time.thread_time() - started)
            found += [statistics.median(each) for each in zip(*times[2:], strict=True)]
        yield {"loop": name, "n": n, "width": width, "seconds": found}


def priced(row: dict[str, Any], device: Device) -> dict[str, tuple[float, float, int]]:
    """Seconds of a part's operators and of its host, and its calls."""
    module = Looped(row["loop"], row["n"], row["width"]).eval()
    graph = capture(module, {"x": torch.rand(2, row["width"])}, eager=True)
    found = dict.fromkeys(PARTS, (0.0, 0.0, 0))
    for phase in PHASES:
        steps = lower(graph, phase)
        prices = replay_steps(steps, replay_book(device, steps=steps), device).prices
        hosts = processor_host_s(steps, prices, device)
        for step, price, host_s in zip(steps, prices, hosts, strict=True):
            part: str = "forward" if step.part == "loss" else step.part
            part = phase if phase == "inference" else part
            own, host, calls = found[part]
            found[part] = (own + price.mean_s, host + host_s, calls + step.calls)
    return found


def main() -> None:
    """Measure if asked, and print microseconds a call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("document", type=Path)
    parser.add_argument("--measure", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.measure:
        asked.file.write_text(json.dumps(list(measured())))
    device = validate(Device, load_document(asked.document)["figures"], "figures")
    for row in json.loads(asked.file.read_text()):
        parts = priced(row, device)
        for part, seconds in zip(PARTS[:3], row["seconds"], strict=False):
            own, host, calls = parts[part]
            each = 1e6 / calls
            print(
                f"{row['loop']:10s} {row['n']:3d} x {row['width']:4d} {part:9s} {calls:5d} calls,",
                f"us a call: measured {seconds * each:5.2f}, own {own * each:5.2f},",
                f"host {host * each:5.2f}, predicted {(own + host) / seconds - 1:+.0%}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
