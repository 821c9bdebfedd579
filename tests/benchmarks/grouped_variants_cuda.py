"""Which variants of the grouped kernel are fastest, by shape, bits and rows an expert.

    python tests/benchmarks/grouped_variants_cuda.py

What `_grouped_linear` takes was read off this. Prints the fastest variants of a line's shape as
(tiles of 8 rows, tiles of 16 features, warps, groups in flight): microseconds, then what is taken
and, in bf16, `torch._grouped_mm`.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
from torch import Tensor

from foreplan.datasets.kernels import _grouped_linear
from foreplan.datasets.kernels._fragment_linear import compiled
from foreplan.datasets.kernels.registry import Packed, linear_kernel
from foreplan.datasets.program import Variant
from foreplan.datasets.timing.graph_timer import call_seconds

#: N, K, experts and experts of a row: up and down of Qwen3-30B-A3B, OLMoE, DeepSeek-V2-Lite
#: (down), Mixtral and a small layer.
SHAPES = (
    (1536, 2048, 128, 8), (2048, 768, 128, 8), (2048, 2048, 64, 8), (2048, 1024, 64, 8),
    (2048, 1408, 64, 6), (28672, 4096, 8, 2), (4096, 14336, 8, 2), (1024, 1024, 16, 4),
    (1024, 512, 16, 4),
)  # fmt: skip
KERNELS = {
    4: "int4/bf16/foreplan.fragment_linear", 8: "int8/bf16/foreplan.fragment_linear",
    16: "bf16/bf16/torch.linear",
}  # fmt: skip
#: Rows an expert, on average; the first is of a single row of the layer.
EACH = (0, 1, 4, 6, 8, 12, 16, 24, 32, 48)
GRID = [
    (rows, tiles, warps, depth)
    for rows, tiles, warps, depth in itertools.product((1, 2, 4), (1, 2, 4), (2, 4, 8, 16), (1, 2))
    if (rows, tiles) != (4, 4)
]
_LAST_LEVEL_BYTES, _BEST = 60 << 20, 6


def copies(n: int, k: int, experts: int, bits: int) -> list[Packed]:
    """Weights of all experts, as often as fill the last-level cache twice."""
    kernel = linear_kernel(Variant.parse(KERNELS[bits]), "cuda")
    one = kernel.pack(torch.randn(n, k, device="cuda") * k**-0.5)
    whole = {
        role: tensor.repeat(experts, *[1] * (tensor.dim() - 1))
        for role, tensor in one.tensors.items()
    }
    first = Packed(one.layout, n * experts, k, whole)
    more = -(-2 * _LAST_LEVEL_BYTES // first.bytes) - 1
    return [first] + [
        Packed(first.layout, first.n, k, {role: t.clone() for role, t in whole.items()})
        for _ in range(more)
    ]


def timed(x: Tensor, weights: list[Packed], ends: Tensor) -> float:
    """Microseconds of a call."""
    turn = itertools.cycle(weights)
    calls = [lambda: _grouped_linear.run(x, next(turn), ends)] * len(weights)
    return 1e6 * call_seconds(calls, most_s=0.02)


def ready() -> None:
    """Give a thread its context, without which nothing is loaded."""
    torch.zeros(1, device="cuda")


@torch.inference_mode()
def main() -> None:
    """Compile all variants side by side, then time them."""
    ready()
    with ThreadPoolExecutor(initializer=ready) as pool:
        every = [(bits, *variant) for bits in KERNELS for variant in GRID]
        list(pool.map(lambda of: compiled(*of, grouped=True), every))
    for (n, k, experts, active), bits in itertools.product(SHAPES, KERNELS):
        weights = copies(n, k, experts, bits)
        for each in EACH:
            rows = max(1, each * experts // active)
            chosen = torch.rand(rows, experts, device="cuda").topk(active).indices
            counts = torch.bincount(chosen.reshape(-1), minlength=experts)
            ends = counts.cumsum(0).to(torch.int32)
            x = torch.randn(rows * active, k, device="cuda").bfloat16()
            found = {}
            for variant in GRID:
                with (
                    patch.object(_grouped_linear, "_row_tiles", lambda *_, v=variant: v[0]),
                    patch.object(_grouped_linear, "_shape", lambda *_, v=variant: v[1:]),
                    patch.object(_grouped_linear, "_FEW_PLAIN_ROWS", 1 << 20),
                ):
                    found[variant] = timed(x, weights, ends)
            with patch.object(_grouped_linear, "_FEW_PLAIN_ROWS", 1 << 20):
                taken = timed(x, weights, ends)
            torchs = ""
            if bits == 16:
                with patch.object(_grouped_linear, "_FEW_PLAIN_ROWS", 0):
                    torchs = f", torch {timed(x, weights, ends):.1f}"
            best = sorted(found.items(), key=lambda item: item[1])[:_BEST]
            print(
                f"{n} x {k}, {experts} experts, {bits} bits, {each} rows each:",
                ", ".join(f"{variant} {us:.1f}" for variant, us in best),
                f"| taken {taken:.1f}{torchs}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
