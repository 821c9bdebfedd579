"""Priced against timed passes of a decoder: ``python tests/benchmarks/serving_passes.py DEVICE``.

Profiles a grid of programs on the device, draws workloads (batch, prompt, context) of which none is
on the grid, prices the passes of three layers (16, 8 and 4 bits) and the head, and times them on a
real stage. Prints a JSON line a workload and phase, and one with the errors. Weights are random.
A machine whose speed wanders is measured in turns: profile, passes, profile, passes, ... In a turn
each pass of decoding is visited three times, a third of the prompts after each round of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from timed_stage import BITS, Timed, launch_seconds

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.sources.tables import InterpolatedSource, MeasuredSource
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.models.decoder_programs import Choose, head_programs, layer_programs
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.measuring import Effort
from foreplan.datasets.timing.profile_grid import ProfileGrid
from foreplan.datasets.timing.profiling import measure_profile
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing, StageKernels
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.planner.serving.workspace import StageWorkspace
from foreplan.planner.verify.placement import take_seat

LINEAR = {
    "cuda": {
        16: "bf16/bf16/torch.linear", 8: "int8/bf16/foreplan.fragment_linear",
        4: "int4/bf16/foreplan.fragment_linear",
    },
    "cpu": {
        16: "bf16/bf16/torch.linear", 8: "int8/bf16/torch.int8pack_mm",
        4: "int4/bf16/torch.int4pack_mm",
    },
}  # fmt: skip
#: Measured shapes: (batch, prompt) of prefill, batches and contexts of decode.
PREFILLS = (
    (1, 64), (4, 64), (16, 64), (64, 64), (1, 256), (4, 256), (16, 256), (64, 256), (1, 1024),
    (4, 1024), (16, 1024), (1, 2048), (4, 2048), (8, 2048),
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64)
CONTEXTS = (64, 256, 512, 1024, 2048, 4096)
MOST_ROWS, MOST_PROMPT = 16384, 2048
#: Visits of a pass of decoding in a turn, and parts of a turn that prompts are timed in.
VISITS = 3
#: Prompts divided by more are no longer several tokens.
MOST_SMALL = 32


def kernel_table(kind: str) -> StageKernels:
    """The same kernels for every workload, so that the stage is loaded once."""
    table = {}
    for phase in (PREFILL, DECODE):
        table[f"{phase}/attention"] = Variant.parse("bf16/bf16/torch.sdpa")
        table[f"{phase}/head"] = Variant.parse("bf16/bf16/torch.linear")
        for bits, text in LINEAR[kind].items():
            table[f"{phase}/linear/{bits}"] = Variant.parse(text)
    return StageKernels(table)


def chooser(kernels: StageKernels, phase: str, bits: int) -> Choose:
    """What `layer_programs` asks for a layer of so many bits."""
    return lambda op, _: kernels.variant(phase, op, bits if op == "linear" else None)


def grid(model: Model, kernels: StageKernels, small: int) -> list[Program]:
    """Programs of the measured shapes; ``small`` divides prompts, contexts and most requests."""
    most = BATCHES[-1] // small
    passes = [(b, t // small, t // small) for b, t in PREFILLS if b <= most]
    contexts = [c // small for c in CONTEXTS]
    batches = [b for b in BATCHES if b <= most]
    passes += [(b, 1, c) for b, c in itertools.product(batches, contexts)]
    found: dict[Program, None] = {}
    for batch, queries, keys in passes:
        phase = PREFILL if queries > 1 else DECODE
        for bits in BITS:
            every = layer_programs(model, batch, queries, keys, chooser(kernels, phase, bits))
            found.update(dict.fromkeys(p for p, _ in every))
        head = head_programs(model, batch, lambda op, _: kernels.variant(DECODE, "head"))
        found.update(dict.fromkeys(p for p, _ in head))
    return list(ProfileGrid.exact(found))


def drawn(count: int, small: int, seed: int) -> list[tuple[int, int, int]]:
    """(batch, prompt, context) of workloads off the grid, sizes spread evenly over octaves."""
    rng = np.random.default_rng(seed)
    found: list[tuple[int, int, int]] = []
    while len(found) < count:
        batch = int(2 ** rng.uniform(0, math.log2(BATCHES[-1] // small)))
        prompt = int(2 ** rng.uniform(6, 11)) // small
        context = int(2 ** rng.uniform(6, 12)) // small
        on_grid = (batch, prompt * small) in PREFILLS or context * small in CONTEXTS
        if batch * prompt <= MOST_ROWS and context > 1 and not on_grid:
            found.append((batch, prompt, context))
    return found


def be_as_its_worker(name: DeviceName) -> None:
    """Begin again with a processor's instructions and threads, which are set before torch loads."""
    environment = worker_environment(name)
    if name.kind == "cpu" and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--workloads", type=int, default=60)
    parser.add_argument("--profile", type=Path, required=True, help="where the profile goes")
    parser.add_argument(
        "--small", type=int, default=1, help="divide lengths and most requests, for a rehearsal"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--turns", type=int, default=1, help="profile and passes in turn; medians count"
    )
    options = parser.parse_args()
    if not 1 <= options.small <= MOST_SMALL or options.turns < 1:
        parser.error(f"--small of 1 to {MOST_SMALL} and --turns of at least 1")
    name, model = DeviceName.parse(options.device), load_model(options.model)
    be_as_its_worker(name)
    kernels = kernel_table(name.kind)
    seat = take_seat(name, ())
    with seat.computing():
        started = time.monotonic()
        timed = Timed(model, kernels, seat.device)
        print(f"# loaded in {time.monotonic() - started:.1f} s", flush=True)
        compare(timed, kernels, options)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass that is priced and timed."""

    phase: str
    batch: int
    positions: int
    """Of the prompt, or of the context behind the token."""
    workload: tuple[int, int, int]
    """(batch, prompt, context) that it belongs to."""


@dataclass(slots=True)
class Found:
    """What was predicted for a pass in each turn, and what was measured at each visit, seconds."""

    predicted: list[float]
    measured: list[float]
    peak_bytes: int

    @property
    def error(self) -> float:
        """Of the median prediction, by the median visit."""
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1

    @property
    def apart(self) -> float:
        """Mean distance of a visit from the median visit, by that."""
        middle = statistics.median(self.measured)
        return statistics.fmean(abs(each / middle - 1) for each in self.measured)


def profiled(options: Any, model: Model, kernels: StageKernels, turn: int) -> CostBook:
    """Prices from a profile that is measured now."""
    started = time.monotonic()
    path: Path = options.profile
    path = path if options.turns == 1 else path.with_stem(f"{path.stem}-{turn}")
    profile = measure_profile(
        DeviceName.parse(options.device), grid(model, kernels, options.small), path, rounds=1,
        effort=Effort(min_s=0.01, min_samples=5, max_s=0.1),
    )  # fmt: skip
    failed = [row for row in profile.rows if row.status != "ok"]
    print(f"# a switch takes {1e6 * (profile.switch_s or 0.0):.2f} us")
    print(f"# {len(profile.rows)} programs in {time.monotonic() - started:.0f} s, "
          f"{len(failed)} failed {[r.error for r in failed[:2]]}", flush=True)  # fmt: skip
    return CostBook([MeasuredSource(profile), InterpolatedSource(profile)])


def priced(item: Pass, model: Model, kernels: StageKernels, costs: CostBook, device: str) -> float:
    """Predicted seconds of a pass."""
    workload = ServingWorkload(batch=item.batch, prompt_tokens=item.positions, new_tokens=1)
    rank = validate(Cluster, {"devices": [{"name": device}]}, "cluster").ranks()[0]
    pricing, sizes = Pricing(model, workload, costs), MicroBatches(item.batch, item.batch)
    return pricing.seconds(rank, pricing.head(kernels, item.phase, sizes)) + sum(
        pricing.seconds(rank, pricing.layer(kernels, bits, item.phase, sizes, item.positions))
        for bits in BITS
    )


def held_bytes(timed: Timed, item: Pass, kernels: StageKernels) -> int:
    """What the ledger says that a pass of prompts holds at its peak."""
    workload = ServingWorkload(batch=item.batch, prompt_tokens=item.positions, new_tokens=1)
    sizes, stage = MicroBatches(item.batch, item.batch), timed.stage
    space = StageWorkspace(timed.model, workload, sizes, timed.device.type, kernels.table)
    static = timed.static_bytes(item.batch, item.positions)
    return static + space.stage_bytes(stage.start, stage.end, timed.layers)


def compare(timed: Timed, kernels: StageKernels, options: Any) -> None:
    """Time and price each workload, in turns; of several turns the medians count."""
    passes = [
        Pass(phase, batch, prompt if phase == PREFILL else context, (batch, prompt, context))
        for batch, prompt, context in drawn(options.workloads, options.small, options.seed)
        for phase in (PREFILL, DECODE)
    ]
    prompts = [item for item in passes if item.phase == PREFILL]
    tokens = [item for item in passes if item.phase == DECODE]
    found = {item: Found([], [], 0) for item in passes}
    for turn in range(options.turns):
        costs = profiled(options, timed.model, kernels, turn)
        for item in passes:
            expected = priced(item, timed.model, kernels, costs, options.device)
            found[item].predicted.append(expected)
        for visit in range(VISITS):
            for item in tokens + prompts[visit::VISITS]:
                length = item.positions if item.phase == PREFILL else 1
                found[item].measured.append(timed.seconds(item.batch, length, item.positions))
                if item.phase == PREFILL:  # the phase that takes most
                    found[item].peak_bytes = timed.peak_bytes() or 0
        print(f"# turn {turn}: {summary(found, PREFILL)} {summary(found, DECODE)}", flush=True)
    report(timed, kernels, options, found)


def summary(found: Mapping[Pass, Found], phase: str) -> dict[str, object]:
    """Errors of a phase, and how far the visits of one pass lie apart."""
    every = [each for item, each in found.items() if item.phase == phase]
    errors = np.array([each.error for each in every])
    size = np.abs(errors)
    return {
        "phase": phase, "workloads": len(every), "mean_error": round(float(size.mean()), 4),
        "median": round(float(np.median(size)), 4),
        "p90": round(float(np.quantile(size, 0.9)), 4), "bias": round(float(errors.mean()), 4),
        "visits_apart": round(statistics.fmean(each.apart for each in every), 4),
    }  # fmt: skip


def report(timed: Timed, kernels: StageKernels, options: Any, found: Mapping[Pass, Found]) -> None:
    """Print a line a pass and one for each phase."""
    memory = []
    for item, each in found.items():
        batch, prompt, context = item.workload
        row = {
            "device": options.device, "phase": item.phase, "batch": batch, "prompt": prompt,
            "context": context,
            "predicted_us": round(statistics.median(each.predicted) * 1e6, 1),
            "measured_us": round(statistics.median(each.measured) * 1e6, 1),
            "error": round(each.error, 4),
        }  # fmt: skip
        if each.peak_bytes:
            held = held_bytes(timed, item, kernels)
            memory.append(held / each.peak_bytes - 1)
            row |= {"peak_bytes": each.peak_bytes, "predicted_bytes": held}
        print(json.dumps(row), flush=True)
    for phase in (PREFILL, DECODE):
        about = {"device": options.device, "turns": options.turns}
        print(json.dumps(about | summary(found, phase)), flush=True)
    if memory:
        print(json.dumps({"device": options.device, "memory": [
            round(float(q), 4) for q in np.quantile(memory, [0, 0.5, 1])]}))  # fmt: skip
        graph_s, plain_s = launch_seconds(timed, 16, 512)
        print(json.dumps({
            "device": options.device, "layers": len(BITS),
            "graph_launch_us": round(graph_s * 1e6, 1), "plain_launch_us": round(plain_s * 1e6, 1),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
