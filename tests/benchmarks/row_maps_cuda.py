"""How long maps of rows take on a GPU, in one launch and by torch's operators.

    python tests/benchmarks/row_maps_cuda.py

One JSON line a program: median microseconds a call inside a CUDA graph, as `foreplan profile` times
it. Needs a CUDA device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

from foreplan.datasets.kernels import _row_maps
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.graph_timer import graph_seconds

ROWS = (1, 8, 32, 128, 512, 2048, 8192)
#: Heads, heads of keys, features of a head, hidden, ffn: Llama 3.2 1b, 3.1 8b, Gemma 2 2b, a Qwen3.
SHAPES = (
    (32, 8, 64, 2048, 8192),
    (32, 8, 128, 4096, 14336),
    (8, 4, 256, 2304, 9216),
    (64, 8, 128, 5120, 25600),
)
_CALLS = 64  # of one graph, whose own start then does not count
_BF16 = "bf16/bf16/torch."


def programs() -> Iterator[Program]:
    """Each program that a row takes, at each number of rows."""
    for heads, kv_heads, features, hidden, ffn in SHAPES:
        for rows in ROWS:
            turned = {"rows": rows, "heads": heads + kv_heads, "head_dim": features}
            yield program("rope", Variant.parse(f"{_BF16}rope"), **turned)
            yield program("norm", Variant.parse(f"{_BF16}rms_norm"), rows=rows, cols=hidden)
            norm = {"rows": rows * kv_heads, "cols": features}
            yield program("norm", Variant.parse(f"{_BF16}rms_norm"), **norm)
            for name in ("silu_mul", "gelu_tanh_mul", "clamped_silu_mul"):
                yield program("activation", Variant.parse(_BF16 + name), rows=rows, cols=ffn)
            written = {"batch": min(rows, 8), "tokens": max(1, rows // 8), "kv_heads": kv_heads}
            for name in (f"{_BF16}copy", "int8/bf16/torch.quantise_copy"):
                yield program("cache_write", Variant.parse(name), **written, head_dim=features)


def seconds(item: Program) -> float:
    """Of a call, as it is profiled."""
    made = Inputs("cuda:0", behind_one_another=True).runnable(item)
    calls = [made.call] * max(_CALLS, made.turns or 1)
    return graph_seconds(calls, most_s=0.05) / len(calls)


def main() -> None:
    """Print a line a program."""
    for item in programs():
        once = seconds(item)
        with ExitStack() as stack:
            for name, answer in (
                ("rotated", None), ("gated", None), ("rms_norm", None), ("written", False),
            ):  # fmt: skip
                stack.enter_context(patch.object(_row_maps, name, lambda *_, a=answer: a))
            by_torch = seconds(item)
        line = {"op": item.op, "kernel": item.variant.kernel, **item.dims}
        line |= {"one launch": round(1e6 * once, 2), "torch": round(1e6 * by_torch, 2)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
