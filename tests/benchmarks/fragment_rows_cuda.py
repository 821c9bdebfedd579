"""How long each shape of the fused kernel for tens of rows takes, and what the law of shapes says.

    python tests/benchmarks/fragment_rows_cuda.py measure TIMES.jsonl
    python tests/benchmarks/fragment_rows_cuda.py score TIMES.jsonl

``measure`` needs a GPU of compute capability 9.0: weights lie in memory and not in the last-level
cache, as `linear_cuda`'s. The constants of `row_shapes` are fitted to `FITTED`'s layers. ``score``
says how far off they are, how far the chosen shape is behind the fastest, and what the kernel takes
beside the ways without it, layer by layer; of layers that were fitted and others apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from foreplan.datasets.kernels.registry import Packed, linear_kernel
from foreplan.datasets.kernels.row_shapes import MOST_ROWS, RowShape, row_seconds, row_shape
from foreplan.datasets.program import Variant

#: Features and inputs of the layers that the law is fitted to, and of others.
FITTED = (
    (8192, 8192), (4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (6144, 2048),
    (3072, 8192),
)  # fmt: skip
OTHERS = ((5120, 5120), (22016, 4096), (1536, 8960))
ROWS = (48, 64, 96, 128, 192, 256, 384, 512, 768)
SHAPES = [
    RowShape(*shape, split)
    for shape in (
        (1, 1, 1, 4), (1, 1, 4, 1), (1, 1, 2, 1), (1, 2, 1, 2), (2, 1, 2, 1), (2, 2, 2, 1),
        (2, 1, 4, 1),
    )
    for split in (1, 2, 4)
]  # fmt: skip
VARIANTS = {bits: f"int{bits}/bf16/foreplan.fragment_linear" for bits in (4, 8)}
_LAST_LEVEL_BYTES, _MOST_S = 130_000_000, 0.012


def measure(file: Path) -> None:
    """Time every shape; a line a layer, bits and rows."""
    import torch

    from foreplan.datasets.kernels import _fragment_rows
    from foreplan.datasets.timing.graph_timer import graph_seconds

    def ready() -> None:
        torch.zeros(1, device="cuda")  # a thread has no context before its first call

    def copies(weight: torch.Tensor, text: str) -> tuple[Any, list[Packed]]:
        kernel = linear_kernel(Variant.parse(text), "cuda")
        one = kernel.pack(weight)
        count = max(2, -(-_LAST_LEVEL_BYTES // one.bytes))
        n, k = weight.shape
        more = [
            Packed(one.layout, n, k, {role: t.clone() for role, t in one.tensors.items()})
            for _ in range(count - 1)
        ]
        return kernel, [one, *more]

    def timed(call: Any, packs: list[Packed]) -> float:
        calls = [partial(call, packed) for packed in packs]
        return graph_seconds(calls, most_s=_MOST_S) / len(packs)

    ready()
    with ThreadPoolExecutor(initializer=ready) as pool:
        asked = [(bits, shape) for bits in VARIANTS for shape in SHAPES]
        list(pool.map(lambda one: _fragment_rows.compiled(*one), asked))
    with file.open("w") as out, torch.inference_mode():
        for n, k in (*FITTED, *OTHERS):
            weight = torch.randn(n, k, device="cuda") * k**-0.5
            plain, whole = copies(weight, "bf16/bf16/torch.linear")
            packed = {bits: copies(weight, text) for bits, text in VARIANTS.items()}
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda").bfloat16()
                bf16 = timed(lambda one, x=x, run=plain.run: run(x, one, None), whole)
                for bits, (kernel, packs) in packed.items():
                    with patch.object(_fragment_rows, "fits", return_value=False):
                        without = timed(lambda one, x=x, run=kernel.run: run(x, one, None), packs)
                    found = {}
                    for shape in SHAPES:
                        with patch.object(_fragment_rows, "row_shape", return_value=shape):
                            call = partial(_call, _fragment_rows.run, x, bits)
                            found[str(tuple(shape))] = timed(call, packs)
                    row = {"n": n, "k": k, "rows": rows, "bits": bits, "bf16_s": bf16,
                           "without_s": without, "seconds": found}  # fmt: skip
                    print(json.dumps(row), file=out, flush=True)


def _call(run: Any, x: Any, bits: int, packed: Packed) -> Any:
    return run(x, packed, None, bits)


def score(file: Path) -> None:
    """Print what the law is worth."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for name, layers in (("fitted layers", FITTED), ("other layers", OTHERS)):
        found = list(_judged([row for row in rows if (row["n"], row["k"]) in layers]))
        off, behind = zip(*found, strict=True)
        print(
            f"{name}: {len(found)} products, the law {100 * fmean(off):.1f} % off in the mean, "
            f"{100 * max(off):.0f} at most; its shape {100 * fmean(behind):.1f} % behind the "
            f"fastest, {100 * max(behind):.0f} at most"
        )
    for row in rows:
        shape = str(tuple(row_shape(row["bits"], row["rows"], row["n"], row["k"])))
        us = 1e6 * row["seconds"][shape]
        print(
            f"{row['n']:6} x {row['k']:5}, {row['rows']:4} rows, {row['bits']} bits: {us:6.1f} us, "
            f"without {1e6 * row['without_s']:6.1f}, bf16 {1e6 * row['bf16_s']:6.1f}"
        )


def _judged(rows: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Error of the law's time, and how far its shape is behind, where the kernel is taken."""
    for row in rows:
        asked = (row["bits"], row["rows"], row["n"], row["k"])
        if row["rows"] > MOST_ROWS:
            continue
        took = row["seconds"][str(tuple(row_shape(*asked)))]
        predicted = row_seconds(*asked, units=132)
        yield abs(predicted / took - 1), took / min(row["seconds"].values()) - 1


def main() -> None:
    """Measure or score."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "score"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    {"measure": measure, "score": score}[options.what](options.file)


if __name__ == "__main__":
    main()
