"""What the host of a GPU takes for eager passes: ``python gpu_host.py measure|fit|score FILE``.

``measure`` times single small calls by kind, and passes of networks: the whole, when Python was
done with it, and its parts with the device idle at their start; lines of Python and modules that a
pass runs are counted. Nothing is traced, which takes longer than all of that. ``fit`` traces the
small networks and fits the constants of `foreplan.cost_models.rates.gpu_host` to the best round of
each part, for least mean absolute error; errors are of networks left out in turn. ``score`` says
what is predicted of the large networks, which nothing is fitted to, from figures of a device alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch.nn.modules.module import register_module_forward_pre_hook

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Step
from foreplan.cost_models.passes.call_timer import DTYPES
from foreplan.cost_models.passes.call_times import first_line, no_collection
from foreplan.cost_models.passes.end_to_end_networks import (
    KNOWN,
    NETWORKS,
    build,
    example,
    shapes_of,
)
from foreplan.cost_models.passes.end_to_end_passes import of_phases, passes
from foreplan.cost_models.passes.host_calls import measured_calls, measured_update
from foreplan.cost_models.passes.host_prices import python_lines
from foreplan.cost_models.rates.gpu_host import PARTS, HostAsked, columns, host_asked
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.specs import load_document
from foreplan.datasets.storage import write_atomically

SCHEMA = "foreplan.gpu_host/1"
#: Phase of a part of a pass, and its place among those that were timed.
_TIMED = {"inference": ("inference", 0), "forward": ("training", 0), "backward": ("training", 1),
          "optimizer": ("training", 2)}  # fmt: skip
#: Columns of a fit that a part has no use for.
_UNUSED = {"backward": [1], "optimizer": [0, 1, 2]}


def measured(
    device: str, dtype: str, asked: Sequence[tuple[str, str]], seconds: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """The document, whole again after each network (name, size)."""
    gpu = device.startswith("cuda")
    with no_collection():
        calls = measured_calls(device, DTYPES[dtype])
        update = measured_update(device, DTYPES[dtype])
    document: dict[str, Any] = {
        "schema": SCHEMA, "device": device, "dtype": dtype, "processor": processor(),
        "board": torch.cuda.get_device_name(device) if gpu else "cpu",
        "software": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "call_s": calls, "update_s": list(update), "passes": [], "failed": [],
    }  # fmt: skip
    for size in ("plain small", "plain"):
        document["passes"] += _plain(device, dtype, size, seconds, rounds)
    yield document
    for name, size in asked:
        try:
            document["passes"] += _network(device, dtype, name, size, seconds, rounds)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            document["failed"].append([name, size, first_line(error)])
            print(f"{name} {size}: {first_line(error)}", file=sys.stderr)
        yield document


def _network(
    device: str, dtype: str, name: str, size: str, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """Passes of a network at each of its shapes, of the small size at the first."""
    with torch.device(device):
        module = build(name, size)
    modules = of_phases(module.to(device=device, dtype=DTYPES[dtype]))
    shapes = shapes_of(name, size)
    runs = []
    for shape, phase in itertools.product(shapes[: 1 if size == "small" else None], PHASES):
        inputs = example(name, size, shape, device, DTYPES[dtype])
        run = passes(modules[phase], inputs, phase)
        for _ in range(3):
            _timed(run, device)
        runs.append((shape, phase, run, python_lines(run[0]), modules_run(run[0])))
        for part in run[1:]:
            part()
    found: list[dict[str, Any]] = [
        {"network": name, "size": size, "shape": list(shape), "phase": phase, "lines": lines,
         "modules": entered, "tensors": len(list(module.parameters())), "whole_s": [],
         "issued_s": [], "parts_s": []}
        for shape, phase, _, lines, entered in runs
    ]  # fmt: skip
    with no_collection():
        for _ in range(rounds):
            for row, (_, _, run, _, _) in zip(found, runs, strict=True):
                whole, issued = np.median(_repeated(lambda: _timed(run, device), seconds), axis=0)  # noqa: B023
                parts = np.median(_repeated(lambda: _parts(run, device), seconds / 2), axis=0)  # noqa: B023
                row["whole_s"].append(float(whole))
                row["issued_s"].append(float(issued))
                row["parts_s"].append([float(part) for part in parts])
    for row in found:
        print(f"{name} {row['shape']} {row['phase']}: {1e3 * np.median(row['whole_s']):.3f} ms",
              file=sys.stderr)  # fmt: skip
    return found


def plain_modules(size: str) -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    """Modules without a line of transformers, and the size of their input.

    Args:
        size: ``plain small``, which constants are fitted to, or ``plain``.
    """
    nn = torch.nn

    def linears(count: int) -> torch.nn.Module:
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(count)]
        return nn.Sequential(*layers)

    def convolutions(count: int) -> torch.nn.Module:
        layers = [
            nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
            )
            for _ in range(count)
        ]
        return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *layers)

    rows, image = (16, 256), (1, 3, 32, 32)
    if size == "plain small":
        gated = nn.Sequential(*(m for _ in range(10) for m in (
            nn.LayerNorm(256), nn.Linear(256, 512), nn.GLU(), nn.Dropout())))  # fmt: skip
        pooled = nn.Sequential(*(m for _ in range(4) for m in (
            nn.LazyConv2d(32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2))))  # fmt: skip
        pooled(torch.zeros(image))
        return {
            "five linears": (linears(5), rows), "twenty linears": (linears(20), rows),
            "four convolutions": (convolutions(4), image),
            "twenty convolutions": (convolutions(20), image),
            "gated": (gated, rows), "pooled": (pooled, image),
        }  # fmt: skip
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True), 6,
        enable_nested_tensor=False,
    )  # fmt: skip
    return {
        "three linears": (linears(3), rows),
        "eight linears": (linears(8), rows),
        "ten convolutions": (convolutions(10), image),
        "encoder of torch": (encoder, (2, 64, 256)),
    }


def _plain(
    device: str, dtype: str, size: str, seconds: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """Inference passes of `plain_modules`."""
    for name, (made, shape) in plain_modules(size).items():
        module = made.to(device=device, dtype=DTYPES[dtype]).eval()
        operand = torch.zeros(shape, device=device, dtype=DTYPES[dtype])

        def run(module: torch.nn.Module = module, operand: torch.Tensor = operand) -> None:
            with torch.inference_mode():
                module(operand)

        with no_collection():
            times = [
                float(np.median(_repeated(lambda: _timed([run], device), seconds), axis=0)[0])
                for _ in range(rounds)
            ]
        print(f"{name}: {1e6 * np.median(times):.0f} us", file=sys.stderr)
        yield {"network": name, "size": size, "shape": list(shape), "phase": "inference",
               "whole_s": times, "parts_s": [[time_s] for time_s in times]}  # fmt: skip


def _repeated(run: Callable[[], Sequence[float]], seconds: float) -> list[Sequence[float]]:
    begun, found = time.perf_counter(), list[Sequence[float]]()
    while len(found) < 8 or time.perf_counter() - begun < seconds:
        found.append(run())
    return found[2:]


def _timed(run: Sequence[Callable[[], object]], device: str) -> tuple[float, float]:
    """Seconds of a pass until the device is done, and until Python is."""
    begun = time.perf_counter()
    for part in run:
        part()
    issued = time.perf_counter()
    _wait(device)
    return time.perf_counter() - begun, issued - begun


def _parts(run: Sequence[Callable[[], object]], device: str) -> list[float]:
    """Seconds of each part, the device idle between them."""
    found = []
    for part in run:
        begun = time.perf_counter()
        part()
        _wait(device)
        found.append(time.perf_counter() - begun)
    return found


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def modules_run(run: Callable[[], object]) -> int:
    """Modules that a call enters."""
    count = 0

    def entered(*_: object) -> None:
        nonlocal count
        count += 1

    handle = register_module_forward_pre_hook(entered)
    try:
        run()
    finally:
        handle.remove()
    return count


def processor() -> str:
    """Name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def lowered(
    document: Mapping[str, Any], size: str, known: Container[tuple[Any, ...]] = ()
) -> Iterator[tuple[dict[str, Any], list[Step]]]:
    """Passes of a size with their steps, networks traced without memory; ``known`` ones without."""
    dtype, built = DTYPES[document["dtype"]], dict[str, torch.nn.Module]()
    for row in document["passes"]:
        if row["size"] != size:
            continue
        if _place(row) in known:
            yield row, []
            continue
        name, phase = row["network"], row["phase"]
        if size.startswith("plain"):
            module, shape = plain_modules(size)[name]
            module = module.to(device="meta", dtype=dtype).eval()
            yield row, lower(capture(module, [torch.zeros(shape, device="meta", dtype=dtype)],
                                     name=name, eager=True))  # fmt: skip
            continue
        if name not in built:
            with torch.device("meta"):
                module = build(name, size)
            built = {name: module.to(device="meta", dtype=dtype).eval()}
        inputs = example(name, size, tuple(row["shape"]), "meta", dtype)
        graph = capture(built[name], inputs, name=name, eager=True, training=phase == "training")
        yield row, lower(graph, phase)


def fit(documents: Sequence[dict[str, Any]]) -> None:
    """Print constants of each part, and errors of networks left out in turn.

    Args:
        documents: of several machines or hours; the best round of all counts.
    """
    asked: dict[tuple[Any, ...], dict[str, HostAsked]] = {}
    best_s: dict[tuple[Any, ...], NDArray[np.float64]] = {}
    for document, size in itertools.product(documents, ("plain small", "small")):
        for row, steps in lowered(document, size, known=asked):
            at = _place(row)
            asked[at] = asked[at] if at in asked else host_asked(steps)
            best_s[at] = np.minimum(np.min(row["parts_s"], axis=0), best_s.get(at, np.inf))
    for part in PARTS:
        phase, index = _TIMED[part]
        own = [at for at in asked if at[-1] == phase]
        sizes = np.array([columns(asked[at][part]) for at in own])
        sizes[:, _UNUSED.get(part, [])] = 0.0
        best = np.array([best_s[at][index] for at in own])
        names = np.array([at[0] for at in own])
        ratio = np.zeros(len(own))
        for name in set(names):
            out = names == name
            ratio[out] = best[out] / (sizes[out] @ fitted(sizes[~out], best[~out]))
        error = np.abs(1 / ratio - 1)
        low, high = np.quantile(ratio, [0.05, 0.95])
        print(f"{part}: {np.round(1e6 * fitted(sizes, best), 1).tolist()} us; left out "
              f"{100 * error.mean():.1f} % (median {100 * np.median(error):.1f}), measured "
              f"{low:.2f} to {high:.2f} times as long")  # fmt: skip


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What names a pass."""
    return row["network"], row["size"], tuple(row["shape"]), row["phase"]


def fitted(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of at least 0 and least mean absolute relative error, by reweighted squares."""
    share, weight = sizes / seconds[:, None], np.ones(len(seconds))
    for _ in range(100):
        root = np.sqrt(weight)
        found, _ = nnls(share * root[:, None], root)
        weight = 1 / np.maximum(np.abs(share @ found - 1), 0.02)
    return np.asarray(found)


def score(document: dict[str, Any], zoo: str) -> None:
    """Print predicted over measured less one of each large pass, against median and best round."""
    device, errors = device_zoo.device(zoo), dict[str, list[tuple[float, float]]]()
    print("| network | shape | phase | ms | rounds | limit | predicted | of the best round |")
    print("|---|---|---|---|---|---|---|---|")
    for row, steps in itertools.chain(lowered(document, "plain"), lowered(document, "large")):
        found = replay_steps(steps, replay_book(device), device)
        times = row["whole_s"]
        median, best = float(np.median(times)), min(times)
        off = found.latency_s / median - 1, found.latency_s / best - 1
        errors.setdefault(f"{row['size']}, {row['phase']}", []).append(off)
        print(f"| {row['network']} | {' x '.join(map(str, row['shape']))} | {row['phase']} "
              f"| {1e3 * median:.2f} | {100 * (max(times) - best) / median:.0f} | {found.limit} "
              f"| {100 * off[0]:+.0f} | {100 * off[1]:+.0f} |")  # fmt: skip
    for which, rows in errors.items():
        means = 100 * np.abs(rows).mean(axis=0)
        print(f"{which}: {len(rows)} passes, {means[0]:.1f} %, of the best round {means[1]:.1f} %")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("measure")
    taking.add_argument("file", type=Path)
    taking.add_argument("--device", default="cuda:0")
    taking.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    taking.add_argument("--large", nargs="*", default=list(NETWORKS), choices=KNOWN)
    taking.add_argument("--small", nargs="*", default=list(KNOWN), choices=KNOWN)
    taking.add_argument("--seconds", type=float, default=0.25, help="of each pass, a round")
    taking.add_argument("--rounds", type=int, default=3)
    for name in ("fit", "score"):
        reading = commands.add_parser(name)
        reading.add_argument("files", type=Path, nargs="+")
        reading.add_argument("--zoo", default="h200")
    options = parser.parse_args()
    if options.command != "measure":
        found = [load_document(path) for path in options.files]
        if options.command == "fit":
            fit(found)
        for document in found if options.command == "score" else ():
            score(document, options.zoo)
        return
    torch.manual_seed(0)
    asked = [(name, "small") for name in options.small] + [(n, "large") for n in options.large]
    for document in measured(options.device, options.dtype, asked, options.seconds, options.rounds):
        write_atomically(options.file, json.dumps(document))


if __name__ == "__main__":
    main()
