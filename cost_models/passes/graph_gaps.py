"""`measured_gaps`: what a GPU spends between the kernels of a CUDA graph. Imports torch.

Times are of chains, each kernel depending on the one before it, so that nothing overlaps. Calls of
the end-to-end check are timed as they wait in a queue (`call_timer`); a graph hands its kernels on
faster or slower than a queue does, and behind another kernel each takes longer than behind itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from foreplan.datasets.timing.graph_timer import Call, graph_seconds, median_seconds

#: Kernels of a chain, and cycles of a kernel that only waits (10 us).
_CHAIN, _SPIN_CYCLES = 200, 20_000
#: Spins of the kernel that holds the queue up meanwhile: 5 ms or a little more.
_HOLD_CYCLES = 10_000_000
#: Rows of single operators, and their widths.
_ROWS, _WIDTHS = (1, 64, 512, 4096), (256, 2048)


def measured_gaps(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds between kernels on a GPU that is idle otherwise; 5 s.

    Args:
        device: ``cuda:N``.
        dtype: of weights and activations.

    Returns:
        ``queued_s`` and ``graph_s``: of one of 200 additions of one number, in a queue and in a
        graph; ``queued_gap_s`` and ``graph_gap_s``: from the end of a kernel to the start of the
        next, of kernels that wait for 10 us; ``switch_s``: what an operator of a decoder's layer
        takes longer in a graph of all of them than in one of itself; ``alone``: rows of operator,
        rows, width, seconds in a queue and in a graph.
    """
    spin: Any = torch.cuda._sleep  # untyped
    with torch.cuda.device(device), torch.inference_mode():
        number = torch.zeros(1, device=device)
        waits = [lambda: spin(_SPIN_CYCLES)] * _CHAIN
        whole = [lambda: spin(_SPIN_CYCLES * _CHAIN)]
        chain = [lambda: number.add_(1.0)] * _CHAIN
        layer = list(_operators(device, dtype, 512, 2048).values())
        apart = sum(graph_seconds([call] * 32) / 32 for call in layer)
        together = graph_seconds(layer * 32) / 32
        return {
            "queued_s": queued_seconds(chain) / _CHAIN,
            "graph_s": graph_seconds(chain) / _CHAIN,
            "queued_gap_s": (queued_seconds(waits) - queued_seconds(whole)) / (_CHAIN - 1),
            "graph_gap_s": (graph_seconds(waits) - graph_seconds(whole)) / (_CHAIN - 1),
            "switch_s": (together - apart) / len(layer),
            "alone": [
                [name, rows, width, queued_seconds([call] * 32) / 32,
                 graph_seconds([call] * 32) / 32]
                for rows in _ROWS for width in _WIDTHS
                for name, call in _operators(device, dtype, rows, width).items()
            ],
        }  # fmt: skip


def queued_seconds(calls: Sequence[Call]) -> float:
    """Median seconds of calls that wait in the queue until all have been issued."""
    spin: Any = torch.cuda._sleep  # untyped

    def queue() -> None:
        spin(_HOLD_CYCLES)

    def run() -> None:
        for call in calls:
            call()

    run()
    return median_seconds(queue, run)


def _operators(device: str, dtype: torch.dtype, rows: int, width: int) -> dict[str, Call]:
    """Operators of a decoder's layer, by name; operands are near after the first call."""
    x, weight = (
        torch.rand(n, width, device=device).add_(0.5).to(dtype) for n in (rows, width)
    )  # fmt: skip
    factor = torch.rand(width, device=device).to(dtype)
    ids = torch.zeros(1, rows, dtype=torch.int64, device=device)
    heads = x.view(1, rows, width // 64, 64).transpose(1, 2)
    return {
        "add": lambda: x + x,
        "mul": lambda: x * 2.0,
        "gelu": lambda: F.gelu(x),
        "copy": lambda: x.to(torch.float32),
        "norm": lambda: F.layer_norm(x, (width,), factor, factor),
        "softmax": lambda: torch.softmax(x, -1),
        "mean": lambda: x.mean(-1, keepdim=True),
        "linear": lambda: F.linear(x, weight),
        "embedding": lambda: F.embedding(ids, weight),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
    }
