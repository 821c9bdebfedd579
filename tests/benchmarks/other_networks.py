"""Passes of networks no table scores: ``python other_networks.py FILE DOCUMENT ... --measure``.

Eleven networks of the end-to-end check's lists that are none of the scored ones, at both shapes of
the small and the medium size, on one core: seconds of the thread of an inference and of the parts
of a training step, into FILE; without ``--measure`` an earlier FILE is scored. DOCUMENTs are those
of the check, measured on this machine (``datasets/measured/epyc_networks_small.json.gz``), for the
device's figures, and for the passes of seven small networks that calibrated them. Prices are the
shipped rates'. Constants of `processor_host` were fitted here (``--fit``) to what prices of the
operators leave: so many calls' time for each ATen call, of an update for each tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES
from foreplan.cost_models.passes.call_times import no_collection
from foreplan.cost_models.passes.end_to_end_networks import build, example, shapes_of
from foreplan.cost_models.passes.end_to_end_passes import passes
from foreplan.cost_models.passes.host_prices import MODES
from foreplan.cost_models.rates.processor_host import processor_host_s
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.specs import load_document, validate

NETWORKS = (
    "gpt_neox", "phi", "distilbert", "dinov2", "swin", "regnet", "mobilenet_v2", "bart", "t5",
    "segformer", "gemma",
)  # fmt: skip
PARTS = ("inference", "forward", "backward", "optimizer")


def measured(seconds: float) -> Iterator[dict[str, Any]]:
    """Median seconds of the parts of each pass."""
    for name in NETWORKS:
        for size in ("small", "medium"):
            module = build(name, size).eval()
            for shape in shapes_of(name, size):
                inputs = example(name, size, shape, "cpu", torch.float32)
                found: list[float] = []
                for phase in PHASES:
                    parts = passes(module, inputs, phase)
                    rows: list[list[float]] = []
                    begun = time.perf_counter()
                    while len(rows) < 8 or time.perf_counter() - begun < seconds:
                        rows.append([])
                        for part in parts:
                            started = time.thread_time()
                            part()
                            rows[-1].append(time.thread_time() - started)
                    found += [statistics.median(each) for each in zip(*rows[2:], strict=True)]
                yield {"network": name, "size": size, "shape": shape, "seconds": found}


def priced(row: dict[str, Any], device: Device) -> dict[str, tuple[float, float, int]]:
    """Seconds of operators, of the host, and calls, by part."""
    module = build(row["network"], row["size"]).eval()
    inputs = example(row["network"], row["size"], tuple(row["shape"]), "cpu", torch.float32)
    graph = capture(module, inputs, eager=True)
    found: dict[str, tuple[float, float, int]] = dict.fromkeys(PARTS, (0.0, 0.0, 0))
    for phase in PHASES:
        steps = lower(graph, phase)
        pass_ = replay_steps(steps, replay_book(device, steps=steps), device)
        hosts = processor_host_s(steps, pass_.prices, device)
        for step, price, host_s in zip(steps, pass_.prices, hosts, strict=True):
            part: str = "forward" if step.part == "loss" else step.part
            part = phase if phase == "inference" else part
            own_s, issue_s, calls = found[part]
            found[part] = (own_s + price.mean_s, issue_s + host_s, calls + step.calls)
    return found


def main() -> None:
    """Measure, print predicted over measured, and fit if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    documents = [load_document(path) for path in asked.documents]
    device = validate(Device, documents[0]["figures"], "figures")
    if asked.measure:
        with no_collection():
            asked.file.write_text(json.dumps(list(measured(asked.seconds))))
    rows = json.loads(asked.file.read_text())
    for document in documents if asked.fit else ():
        rows += [
            {"network": name, "size": "small", "shape": shapes_of(name, "small")[0],
             "seconds": [*(whole[mode] for mode in MODES), math.nan]}
            for name, _, whole, *_ in document["calibration"]
        ]  # fmt: skip
    table = [priced(row, device) for row in rows]
    errors: dict[tuple[str, str], list[float]] = {}
    for row, parts in zip(rows, table, strict=True):
        whole = dict(zip(PARTS, row["seconds"], strict=True))
        cells = []
        for phase, of in (("inference", PARTS[:1]), ("training", PARTS[1:])):
            real = sum(whole[part] for part in of)
            if math.isnan(real):
                continue
            error = sum(parts[part][0] + parts[part][1] for part in of) / real - 1
            errors.setdefault((row["size"], phase), []).append(abs(error))
            cells.append(f"{phase} {1e3 * real:7.2f} ms {100 * error:+4.0f} %")
        print(f"{row['network']:13} {row['size']:7} {row['shape']!s:9} {'  '.join(cells)}")
    for (size, phase), each in errors.items():
        print(f"{size} {phase}: {100 * statistics.mean(each):.1f} % in the mean")
    for at, part in enumerate(PARTS) if asked.fit else ():
        real_s, own_s, calls = (
            np.array([value(row, parts) for row, parts in zip(rows, table, strict=True)])
            for value in (
                lambda row, _, at=at: row["seconds"][at],
                lambda _, parts, part=part: parts[part][0],
                lambda _, parts, part=part: parts[part][2],
            )
        )
        call_s = device.launch_overhead_s or 0.0
        off = {
            each: float(np.nanmean(np.abs((own_s + each * call_s * calls) / real_s - 1)))
            for each in np.arange(0.0, 30.0, 0.25).tolist()
        }
        best = min(off, key=lambda each: off[each])
        print(f"{part}: {best} calls' time each, {100 * off[best]:.1f} %, {100 * off[0.0]:.1f} %"
              " without")  # fmt: skip


if __name__ == "__main__":
    main()
