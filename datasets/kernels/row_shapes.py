"""`RowShape`: how the fused kernel for tens of rows cuts a product into blocks, and what it takes.

Blocks of one shape take their share of the inputs in steps that last alike, whatever they multiply,
and as many run at a time as the GPU has multiprocessors:

    t = waves * (steps * step + block + split) + call

with ``split`` where a cluster sums what its blocks found. The kernel takes the shape that is
fastest by this law, and costs are priced by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

#: Rows for which the kernel is asked, at most: beyond, a weight that is written out and multiplied
#: by cuBLAS is faster, or near it (``measured``: with 256 rows the kernel takes 0.75 of that time
#: in the mean of ten shapes, with 384 0.95, with 768 1.2; docs/results/kernels.md).
MOST_ROWS = 384
#: Compute capability of the GPUs that have its instructions.
CAPABILITY = "9.0"
#: Rows of a block are so many, or twice that.
BLOCK_ROWS = 64
#: Inputs of a group, of which a step takes one or several.
_GROUP = 64
#: Multiprocessors of the GPU that shapes are chosen for: a whole H200.
_UNITS = 132
#: Blocks of a cluster of 1, 2 and 4 that share what a row needs.
_SPLITS = (1, 2, 4)
#: Share of the multiprocessors in which clusters of four find room, which lie in one part of the
#: chip each (``measured``: 128 such blocks take two waves of 132).
_ROOM_OF_FOUR = 10 / 11


class RowShape(NamedTuple):
    """How a product is cut.

    Attributes:
        row_tiles: of 64 rows a block.
        feature_tiles: of 64 features that four warps have.
        feature_groups: of four warps along the features.
        input_groups: of four warps along the inputs, which take 64 in turn.
        split: blocks of a cluster, along the inputs.
    """

    row_tiles: int
    feature_tiles: int
    feature_groups: int
    input_groups: int
    split: int = 1

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return BLOCK_ROWS * self.row_tiles

    @property
    def features(self) -> int:
        """Features of a block."""
        return 64 * self.feature_tiles * self.feature_groups

    def shared_bytes(self, bits: int) -> int:
        """Shared memory of a block: two steps of inputs, four of fragments; then its sums."""
        warps = 4 * self.feature_groups * self.input_groups
        inputs = 128 * self.input_groups * self.rows
        fragments = warps * self.feature_tiles * (128 * bits + (64 if bits == 4 else 0))
        partial = self.input_groups // 2 * 4 * self.features * self.rows
        return max(2 * inputs + 4 * fragments, partial, 4 * self.rows * (self.features + 4))


class _Seconds(NamedTuple):
    """Of a shape: a step, a block beside its steps, its part in a cluster's sum, a call."""

    step: float
    block: float
    split: float
    call: float


#: By bits of a value and shape (``fitted``: 966 times of int4 and int8 on a whole H200, seven
#: layers of 48-768 rows, shape by shape; of the chosen ones 42 products of three other layers were
#: 2-3 % off, and at most 7 % behind the fastest of 21; tests/benchmarks/fragment_rows_cuda.py).
_FITTED: Mapping[int, Mapping[RowShape, _Seconds]] = MappingProxyType({
    4: {
        RowShape(1, 1, 1, 4): _Seconds(0.902e-6, 2.557e-6, 1.112e-6, 0.793e-6),
        RowShape(1, 1, 4, 1): _Seconds(0.653e-6, 3.100e-6, 1.182e-6, 0.521e-6),
        RowShape(2, 2, 2, 1): _Seconds(0.960e-6, 4.334e-6, 1.793e-6, 0.724e-6),
    },
    8: {
        RowShape(1, 1, 1, 4): _Seconds(0.951e-6, 2.505e-6, 1.260e-6, 1.285e-6),
        RowShape(1, 1, 4, 1): _Seconds(0.663e-6, 3.132e-6, 1.201e-6, 0.790e-6),
        RowShape(2, 1, 4, 1): _Seconds(0.906e-6, 5.565e-6, 1.378e-6, 0.053e-6),
    },
})  # fmt: skip


def takes_blocks(rows: int, compute_capability: str | None) -> bool:
    """Whether a GPU multiplies more rows than few by that kernel.

    Args:
        rows: of the input, more than `foreplan.datasets.kernels.registry.ROWS_A_CALL`.
        compute_capability: of the GPU, ``None`` = unknown.
    """
    return rows <= MOST_ROWS and compute_capability == CAPABILITY


def row_shape(bits: int, rows: int, n: int, k: int) -> RowShape:
    """The fastest shape on a whole H200.

    Args:
        bits: of the weight's values, 4 or 8.
        rows: of the input.
        n: features.
        k: inputs of each, a multiple of 64.
    """
    shapes = [shape._replace(split=split) for shape in _FITTED[bits] for split in _SPLITS]
    return min(shapes, key=lambda shape: _seconds(shape, bits, rows, n, k, _UNITS))


def row_seconds(bits: int, rows: int, n: int, k: int, units: int) -> float:
    """Seconds of the kernel on multiprocessors of an H200, however many there are.

    Args:
        bits: of the weight's values, 4 or 8.
        rows: of the input.
        n: features.
        k: inputs of each.
        units: multiprocessors of the GPU or its slice.
    """
    return _seconds(row_shape(bits, rows, n, k), bits, rows, n, k, units)


def _seconds(shape: RowShape, bits: int, rows: int, n: int, k: int, units: int) -> float:
    split = shape.split
    took = _FITTED[bits][shape._replace(split=1)]
    blocks = -(-rows // shape.rows) * -(-n // shape.features) * split
    room = max(split, int(units * _ROOM_OF_FOUR) if split == max(_SPLITS) else units)
    groups = -(-(k // _GROUP) // split)
    steps = -(-groups // shape.input_groups)
    each = steps * took.step + took.block + (took.split if split > 1 else 0.0)
    return -(-blocks // room) * each + took.call
