"""Weight-only linears on a GPU against bf16: ``python tests/benchmarks/linear_cuda.py``.

Each time is of one call inside a CUDA graph that runs through copies of the weight of more bytes
than the L2 cache holds, so that every call reads its weight from memory; timed by
`datasets/timing/graph_timer.py`.
"""

from __future__ import annotations

import json
from functools import partial

import torch

from foreplan.datasets.kernels.registry import Packed, linear_kernel
from foreplan.datasets.program import Variant
from foreplan.datasets.timing.graph_timer import graph_seconds

VARIANTS = (
    "bf16/bf16/torch.linear",
    "fp8/fp8/torch.scaled_mm",
    "int8/bf16/foreplan.fragment_linear",
    "int4/bf16/foreplan.fragment_linear",
    "int4/bf16/torch.dequant_linear",
)
ROTATED_BYTES = 400_000_000  # an H200 has 60 MB of L2


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
            for rows in (1, 8, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 2048):
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                expected = x.float() @ kernel.dequantise(packed).t()
                error = (kernel.run(x, packed, None).float() - expected).norm() / expected.norm()
                calls = [partial(kernel.run, x, copy, None) for copy in copies]
                seconds = graph_seconds(calls) / len(calls)
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
