"""Weight-only linears on a GPU against bf16: ``python tests/benchmarks/linear_cuda.py``.

Each time is of one call inside a CUDA graph that runs through copies of the weight of more bytes
than the L2 cache holds, so that every call reads its weight from memory; median of 15 replays, each
queued behind another, so that the launch of the graph does not count.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

from foreplan.datasets.kernels import Packed, linear_kernel
from foreplan.datasets.program import Variant

VARIANTS = (
    "bf16/bf16/torch.linear",
    "fp8/fp8/torch.scaled_mm",
    "int8/bf16/foreplan.fragment_linear",
    "int4/bf16/foreplan.fragment_linear",
    "int4/bf16/torch.dequant_linear",
)
ROTATED_BYTES = 400_000_000  # an H200 has 60 MB of L2


def graph_time_s(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call, all of them in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # keeps the GPU busy while the timed replay is queued
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def main() -> None:
    """Print a JSON line a shape, number of rows and variant."""
    for n, k in ((8192, 8192), (4096, 4096), (14336, 4096), (4096, 14336)):
        weight = torch.randn(n, k, device="cuda") * 0.02
        for variant in VARIANTS:
            kernel = linear_kernel(Variant.parse(variant), "cuda")
            packed = kernel.pack(weight)
            count = max(2, round(ROTATED_BYTES / packed.bytes))
            copies = [
                Packed(packed.layout, n, k, {name: t.clone() for name, t in packed.tensors.items()})
                for _ in range(count)
            ]
            for rows in (1, 8, 16, 24, 32, 48, 64, 96, 256, 2048):
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                expected = x.float() @ kernel.dequantise(packed).t()
                error = (kernel.run(x, packed, None).float() - expected).norm() / expected.norm()
                seconds = graph_time_s([partial(kernel.run, x, copy, None) for copy in copies])
                print(
                    json.dumps(
                        {
                            "n": n, "k": k, "rows": rows, "variant": variant,
                            "us": round(seconds * 1e6, 2), "relative_error": round(float(error), 5),
                            "weight_tb_per_s": round(packed.bytes / seconds / 1e12, 3),
                        }
                    ),
                    flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
