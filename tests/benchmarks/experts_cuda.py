"""Experts of a layer on a GPU: all at once inside a CUDA graph, one by one, and as predicted.

    python tests/benchmarks/experts_cuda.py cuda:0 --zoo h200

Prints a line a program: the time of a replayed call whose weights come from memory, the wall time
of a call that the host issues expert by expert, and what the shipped predictor says of the device.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.datasets.kernels import runnable
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.graph_timer import call_seconds

LAYERS = {
    "mixtral-8x7b": {"experts": 8, "active": 2, "ffn": 14336, "hidden": 4096},
    "qwen3-30b-a3b": {"experts": 128, "active": 8, "ffn": 768, "hidden": 2048},
    "olmoe-1b-7b": {"experts": 64, "active": 8, "ffn": 1024, "hidden": 2048},
    "deepseek-v2-lite": {"experts": 64, "active": 6, "ffn": 1408, "hidden": 2048},
    "small": {"experts": 16, "active": 4, "ffn": 512, "hidden": 1024},
}
KERNELS = (
    "bf16/bf16/torch.linear", "fp8/fp8/torch.scaled_mm",
    "int8/bf16/foreplan.fragment_linear", "int4/bf16/foreplan.fragment_linear",
)  # fmt: skip
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
_CALLS, _ROUNDS = 20, 5


def wall_s(call: Callable[[], object]) -> float:
    """Median wall time of a call, many in a row."""
    found = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) / _CALLS)
    return sorted(found)[_ROUNDS // 2]


@torch.inference_mode()
def times_of(work: Program, device: str, *, alone: bool) -> tuple[float, float]:
    """Seconds of a call: all experts at once, and one by one (not a number where left out)."""
    made = Inputs(device).runnable(work)
    assert made.turns is not None
    at_once = call_seconds([made.call] * made.turns, most_s=0.3)
    del made
    if alone:
        return at_once, math.nan
    with patch.object(runnable, "grouped_experts", lambda *_: None):
        one_by_one = Inputs(device).runnable(work)
    for _ in range(3):
        one_by_one.call()
    return at_once, wall_s(one_by_one.call)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("--zoo", help="device that is predicted")
    parser.add_argument("--at-once-alone", action="store_true", help="leave the host's calls out")
    chosen = parser.parse_args()
    predictor = PredictedSource()
    print("layer kernel rows at_once_us one_by_one_us predicted_us at_once/predicted")
    for (name, dims), kernel in itertools.product(LAYERS.items(), KERNELS):
        for rows in ROWS:
            work = program("experts", Variant.parse(kernel), rows=rows, **dims)
            at_once, one_by_one = times_of(work, chosen.device, alone=chosen.at_once_alone)
            found = predictor.estimate(work, chosen.zoo) if chosen.zoo else None
            priced = math.nan if found is None else found.mean_s
            print(
                name, kernel, rows, f"{1e6 * at_once:.1f} {1e6 * one_by_one:.1f}",
                f"{1e6 * priced:.1f} {at_once / priced:.2f}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
