"""Networks compiled by ``torch.compile`` on a GPU against what ``predict`` says of them.

    python compiled_networks.py measure cuda:0 measured.json [--networks llama gpt2 ...]
    python compiled_networks.py score measured.json h200

``measure`` compiles each network (``torch.compile(module, dynamic=False)``), in both phases at two
shapes, and times the pass from a CUDA graph, next to that of the same module as it is. The loss and
the update of a training step are left as they are, as most training scripts have it. Networks are
compiled side by side, one process each, and timed one after the other, in rounds of which the
quickest counts, as others may run a first pass meanwhile: ten minutes of an H200 with 16 cores. A
pass that fails is data (``failed``). Networks of transformers attend as eager ones do, without
masks that mask nothing (`attention_of_eager`). ``score`` needs no GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What is fused, and what that costs, was chosen on these.
DEVELOPMENT = ("llama", "gpt2", "bert", "resnet", "vit", "t5", "mobilenet_v2")
#: Scored once.
TEST = (
    "qwen3", "opt", "convnext", "swin", "efficientnet", "gemma", "falcon", "whisper", "segformer",
    "beit", "olmo2", "gpt_neox", "dinov2",
)  # fmt: skip
#: Of each network the second and third shape of `end_to_end_networks.SIZES`.
_SIZE, _SHAPES = "large", slice(1, 3)
_SECONDS, _ROUNDS = 0.75, 5


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """The device for one process at a time."""
    with lock.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def measure_network(name: str, device: str, out: Path) -> None:
    """Times of one network's passes, as it is and compiled; written after each."""
    import torch

    from foreplan.cost_models.lowering.graph_step import PHASES
    from foreplan.cost_models.passes.end_to_end_networks import build, example, shapes_of
    from foreplan.datasets.graphs.capture import attention_of_eager

    dtype, lock = torch.bfloat16, out.parent / "lock"
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        for shape in shapes_of(name, _SIZE)[_SHAPES]:
            torch.manual_seed(0)
            torch.compiler.reset()
            module = build(name, _SIZE).to(device=device, dtype=dtype).train(phase == "training")
            inputs = example(name, _SIZE, shape, device, dtype)
            row: dict[str, Any] = {"network": name, "shape": shape, "phase": phase}
            rows.append(row)
            try:
                with attention_of_eager(module):
                    row |= _times(module, inputs, phase, device, lock)
            except Exception as error:  # whatever a compiler does is data
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                print(name, shape, phase, row["failed"], file=sys.stderr)
            out.write_text(json.dumps(rows))
            del module, inputs
            torch.cuda.empty_cache()


def _times(module: Any, inputs: Any, phase: Any, device: str, lock: Path) -> dict[str, Any]:
    """Of one pass, as it is and compiled."""
    import torch

    from foreplan.cost_models.passes.end_to_end_passes import passes

    with _alone(lock):
        eager = _recorded(passes(module, inputs, phase, capturable=True), device)
    compiled: Any = torch.compile(module, dynamic=False)
    run = passes(compiled, inputs, phase, capturable=True)
    began = time.perf_counter()
    for part in run:
        part()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    with _alone(lock):
        return {
            "eager": eager, "compiled": _recorded(run, device), "compile_s": round(compile_s, 1),
            "breaks": breaks, "fused": _fused(run),
        }  # fmt: skip


def _recorded(run: Sequence[Any], device: str) -> dict[str, Any]:
    from foreplan.cost_models.passes.end_to_end_passes import real_seconds
    from foreplan.cost_models.passes.recorded_pass import RecordedPass

    made = RecordedPass.of(run, device)
    rounds = [real_seconds([[made.graph.replay]], device, _SECONDS / _ROUNDS)[0][1]
              for _ in range(_ROUNDS)]  # fmt: skip
    return {"rounds_s": rounds, "kernels": made.kernels}


def _fused(run: Sequence[Any]) -> dict[str, float]:
    """How many kernels of a pass are the compiler's own, and their microseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for part in run:
            part()
        torch.cuda.synchronize()
    own = [
        event.time_range.elapsed_us()
        for event in profiled.events()
        if event.device_type.name == "CUDA" and event.name.startswith("triton")
    ]
    return {"kernels": len(own), "us": round(sum(own), 1)}


def measure(device: str, out: Path, networks: Sequence[str], beside: int) -> None:
    """Every network in a process of its own; its rows lie beside ``out``, and are kept."""
    import torch

    folder = out.with_suffix(".parts")
    folder.mkdir(exist_ok=True)

    def one(name: str) -> list[dict[str, Any]]:
        part = folder / f"{name}.json"
        if not part.is_file():
            subprocess.run([sys.executable, __file__, "one", device, str(part), name], check=False)
        if not part.is_file():
            return [{"network": name, "failed": "its process died"}]
        rows: list[dict[str, Any]] = json.loads(part.read_text())
        return rows

    with ThreadPoolExecutor(beside) as pool:
        found = list(pool.map(one, networks))
    document = {
        "board": torch.cuda.get_device_name(device), "torch": torch.__version__, "dtype": "bf16",
        "size": _SIZE, "rows": [row for rows in found for row in rows],
    }  # fmt: skip
    out.write_text(json.dumps(document, indent=0) + "\n")


def score(path: Path, device: str, without: Sequence[str] = ()) -> None:
    """Print a Markdown table: every pass as it is and compiled, and how far off its prediction.

    Means are of networks but those ``without``.
    """
    import torch

    from foreplan import predict_latency
    from foreplan.cost_models.passes.end_to_end_networks import build, example

    document = json.loads(path.read_text())
    dtype, size = torch.bfloat16, document["size"]
    errors: dict[tuple[str, ...], list[float]] = {}
    print("| network | shape | phase | as it is, ms | compiled, ms | error | error, compiled "
          "| fused kernels, real and told |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in document["rows"]:
        if "compiled" not in row:
            continue
        name, phase = row["network"], row["phase"]
        module = build(name, size).to(dtype).train(phase == "training")
        inputs = example(name, size, row["shape"], "cpu", dtype)
        cells = []
        for way in ("eager", "compiled"):
            execution: Any = "graph" if way == "eager" else way
            told = predict_latency(module, device, inputs=inputs, phase=phase, execution=execution)
            real_s = min(row[way]["rounds_s"])
            fused = sum(step.kind == "fused" for step in told.steps)
            cells.append((1e3 * real_s, 100 * (told.latency_s / real_s - 1)))
            group = "development" if name in DEVELOPMENT else "test"
            if name not in without:
                errors.setdefault((group, phase, way), []).append(cells[-1][1])
        (before, off), (after, off_compiled) = cells
        shape, real = " x ".join(map(str, row["shape"])), row["fused"]["kernels"]
        print(f"| {name} | {shape} | {phase} | {before:.2f} | {after:.2f} | {off:+.1f} "
              f"| {off_compiled:+.1f} | {real}, {fused} |", flush=True)  # fmt: skip
    print()
    for group, found in errors.items():
        sizes = [abs(error) for error in found]
        print(f"{', '.join(group)}: mean {statistics.mean(sizes):.1f} %, median "
              f"{statistics.median(sizes):.1f} %, {len(sizes)} passes")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("measure")
    timed.add_argument("device")
    timed.add_argument("out", type=Path)
    timed.add_argument("--networks", nargs="+", default=[*DEVELOPMENT, *TEST])
    timed.add_argument("--beside", type=int, default=14, help="networks compiled side by side")
    scored = commands.add_parser("score")
    scored.add_argument("path", type=Path)
    scored.add_argument("device", help="of the zoo")
    scored.add_argument("--without", nargs="+", default=[], help="networks left out of means")
    single = commands.add_parser("one")
    for word in ("device", "out", "network"):
        single.add_argument(word)
    options = parser.parse_args(arguments)
    if options.command == "one":
        measure_network(options.network, options.device, Path(options.out))
    elif options.command == "score":
        score(options.path, options.device, options.without)
    else:
        measure(options.device, options.out, options.networks, options.beside)


if __name__ == "__main__":
    main()
