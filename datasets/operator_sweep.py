"""Time torch's library operators over a random grid of shapes on one CUDA device.

Run as ``PYTHONPATH=src python -m foreplan.datasets.operator_sweep -o FILE``; needs torch, numpy and
pyarrow alone, so that it runs on a machine without the rest. Writes the columns of
`operator_table.write_operators`.

The label follows NeuSight's convention, so that rows of both can be trained on together: each call
is timed by a pair of CUDA events on an idle device, launch included; the label is the mean of the 5
fastest of 25 (of 10 where one call takes over 5 ms). FP32 runs with TF32 off. Operands are views of
one random buffer, because zeros run faster than data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

#: Largest FLOP and bytes of one sampled operator: about 20 ms on an H200 in FP32.
_MOST_FLOPS, _MOST_BYTES = 8e11, 8e9


class Case(NamedTuple):
    """One operator to time: its name and kind, data type, dimensions and the call."""

    op: str
    kind: str
    dtype: str
    dims: dict[str, int]
    call: Callable[[], Any]


def cases(counts: dict[str, int], seed: int, buffer: Any) -> Iterator[Case]:
    """Sample operators.

    Args:
        counts: how many of each: ``bmm``, ``linear``, ``wide`` (each elementwise operator, softmax
            and layer norm).
        seed: of the shapes.
        buffer: 1-D FP32 CUDA tensor that operands are views of.
    """
    import torch
    import torch.nn.functional as F

    rng = np.random.default_rng(seed)

    def view(dtype: Any, offset: int, *shape: int) -> Any:
        start = -(-offset // 256) * 256  # allocators align tensors, and kernels count on it
        return buffer.view(dtype)[start : start + int(np.prod(shape))].view(*shape)

    dtypes = {"fp32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    for name in ("fp32", "bfloat16"):
        dtype, width = dtypes[name], 4 if name == "fp32" else 2
        share = 1.0 if name == "fp32" else 0.5
        for _ in range(int(counts["bmm"] * share)):
            b, m, n, k = _product_shape(rng, batched=True, width=width)
            x, y = view(dtype, 0, b, m, k), view(dtype, b * m * k, b, k, n)
            yield Case("bmm", "bmm", name, {"b": b, "m": m, "n": n, "k": k},
                       partial(torch.bmm, x, y))  # fmt: skip
        for _ in range(int(counts["linear"] * share)):
            _, m, n, k = _product_shape(rng, batched=False, width=width)
            x, w = view(dtype, 0, m, k), view(dtype, m * k, n, k)
            bias = view(dtype, 0, n)
            yield Case("linear", "linear", name, {"b": 1, "m": m, "n": n, "k": k},
                       partial(F.linear, x, w, bias))  # fmt: skip
    binary: dict[str, Any] = {
        "add": torch.add, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    }  # fmt: skip
    unary: dict[str, Any] = {"relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh}
    cost = {"add": 1, "mul": 1, "div": 2, "pow": 8, "relu": 1, "gelu": 8, "tanh": 6}
    for _ in range(counts["wide"]):
        for op in (*binary, *(f"{name}u" for name in binary), *unary, "softmax", "ln"):
            rows, cols = _wide_shape(rng)
            x, y = view(torch.float32, 0, rows, cols), view(torch.float32, rows * cols, rows, cols)
            base = op[:-1] if op.endswith("u") and op[:-1] in binary else op
            call: Callable[[], Any]
            inputs, kind = 1, "elementwise"
            if op in binary:
                inputs = 2
                call = partial(binary[op], x, y)
            elif base in binary:
                call = partial(binary[base], x, 2.0)
            elif op in unary:
                call = partial(unary[op], x)
            elif op == "softmax":
                inputs, kind = 0, "softmax"
                call = partial(torch.softmax, x, -1)
            else:
                inputs, kind = 0, "layernorm"
                w = view(torch.float32, 0, cols)
                call = partial(F.layer_norm, x, w.shape, w, w)
            dims = {"rows": rows, "cols": cols, "inputs": inputs, "cost": cost.get(base, 0)}
            yield Case(op, kind, "fp32", dims, call)


def _product_shape(
    rng: np.random.Generator, *, batched: bool, width: int
) -> tuple[int, int, int, int]:
    while True:
        if batched:
            top = rng.choice([10.0, 12.0, 14.0], p=[0.6, 0.25, 0.15])
            sizes = 2.0 ** rng.uniform([0, 3, 3, 3], [10, top, top, top])
        else:
            sizes = 2.0 ** rng.uniform([0, 2, 4, 4], [0, 13, 16, 16])
        shape = np.maximum(np.round(sizes), 1).astype(int)
        if rng.random() < 0.5:  # models have round sizes
            shape[1:] = np.maximum(shape[1:] // 64, 1) * 64
        b, m, n, k = (int(size) for size in shape)
        small = width * b * (m * k + k * n + m * n) < _MOST_BYTES
        if small and 2.0 * b * m * n * k < _MOST_FLOPS:
            return b, m, n, k


def _wide_shape(rng: np.random.Generator) -> tuple[int, int]:
    while True:
        rows, cols = (int(2.0 ** rng.uniform(low, high)) for low, high in ((1, 17), (4, 15)))
        if rng.random() < 0.5 and cols > 64:
            cols = cols // 64 * 64
        if 12.0 * rows * cols < _MOST_BYTES / 2:
            return rows, cols


def time_call(call: Callable[[], Any]) -> float:
    """Seconds of one call: mean of the 5 fastest, launch included, device idle before each."""
    import torch

    event: Any = torch.cuda.Event  # untyped
    start, stop = event(enable_timing=True), event(enable_timing=True)
    times: list[float] = []
    repeat = 25
    for _ in range(3):
        call()
    while len(times) < repeat:
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
        if times[0] > 5e-3:
            repeat = 10
    return float(np.mean(sorted(times)[:5]))


def main() -> None:
    """Sweep, and write the table."""
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
    import torch

    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--bmm", type=int, default=2000)
    parser.add_argument("--linear", type=int, default=2000)
    parser.add_argument("--wide", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=280.0, help="stop after this long")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    buffer = torch.randn(int(2 * _MOST_BYTES / 4), device="cuda").abs_().clamp_(0.5, 1.5)
    device = torch.cuda.get_device_name()
    library = "torch-" + ".".join(torch.__version__.split(".")[:2]) + "-cuda"
    wanted = list(cases({"bmm": options.bmm, "linear": options.linear, "wide": options.wide},
                        options.seed, buffer))  # fmt: skip
    wanted = [wanted[i] for i in np.random.default_rng(options.seed).permutation(len(wanted))]
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    with torch.no_grad():
        for index, case in enumerate(wanted):
            if time.monotonic() - begun > options.seconds:
                print(f"stopped after {index} of {len(wanted)}", flush=True)
                break
            row = {"op": case.op, "kind": case.kind, "dtype": case.dtype, "library": library,
                   "device": device, **{name: float(size) for name, size in case.dims.items()},
                   "latency_s": time_call(case.call), "source_row": index}  # fmt: skip
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    full = [{name: row.get(name, 0.0) for name in names} for row in rows]
    pq.write_table(pa.Table.from_pylist(full), options.output, compression="zstd")
    print(f"{len(rows)} rows in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
