"""Passes of networks no table scores: ``python other_networks.py FILE DOCUMENT ... --measure``.

Eleven networks of the end-to-end check's lists that are none of the scored ones, at both shapes of
the small and the medium size, on one core: seconds of the thread of an inference and of the parts
of a training step, into FILE; without ``--measure`` an earlier FILE is scored. DOCUMENTs are those
of the check, measured on this machine (``datasets/measured/epyc_networks_small.json.gz``), for the
device's figures, and for the passes of seven small networks that calibrated them. Prices are the
shipped rates'. Constants of `processor_host` were fitted here (``--fit``) to what prices of the
operators leave: so many calls' time for each ATen call, of an update for each tensor, and so many
for each part of a pass; ``--also`` another FILE. With ``--networks``, ``--sizes`` and ``--layers``
others are measured and scored: those that nothing was chosen on (`end_to_end_untouched`), or the
same with fewer and more layers, which tell what is a call's from what is a pass's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES
from foreplan.cost_models.passes.call_times import no_collection
from foreplan.cost_models.passes.end_to_end_networks import (
    KNOWN,
    SIZES,
    build,
    example,
    shapes_of,
)
from foreplan.cost_models.passes.end_to_end_passes import passes
from foreplan.cost_models.passes.host_prices import MODES
from foreplan.cost_models.rates.processor_host import _FEW, brought_share, processor_host_s
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.specs import load_document, validate

NETWORKS = (
    "gpt_neox", "phi", "distilbert", "dinov2", "swin", "regnet", "mobilenet_v2", "bart", "t5",
    "segformer", "gemma",
)  # fmt: skip
PARTS = ("inference", "forward", "backward", "optimizer")


def measured(
    networks: Sequence[str], sizes: Sequence[str], layers: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """Median seconds of the parts of each pass."""
    for name, size, depth in itertools.product(networks, sizes, layers or [0]):
        with patch.dict(SIZES[size], {"layers": depth or SIZES[size]["layers"]}):
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
            row = {"network": name, "size": size, "shape": shape, "seconds": found}
            yield row | ({"layers": depth} if depth else {})


class Priced(NamedTuple):
    """Seconds of a part's operators and of its host, its calls, and the share of code brought."""

    own_s: float = 0.0
    host_s: float = 0.0
    calls: int = 0
    brought: float = 1.0


def priced(row: dict[str, Any], device: Device) -> dict[str, Priced]:
    """The parts of a pass."""
    size = SIZES[row["size"]]
    with patch.dict(size, {"layers": row.get("layers", size["layers"])}):
        module = build(row["network"], row["size"]).eval()
    inputs = example(row["network"], row["size"], tuple(row["shape"]), "cpu", torch.float32)
    graph = capture(module, inputs, eager=True)
    found = dict.fromkeys(PARTS, Priced())
    for phase in PHASES:
        steps = lower(graph, phase)
        pass_ = replay_steps(steps, replay_book(device, steps=steps), device)
        hosts = processor_host_s(steps, pass_.prices, device)
        brought = brought_share(steps, device)
        for step, price, host_s in zip(steps, pass_.prices, hosts, strict=True):
            part: str = "forward" if step.part == "loss" else step.part
            part = phase if phase == "inference" else part
            of = found[part]
            found[part] = Priced(
                of.own_s + price.mean_s, of.host_s + host_s, of.calls + step.calls, brought
            )
    return found


def main() -> None:
    """Measure, print predicted over measured, and fit if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--networks", nargs="+", choices=KNOWN, default=list(NETWORKS))
    parser.add_argument("--sizes", nargs="+", default=["small", "medium"])
    parser.add_argument("--layers", nargs="+", type=int, default=[])
    parser.add_argument("--also", nargs="+", type=Path, default=[])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    documents = [load_document(path) for path in asked.documents]
    device = validate(Device, documents[0]["figures"], "figures")
    if asked.measure:
        with no_collection():
            rows = list(measured(asked.networks, asked.sizes, asked.layers, asked.seconds))
            asked.file.write_text(json.dumps(rows))
    rows = [row for path in (asked.file, *asked.also) for row in json.loads(path.read_text())]
    for document in documents if asked.fit else ():
        seen: Counter[str] = Counter()
        names = [name for name, *_ in document["calibration"]]
        # Documents of before calibration ran at their size have each network once, small.
        size = document["size"] if len(set(names)) < len(names) else "small"
        for name, _, whole, *_ in document["calibration"]:
            rows.append({
                "network": name, "size": size, "shape": shapes_of(name, size)[seen[name]],
                "seconds": [*(whole[mode] for mode in MODES), math.nan],
            })  # fmt: skip
            seen[name] += 1
    table = [priced(row, device) for row in rows]
    errors: dict[tuple[str, str], list[float]] = {}
    for row, parts in zip(rows, table, strict=True):
        whole = dict(zip(PARTS, row["seconds"], strict=True))
        cells = []
        for phase, of in (("inference", PARTS[:1]), ("training", PARTS[1:])):
            real = sum(whole[part] for part in of)
            if math.isnan(real):
                continue
            error = sum(parts[part].own_s + parts[part].host_s for part in of) / real - 1
            errors.setdefault((row["size"], phase), []).append(abs(error))
            cells.append(f"{phase} {1e3 * real:7.2f} ms {100 * error:+4.0f} %")
        name = f"{row['network']} {row.get('layers', '')}"
        print(f"{name:15} {row['size']:7} {row['shape']!s:9} {'  '.join(cells)}")
    for (size, phase), each in errors.items():
        print(f"{size} {phase}: {100 * statistics.mean(each):.1f} % in the mean")
    for at, part in enumerate(PARTS) if asked.fit else ():
        real_s, own_s, calls, share = (
            np.array([value(row, parts) for row, parts in zip(rows, table, strict=True)])
            for value in (
                lambda row, _, at=at: row["seconds"][at],
                lambda _, parts, part=part: parts[part].own_s,
                lambda _, parts, part=part: parts[part].calls,
                lambda _, parts, part=part: parts[part].brought,
            )
        )
        call_s = device.launch_overhead_s or 0.0
        once = share * calls**2 / (calls**2 + _FEW**2)
        whole = np.arange(0.0, 2500.0, 50.0).tolist() if part != "optimizer" else [0.0]
        off = {
            (each, every): float(
                np.nanmean(np.abs((own_s + call_s * (each * calls + every * once)) / real_s - 1))
            )
            for each, every in itertools.product(np.arange(0.0, 20.0, 0.5).tolist(), whole)
        }
        each, every = min(off, key=lambda pair: off[pair])
        print(f"{part}: {each} calls' time each and {every} for all, {100 * off[each, every]:.1f} "
              f"%, {100 * off[0.0, 0.0]:.1f} % without")  # fmt: skip


if __name__ == "__main__":
    main()
