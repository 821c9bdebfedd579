"""Steps in training and in evaluation mode, priced and timed: ``python training_mode.py DOCUMENT``.

Networks of the end-to-end check at small sizes on one core. DOCUMENT is one of that check, measured
on this machine (``datasets/measured/epyc_networks_small.json.gz``), for the device's figures;
prices are the shipped ones. A step is a forward pass with a cross-entropy loss, its gradients and a
fused AdamW update, in seconds of the thread; modes take turns, each is the median of its turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.passes.call_times import no_collection
from foreplan.cost_models.passes.end_to_end_networks import build, example
from foreplan.cost_models.passes.end_to_end_passes import Run, passes
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.specs import load_document, validate

#: (batch, tokens) or (batch, pixels) of each network.
CASES = {
    "gpt2": (4, 64), "bert": (4, 64), "opt": (4, 64), "resnet": (4, 64), "mobilenet_v2": (4, 64),
    "efficientnet": (4, 64), "vit": (4, 64), "swin": (4, 64),
}  # fmt: skip
MODES = (False, True)


def step_s(run: Run) -> float:
    """Seconds of the thread of a step."""
    start = time.thread_time()
    for part in run:
        part()
    return time.thread_time() - start


def main() -> None:
    """Print a row of a table for each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=25)
    asked = parser.parse_args()
    device = validate(Device, load_document(asked.document)["figures"], "figures")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        "| network, shape | evaluation: measured | predicted | training: measured | predicted |"
        " measured ratio | predicted ratio |\n|---|---|---|---|---|---|---|"
    )
    for name in asked.networks:
        network = build(name, "small")
        inputs = example(name, "small", CASES[name], "cpu", torch.float32)
        run = passes(network, inputs, "training")
        times: dict[bool, list[float]] = {mode: [] for mode in MODES}
        with no_collection():
            for _ in range(asked.turns):
                for mode in MODES:
                    network.train(mode)
                    step_s(run)  # what the other mode left in caches
                    times[mode].append(step_s(run))
        priced = {}
        for mode in MODES:
            steps = lower(capture(network, inputs, eager=True, training=mode), "training")
            book = replay_book(device, steps=steps)
            priced[mode] = replay_steps(steps, book, device).latency_s
        cells = [f"{name}, {' x '.join(map(str, CASES[name]))}"]
        for mode in MODES:
            cells += [f"{1e3 * s:.1f} ms" for s in (statistics.median(times[mode]), priced[mode])]
        for found in ({m: statistics.median(t) for m, t in times.items()}, priced):
            cells.append(f"{found[True] / found[False]:.2f}")
        print(f"| {' | '.join(cells)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
