"""Time of a matrix product by the tile that its kernel computes: waves, split sums, lost reuse.

A kernel cuts ``m x n`` outputs into tiles, one a block, and the multiprocessors take them in waves.
Three things follow, all from published figures of the device:

- **Waves.** ``ceil(tiles / units)`` rounds of a tile's FLOP (NeuSight's structure; the formulas are
  our own).
- **Split sums.** Where too few tiles would leave multiprocessors idle, libraries cut the contracted
  size ``k`` into 2-16 parts, each a tile of its own, and add them up afterwards: that writes and
  reads the output once a part. Batched products are not split.
- **Lost reuse.** Tiles that run at once share rows and columns of the operands through L2 as long
  as what they use at about the same time fits, which is a few hundred steps of their stripes; where
  it does not, every tile fetches its own.

Shape legend: ``N`` rows of a table, ``T`` = `TILES` or `KERNEL_TILES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Tiles (rows x columns of output) that GEMM kernels use, largest first.
TILES = ((256, 128), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32))

#: What cuBLAS's FP32 kernels name; the last two only with sums split inside a block.
KERNEL_TILES = (*TILES, (64, 32), (32, 64))

#: Tiles whose waves are features.
_SHOWN = ((128, 128), (128, 64), (64, 64), (32, 32), (32, 128), (128, 32))

#: Parts of the contracted size, and the least of it that a part keeps. Assumed.
_SPLITS, _LEAST_PART = (1, 2, 4, 8, 16), 256.0

#: Tiles of one multiprocessor that are under way at once. Assumed.
_RESIDENT = 4.0

#: Steps of ``k`` that tiles under way are apart at most. Assumed: from 128 steps to all of ``k``
#: the five GPUs of NeuSight's table, each held out, have 14.9 to 15.0 % (bmm) and 18.0 to 18.6 %
#: (linear). None of them has little bandwidth and much arithmetic; with all of ``k`` large squares
#: came out at 11 to 25 % of an L4's or RTX 4090's peak (docs/results/operators_history.md).
_APART = 256.0

#: Columns that say something of the kernel's own tile; NaN where nobody knows it.
CHOSEN = ("log_tile_rows", "log_tile_cols", "log_waves", "wave_fill", "tile_fill",
          "log_stripes_to_l2", "log_traffic_to_compute")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products and what their devices offer; every field (N,).

    Attributes:
        b, m, n, k: batch, output's rows and columns, contracted size.
        peak: FLOP/s.
        units: multiprocessors.
        bandwidth: of the memory, bytes/s.
        bytes: that must move.
        split: whether the library may split the sum.
    """

    b: Floats
    m: Floats
    n: Floats
    k: Floats
    peak: Floats
    units: Floats
    bandwidth: Floats
    bytes: Floats
    split: NDArray[np.bool_]

    def count(self, rows: Floats | float, cols: Floats | float) -> Floats:
        """Tiles of the output (N,)."""
        return np.asarray(self.b * np.ceil(self.m / rows) * np.ceil(self.n / cols))


def wave_columns(item: Product) -> dict[str, Floats]:
    """Waves, and how full waves and tiles are, of some usual tiles."""
    columns: dict[str, Floats] = {}
    for rows, cols in _SHOWN:
        count, name = item.count(rows, cols), f"{rows}x{cols}"
        columns[f"log_waves_{name}"] = np.log(count / item.units)
        columns[f"wave_fill_{name}"] = count / item.units / np.ceil(count / item.units)
        columns[f"tile_fill_{name}"] = item.b * item.m * item.n / (count * rows * cols)
    return columns


def tile_seconds(item: Product, rows: Floats | float, cols: Floats | float) -> Floats:
    """Seconds of the arithmetic in tiles of rows x cols, the sum split as is best (N,)."""
    count = item.count(rows, cols)
    # A tile streams rows + cols operands for rows * cols results: small ones starve the units.
    # 64 and 0.15 are assumed: a tile of 128 x 128 reaches 87 % of the peak, one of 32 x 32 62 %.
    feed = rows * cols / (rows + cols) / 64.0
    rate = item.peak / item.units * feed / (feed + 0.15)
    best = np.full(len(count), np.inf)
    for parts in _SPLITS:
        # The prologue and epilogue of a tile cost about as much as 16 steps of k (assumed).
        steps = np.ceil(item.k / parts) + 16.0
        spent = np.ceil(count * parts / item.units) * 2.0 * rows * cols * steps / rate
        if parts > 1:
            added = item.b * item.m * item.n * 4.0 * (parts + 1) / item.bandwidth
            allowed = item.split & (item.k >= _LEAST_PART * parts)
            spent = np.where(allowed, spent + added, np.inf)
        best = np.fmin(best, spent)
    return np.where(np.isfinite(best), best, np.nan)


def best_tile_seconds(item: Product) -> Floats:
    """Seconds of the arithmetic with the best of `TILES` (N,)."""
    return np.asarray(np.min(np.stack([tile_seconds(item, *tile) for tile in TILES]), axis=0))


def chosen_tile(
    item: Product, tile: NDArray[np.int64], *, widths: tuple[Floats, Floats], l2: Floats
) -> tuple[dict[str, Floats], Floats]:
    """Features of a known tile (`CHOSEN`), and the seconds of arithmetic or traffic (N,).

    Args:
        item: the products.
        tile: index into `KERNEL_TILES`, -1 where it is not known (N,).
        widths: bytes of an element of either operand (N,) each.
        l2: bytes (N,), NaN where unknown.
    """
    rows, cols = np.array(KERNEL_TILES, dtype=np.float64)[tile].T
    compute = tile_seconds(item, rows, cols)
    count = item.count(rows, cols)
    # Blocks go down the rows of the output first.
    down = np.ceil(item.m / rows)
    at_once = np.minimum(count, _RESIDENT * item.units)
    rows_at_once = np.minimum(at_once, down) * rows * widths[0]
    stripes = (rows_at_once + np.ceil(at_once / down) * cols * widths[1]) * item.k
    shared = count / at_once * stripes
    alone = np.maximum(count * (rows * widths[0] + cols * widths[1]) * item.k, shared)
    # Gradual (assumed), because blocks lose step with each other little by little. 0.75 of L2, the
    # power of 6 and 0.85 of the bandwidth are those of `memory_time`, fitted on an A100.
    in_use = stripes * np.minimum(1.0, _APART / item.k)
    missed = 1 / (1 + 0.75 * l2 / in_use)
    traffic = np.maximum(np.exp(np.log(shared) + missed * np.log(alone / shared)), item.bytes)
    from_memory = 1 / (1 + (0.75 * l2 / item.bytes) ** 6)
    memory = np.nan_to_num(traffic / (0.85 * item.bandwidth) * from_memory)
    values = (
        np.log(rows), np.log(cols), np.log(count / item.units),
        count / item.units / np.ceil(count / item.units),
        item.b * item.m * item.n / (count * rows * cols),
        np.log(stripes / l2), np.log(memory / compute),
    )  # fmt: skip
    known = tile >= 0
    columns = {
        name: np.where(known, column, np.nan) for name, column in zip(CHOSEN, values, strict=True)
    }
    best = best_tile_seconds(item) if not known.all() else compute
    return columns, np.where(known, np.maximum(compute, memory), best)
